//! The writes of a turn that runs on this node. While Postgres does not answer they are made again; one
//! that was made although its answer was lost is not made twice.

use std::time::Duration;

use super::accept::RunnableTurn;
use super::outcome::begin_next;
use super::reply::{self, AnsweredTurn};
use super::runner;
use crate::app::App;
use crate::auth::ServiceCaller;
use crate::domain::bridge::delivery::{ReplyTo, ReplyVia};
use crate::domain::conversation::message::NewMessage;
use crate::domain::turn::TurnState;
use crate::domain::turn::event::NewEvent;
use crate::error::Result;
use crate::ids::{IdentityId, SessionId, TenantId};
use crate::store::TenantTx;
use crate::store::conversation::conversations;
use crate::store::turn::turn_writes::{self, Change, Fence, Write, WriteAck};
use crate::telemetry;

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Then whoever takes the turn over has to find out what is in the database.
const ATTEMPTS: usize = 60;

/// What a write came to.
#[derive(Debug)]
pub enum WriteOutcome {
    Fine(WriteAck),
    /// The turn is no longer this node's. Nothing was written, and nothing will be.
    Lost,
}

pub struct Writer {
    pub app: App,
    pub tenant_id: TenantId,
    pub conversation_id: SessionId,
    pub session_id: SessionId,
    pub speaker: Option<(IdentityId, String)>,
    pub attempt: i32,
    pub fence: Fence,
    /// Pieces of an answer that were said and are not among the events yet.
    pub pending_text: String,
    /// Where the answer goes when it becomes a delivery.
    pub reply_to: Option<ReplyTo>,
}

impl Writer {
    /// Writes and goes on.
    pub async fn write(
        &mut self,
        messages: &[NewMessage],
        events: &[NewEvent],
    ) -> Result<WriteOutcome> {
        let (wrote, _) = self.apply(messages, events, &Change::default()).await?;
        Ok(wrote)
    }

    /// Says that this node lives, and hears whether the turn is to stop.
    pub async fn renew(&mut self) -> Result<WriteOutcome> {
        let caller = ServiceCaller::for_tenant(self.tenant_id);
        let mut tx = caller.begin(&self.app.db).await?;
        let heard = turn_writes::renew(&mut tx, self.fence, runner(&self.app)).await?;
        tx.commit().await?;
        Ok(match heard {
            Some(heard) => WriteOutcome::Fine(heard),
            None => self.lost(),
        })
    }

    /// The last write: the turn's end, and the beginning of the conversation's next one. Also the write
    /// that leaves a turn waiting for its client, after which nothing begins.
    pub async fn end(
        &mut self,
        messages: &[NewMessage],
        events: &[NewEvent],
        change: &Change<'_>,
    ) -> Result<(WriteOutcome, Option<RunnableTurn>)> {
        self.apply(messages, events, change).await
    }

    /// Gives the turn to whichever node is faster.
    pub async fn release(&self) -> Result<()> {
        let caller = ServiceCaller::for_tenant(self.tenant_id);
        let mut tx = caller.begin(&self.app.db).await?;
        turn_writes::release(&mut tx, self.fence).await?;
        tx.commit().await
    }

    fn lost(&self) -> WriteOutcome {
        telemetry::count_fence_rejection();
        tracing::info!(turn = %self.fence.turn_id, "the turn is no longer this node's");
        WriteOutcome::Lost
    }

    async fn apply(
        &mut self,
        messages: &[NewMessage],
        events: &[NewEvent],
        change: &Change<'_>,
    ) -> Result<(WriteOutcome, Option<RunnableTurn>)> {
        let pending_text = std::mem::take(&mut self.pending_text);
        let rest = (!pending_text.is_empty()).then(|| NewEvent::delta(pending_text));
        let events: Vec<NewEvent> = rest.into_iter().chain(events.iter().cloned()).collect();
        let mut pause = FIRST_PAUSE;
        let mut attempt = 1;
        loop {
            let outcome = self.try_apply(messages, &events, change, attempt > 1).await;
            match outcome {
                Err(error) if attempt < ATTEMPTS && error.is_transient() => {
                    tracing::warn!(turn = %self.fence.turn_id, error = %error, attempt,
                                   "a write of a turn is made again");
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                    attempt += 1;
                }
                outcome => return outcome,
            }
        }
    }

    async fn try_apply(
        &mut self,
        messages: &[NewMessage],
        events: &[NewEvent],
        change: &Change<'_>,
        again: bool,
    ) -> Result<(WriteOutcome, Option<RunnableTurn>)> {
        let (app, now) = (self.app.clone(), self.app.clock.now());
        let caller = ServiceCaller::for_tenant(self.tenant_id);
        let mut tx = caller.begin(&app.db).await?;
        let frees = change.state.is_some_and(|state| state.has_ended());
        let write = Write {
            conversation_id: self.conversation_id,
            session_id: self.session_id,
            messages,
            speaker: self.speaker.as_ref(),
            events,
            attempt: self.attempt,
            starts: false,
            change,
            runner: runner(&app),
        };
        let Some(heard) = turn_writes::write(&mut tx, self.fence, &write, now).await? else {
            return self.resolve_unacknowledged(tx, again).await;
        };
        if frees {
            self.deliver(&mut tx, &heard, messages, change).await?;
        }
        tx.commit().await?;
        self.fence.version += 1;
        let next = if frees && heard.followed {
            self.begin_next().await
        } else {
            None
        };
        Ok((WriteOutcome::Fine(heard), next))
    }

    /// The answer as a delivery, if nobody waits for it: in the transaction that ends the turn.
    async fn deliver(
        &self,
        tx: &mut TenantTx,
        heard: &WriteAck,
        messages: &[NewMessage],
        change: &Change<'_>,
    ) -> Result<()> {
        let (Some(ReplyVia::Delivery), Some(to)) = (heard.reply_via, &self.reply_to) else {
            return Ok(());
        };
        let turn = AnsweredTurn {
            id: self.fence.turn_id,
            conversation_id: self.conversation_id,
            session_id: self.session_id,
        };
        let answer = match change.state {
            Some(TurnState::Completed) => {
                reply::said_text(messages.last().map(NewMessage::text).unwrap_or_default())
            }
            Some(_) | None => Err(change.reason.unwrap_or_default()),
        };
        reply::deliver(tx, turn, to, answer, self.app.clock.now()).await
    }

    /// Nothing was written: because an earlier attempt was made after all, or because the turn is lost.
    async fn resolve_unacknowledged(
        &mut self,
        mut tx: TenantTx,
        again: bool,
    ) -> Result<(WriteOutcome, Option<RunnableTurn>)> {
        if !again || !turn_writes::was_applied(&mut tx, self.fence).await? {
            tx.end().await?;
            return Ok((self.lost(), None));
        }
        tx.commit().await?;
        self.fence.version += 1;
        let next = self.begin_next().await;
        Ok((WriteOutcome::Fine(WriteAck::default()), next))
    }

    /// The conversation's next turn, after this one's end was committed: whatever is wrong with the next one
    /// must not undo that. What is not started here is found by the sweepers. A node that is shutting down
    /// leaves it to others.
    async fn begin_next(&self) -> Option<RunnableTurn> {
        if self.app.shutdown.is_stopping() {
            return None;
        }
        match self.try_begin_next().await {
            Ok(next) => next,
            Err(error) => {
                tracing::warn!(tenant = %self.tenant_id, turn = %self.fence.turn_id, error = %error,
                               cause = ?error.cause, "the turn after this one was not started");
                None
            }
        }
    }

    async fn try_begin_next(&self) -> Result<Option<RunnableTurn>> {
        let caller = ServiceCaller::for_tenant(self.tenant_id);
        let mut tx = caller.begin(&self.app.db).await?;
        let tip = conversations::lock(&mut tx, self.conversation_id).await?;
        if tip.is_none() {
            tx.end().await?;
            return Ok(None);
        }
        let now = self.app.clock.now();
        let next = begin_next(&self.app, &mut tx, self.conversation_id, now).await?;
        tx.commit().await?;
        Ok(next)
    }
}
