//! The writes of a turn that runs on this node. While Postgres does not answer they are made again; one whose answer
//! was lost is not made twice.

use std::time::Duration;

use super::accept::RunnableTurn;
use super::outcome::begin_next;
use super::reply::{self, AnsweredTurn};
use crate::app::App;
use crate::auth::ServiceCaller;
use crate::domain::bridge::delivery::ReplyVia;
use crate::domain::conversation::message::NewMessage;
use crate::domain::turn::TurnState;
use crate::domain::turn::event::NewEvent;
use crate::error::Result;
use crate::ids::TenantId;
use crate::retry::Backoff;
use crate::store::TenantTx;
use crate::store::conversation::conversations;
use crate::store::turn::turn_lease::TurnLease;
use crate::store::turn::turn_writes::{Change, TurnWrite, WriteAck};
use crate::telemetry;

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const MAX_PAUSE: Duration = Duration::from_secs(1);
/// After that the node that claims the turn has to find out what is in the database.
const MAX_ATTEMPTS: usize = 120;

#[derive(Debug)]
pub enum WriteOutcome {
    Applied(WriteAck),
    /// The turn is no longer this node's. Nothing was written, and nothing will be.
    LeaseLost,
}

pub struct TurnWriter {
    pub app: App,
    pub tenant_id: TenantId,
    pub lease: TurnLease,
    /// Text of the answer that is not among the events yet.
    pub pending_text: String,
}

impl TurnWriter {
    /// Writes and goes on.
    pub async fn write(
        &mut self,
        messages: &[NewMessage],
        events: &[NewEvent],
    ) -> Result<WriteOutcome> {
        let change = Change::default();
        let (outcome, _) = self.apply(messages, events, change).await?;
        Ok(outcome)
    }

    /// Renews the lease, and learns whether the turn is to stop.
    pub async fn renew(&mut self) -> Result<WriteOutcome> {
        let mut tx = self.begin().await?;
        let ack = self.lease.renew(&mut tx).await?;
        tx.commit().await?;
        Ok(match ack {
            Some(ack) => WriteOutcome::Applied(ack),
            None => self.lost(),
        })
    }

    /// The last write: the turn's end, and the start of the conversation's next one. Also the write that leaves a
    /// turn waiting for its client, after which none starts.
    pub async fn end(
        &mut self,
        messages: &[NewMessage],
        events: &[NewEvent],
        change: Change<'_>,
    ) -> Result<(WriteOutcome, Option<RunnableTurn>)> {
        self.apply(messages, events, change).await
    }

    /// Releases the turn to whichever node claims it first.
    pub async fn release(&self) -> Result<()> {
        let mut tx = self.begin().await?;
        self.lease.release(&mut tx).await?;
        tx.commit().await
    }

    pub async fn begin(&self) -> Result<TenantTx> {
        ServiceCaller::for_tenant(self.tenant_id)
            .begin(&self.app.db)
            .await
    }

    fn lost(&self) -> WriteOutcome {
        telemetry::count_fence_rejection();
        tracing::info!("turn lease lost");
        WriteOutcome::LeaseLost
    }

    async fn apply(
        &mut self,
        messages: &[NewMessage],
        events: &[NewEvent],
        change: Change<'_>,
    ) -> Result<(WriteOutcome, Option<RunnableTurn>)> {
        let pending_text = std::mem::take(&mut self.pending_text);
        let rest = (!pending_text.is_empty()).then(|| NewEvent::delta(pending_text));
        let events: Vec<NewEvent> = rest.into_iter().chain(events.iter().cloned()).collect();
        let write = TurnWrite {
            messages,
            events: &events,
            change,
        };
        let mut backoff = Backoff::new(FIRST_PAUSE, MAX_PAUSE);
        let mut attempt = 1;
        loop {
            let outcome = self.try_apply(&write, attempt > 1).await;
            match outcome {
                Err(error) if attempt < MAX_ATTEMPTS && error.is_transient() => {
                    tracing::warn!(error = %error, attempt, "turn write failed, trying again");
                    tokio::time::sleep(backoff.next_pause()).await;
                    attempt += 1;
                }
                outcome => return outcome,
            }
        }
    }

    async fn try_apply(
        &mut self,
        write: &TurnWrite<'_>,
        is_retry: bool,
    ) -> Result<(WriteOutcome, Option<RunnableTurn>)> {
        let now = self.app.clock.now();
        let mut tx = self.begin().await?;
        let Some(ack) = self.lease.write(&mut tx, write, now).await? else {
            return self.resolve_unacknowledged(tx, write, is_retry).await;
        };
        let has_ended = write.change.state.is_some_and(TurnState::has_ended);
        if has_ended {
            self.deliver(&mut tx, &ack, write).await?;
        }
        tx.commit().await?;
        self.lease.advance(write.messages.len(), now);
        let next = if has_ended && ack.has_followers {
            self.begin_next().await
        } else {
            None
        };
        Ok((WriteOutcome::Applied(ack), next))
    }

    /// Makes the answer a delivery, if nobody waits for it, in the transaction that ends the turn.
    async fn deliver(
        &self,
        tx: &mut TenantTx,
        ack: &WriteAck,
        write: &TurnWrite<'_>,
    ) -> Result<()> {
        let (Some(ReplyVia::Delivery), Some(to)) = (ack.reply_via, &self.lease.reply_to) else {
            return Ok(());
        };
        let answer = match write.change.state {
            Some(TurnState::Completed) => {
                let text = write.messages.last().map(NewMessage::text);
                reply::non_empty(text.unwrap_or_default())
            }
            Some(_) | None => Err(write.change.reason.unwrap_or_default()),
        };
        let turn = AnsweredTurn::of_lease(&self.lease);
        reply::deliver(tx, turn, to, answer, self.app.clock.now()).await
    }

    /// Nothing was written: an earlier attempt was made after all, or the turn is lost.
    async fn resolve_unacknowledged(
        &mut self,
        mut tx: TenantTx,
        write: &TurnWrite<'_>,
        is_retry: bool,
    ) -> Result<(WriteOutcome, Option<RunnableTurn>)> {
        if !is_retry || !self.lease.was_applied(&mut tx).await? {
            // A statement that waited for the conversation, and then found the turn lost, has numbered its events.
            tx.roll_back().await?;
            return Ok((self.lost(), None));
        }
        tx.commit().await?;
        self.lease
            .advance(write.messages.len(), self.app.clock.now());
        let next = self.begin_next().await;
        Ok((WriteOutcome::Applied(WriteAck::default()), next))
    }

    /// Starts the conversation's next turn, after this one's end was committed: a failure of the next one must not
    /// undo that. A sweeper starts what is not started here. A node that is shutting down leaves it to others.
    async fn begin_next(&self) -> Option<RunnableTurn> {
        if self.app.shutdown.is_stopping() {
            return None;
        }
        match self.try_begin_next().await {
            Ok(next) => next,
            Err(error) => {
                tracing::warn!(error = %error, cause = ?error.cause, "next turn not started");
                None
            }
        }
    }

    async fn try_begin_next(&self) -> Result<Option<RunnableTurn>> {
        let mut tx = self.begin().await?;
        let conversation_id = self.lease.conversation_id;
        if conversations::lock(&mut tx, conversation_id)
            .await?
            .is_none()
        {
            tx.end().await?;
            return Ok(None);
        }
        let now = self.app.clock.now();
        let next = begin_next(&self.app, &mut tx, conversation_id, now).await?;
        tx.commit().await?;
        Ok(next)
    }
}
