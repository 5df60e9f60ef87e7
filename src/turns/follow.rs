//! Following what is committed, from any node: events after a number, and waiting for more. Holds no
//! connection to the database while it waits.

use std::time::Duration;

use tokio::time::Instant;

use super::is_away;
use super::outcome::Outcome;
use crate::app::App;
use crate::auth::JobCaller;
use crate::domain::event::Event;
use crate::domain::turn::TurnState;
use crate::error::{Error, Result};
use crate::ids::{SessionId, TenantId, TurnId};
use crate::live::Watching;
use crate::store::{TenantTx, events, turns};

/// Events that are read at once.
pub const MAX_BATCH: i64 = 100;
/// How often is looked although nobody poked: pokes of other nodes may be lost, or not come at all.
const LOOK_HEARING: Duration = Duration::from_secs(5);
const LOOK_DEAF: Duration = Duration::from_millis(500);

pub struct Follower {
    app: App,
    tenant_id: TenantId,
    conversation_id: SessionId,
    turn_id: Option<TurnId>,
    after: i64,
    /// Whether a turn that waits for its client has no more to tell.
    until_it_rests: bool,
    watching: Watching,
}

impl Follower {
    /// Follows a conversation after the event `after`.
    pub fn of_conversation(
        app: &App,
        tenant_id: TenantId,
        conversation_id: SessionId,
        after: i64,
    ) -> Self {
        Self {
            app: app.clone(),
            tenant_id,
            conversation_id,
            turn_id: None,
            after,
            until_it_rests: false,
            // Before the first look, so that nothing that comes after it is missed.
            watching: app.live.watch(conversation_id),
        }
    }

    /// Follows one turn of it.
    pub fn of_turn(
        app: &App,
        tenant_id: TenantId,
        conversation_id: SessionId,
        turn_id: TurnId,
        after: i64,
    ) -> Self {
        Self {
            turn_id: Some(turn_id),
            ..Self::of_conversation(app, tenant_id, conversation_id, after)
        }
    }

    /// For who asked: there is nothing more to tell when the turn waits for them.
    pub fn until_it_rests(self) -> Self {
        Self {
            until_it_rests: true,
            ..self
        }
    }

    /// The next events, or none once `until` has passed. Whoever follows a turn is also answered, with
    /// nothing, when there is nothing more to tell.
    pub async fn next(&mut self, until: Instant) -> Result<Vec<Event>> {
        loop {
            match self.look().await {
                Ok((events, _)) if !events.is_empty() => {
                    self.after = events.last().map_or(self.after, |last| last.seq);
                    return Ok(events);
                }
                Ok((_, true)) => return Ok(Vec::new()),
                Ok((_, false)) => {}
                // What is committed will be there when it is back.
                Err(error) if is_away(&error) => {}
                Err(error) => return Err(error),
            }
            let interval = match self.app.live.hears_others() {
                true => LOOK_HEARING,
                false => LOOK_DEAF,
            };
            let again = until.min(Instant::now() + interval);
            let woken = tokio::time::timeout_at(again, self.watching.news()).await;
            if woken.is_err() && Instant::now() >= until {
                return Ok(Vec::new());
            }
        }
    }

    /// What there is, and whether there will be no more.
    async fn look(&self) -> Result<(Vec<Event>, bool)> {
        let mut tx = self.begin().await?;
        // Before the events: a turn that rests by then has told everything.
        let rests = match self.turn_id {
            Some(turn_id) => self.rests(turns::get(&mut tx, turn_id).await?.state),
            None => false,
        };
        let (turn_id, after) = (self.turn_id, self.after);
        let found = events::list(&mut tx, self.conversation_id, turn_id, after, MAX_BATCH).await?;
        tx.commit().await?;
        Ok((found, rests))
    }

    /// How the turn that is followed ended, or that it waits for its client, once all of it was told; `None`
    /// while there is more to come, and while nobody can tell.
    pub async fn outcome(&self) -> Result<Option<Outcome>> {
        let Some(turn_id) = self.turn_id else {
            return Ok(None);
        };
        match self.read_outcome(turn_id).await {
            Err(error) if is_away(&error) => Ok(None),
            outcome => outcome,
        }
    }

    async fn read_outcome(&self, turn_id: TurnId) -> Result<Option<Outcome>> {
        let mut tx = self.begin().await?;
        let turn = turns::get(&mut tx, turn_id).await?;
        match self.rests(turn.state) && self.has_told_all(&mut tx).await? {
            true => Outcome::of(&mut tx, turn).await.map(Some),
            false => Ok(None),
        }
    }

    /// Whether the turn that is followed has ended and all of it was told, as far as somebody can tell.
    pub async fn has_ended(&self) -> Result<bool> {
        let Some(turn_id) = self.turn_id else {
            return Ok(false);
        };
        match self.read_end(turn_id).await {
            Err(error) if is_away(&error) => Ok(false),
            ended => ended,
        }
    }

    async fn read_end(&self, turn_id: TurnId) -> Result<bool> {
        let mut tx = self.begin().await?;
        let turn = turns::find(&mut tx, turn_id).await?;
        let ended = turn.is_none_or(|turn| turn.state.has_ended());
        Ok(ended && self.has_told_all(&mut tx).await?)
    }

    /// Of a turn that rests: it may have gone on since the last look.
    async fn has_told_all(&self, tx: &mut TenantTx) -> Result<bool> {
        let (turn_id, after) = (self.turn_id, self.after);
        let more = events::list(tx, self.conversation_id, turn_id, after, 1).await?;
        Ok(more.is_empty())
    }

    /// Why the turn that is followed has ended without an answer, if it has.
    pub async fn failure(&self) -> Option<Error> {
        let mut tx = self.begin().await.ok()?;
        let turn = turns::find(&mut tx, self.turn_id?).await.ok()??;
        let failed = turn.state.has_ended() && turn.state != TurnState::Completed;
        failed.then(|| turn.failure())
    }

    async fn begin(&self) -> Result<TenantTx> {
        JobCaller::of_served_tenant(self.tenant_id)
            .begin(&self.app.db)
            .await
    }

    /// Whether nothing comes until somebody asks again.
    fn rests(&self, state: TurnState) -> bool {
        match state {
            TurnState::Queued | TurnState::Running => false,
            TurnState::WaitingClient => self.until_it_rests,
            TurnState::Completed
            | TurnState::Failed
            | TurnState::Cancelled
            | TurnState::Interrupted => true,
        }
    }
}
