//! Following what is committed, from any node: events after a number, and waiting for more. All who follow
//! a conversation on this node share what is read of its end (`streams`). Holds no connection to the
//! database while it waits, and asks it only when there is news.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::outcome::TurnOutcome;
use crate::app::App;
use crate::auth::ServiceCaller;
use crate::domain::turn::TurnState;
use crate::domain::turn::event::Event;
use crate::error::{Error, Result};
use crate::ids::{SessionId, TenantId, TurnId};
use crate::notifications::Changes;
use crate::store::TenantTx;
use crate::store::turn::{events, turns};
use crate::streams::{MAX_BATCH, Read, Tail};

/// Before the database is asked again that did not answer.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

pub struct Follower {
    app: App,
    tenant_id: TenantId,
    conversation_id: SessionId,
    turn_id: Option<TurnId>,
    /// The last event that was given out.
    after: i64,
    /// Up to where everything was read, in the conversation; `None` while it reads what was before.
    place: Option<i64>,
    /// When the last events were read.
    read_at: Instant,
    /// Whether a turn that waits for its client has no more to tell.
    until_idle: bool,
    /// Whether the turn that is followed may have no more to tell: its row says.
    may_rest: bool,
    empty_reads: u64,
    tail: Arc<Tail>,
    changes: Changes,
}

/// What a look at the turn and its events found.
struct TurnLook {
    events: Vec<Event>,
    /// Whether the turn or the conversation had more of them.
    is_followed: bool,
    is_idle: bool,
    /// The last event that the conversation had by then.
    last: i64,
}

impl Follower {
    /// Follows a conversation after the event `after`.
    pub fn of_conversation(
        app: &App,
        tenant_id: TenantId,
        conversation_id: SessionId,
        after: i64,
    ) -> Self {
        // Before the first look, so that nothing that comes after it is missed.
        let tail = app
            .streams
            .tails
            .open(&app.notifications, tenant_id, conversation_id);
        Self {
            app: app.clone(),
            tenant_id,
            conversation_id,
            turn_id: None,
            after,
            place: None,
            read_at: Instant::now(),
            until_idle: false,
            may_rest: false,
            empty_reads: tail.empty_reads(),
            changes: tail.changes(),
            tail,
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
        let mut follower = Self::of_conversation(app, tenant_id, conversation_id, after);
        follower.turn_id = Some(turn_id);
        follower.tail.follow_turn(turn_id);
        follower
    }

    /// For who asked: there is nothing more to tell when the turn waits for them.
    pub fn until_idle(mut self) -> Self {
        self.until_idle = true;
        self
    }

    /// When the events were read that `next` gave last: a right that was checked later covers them.
    pub fn read_at(&self) -> Instant {
        self.read_at
    }

    /// The next events, or none once `until` has passed. A follower of a turn is also answered, with
    /// nothing, when there is nothing more to tell.
    pub async fn next(&mut self, until: Instant) -> Result<Vec<Arc<Event>>> {
        loop {
            match self.advance().await {
                Ok(Some(events)) => return Ok(events),
                Ok(None) => {
                    let woken = tokio::time::timeout_at(until, self.changes.changed()).await;
                    if woken.is_err() {
                        return Ok(Vec::new());
                    }
                }
                // What is committed will be there when it is back.
                Err(error) if error.is_transient() => {
                    if Instant::now() >= until {
                        return Ok(Vec::new());
                    }
                    let again = until.min(Instant::now() + RETRY_PAUSE);
                    tokio::time::sleep_until(again).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// What there is; an empty answer if there will be no more, `None` if it has to be waited for.
    async fn advance(&mut self) -> Result<Option<Vec<Arc<Event>>>> {
        loop {
            if let Some(events) = self.take_kept() {
                return Ok(Some(events));
            }
            if self.place.is_none() || self.may_be_idle() {
                let version = self.tail.version();
                let looked = self.look().await?;
                self.may_rest = looked.is_idle;
                if !looked.is_followed {
                    self.place = Some(looked.last.max(self.after));
                    self.tail.begin_at(looked.last, version);
                }
                // Its events from before it was idle come first.
                if looked.is_idle || !looked.events.is_empty() {
                    let events: Vec<_> = looked.events.into_iter().map(Arc::new).collect();
                    self.give(&events);
                    return Ok(Some(events));
                }
            }
            if !self.tail.is_stale() {
                return Ok(None);
            }
            self.tail.read(&self.app.db).await?;
        }
    }

    /// What somebody has read for all. Forgets its place if it is too far behind for that.
    fn take_kept(&mut self) -> Option<Vec<Arc<Event>>> {
        let mut events = match self.tail.after(self.place?) {
            Read::Events(events, read_at) => {
                self.read_at = read_at;
                events
            }
            Read::Nothing => return None,
            Read::Behind => {
                self.place = None;
                return None;
            }
        };
        self.place = events.last().map(|last| last.seq).or(self.place);
        let turn_id = self.turn_id;
        let after = self.after;
        events.retain(|event| {
            event.seq > after && turn_id.is_none_or(|turn_id| event.turn_id == turn_id)
        });
        if events.is_empty() {
            return None;
        }
        self.give(&events);
        Some(events)
    }

    fn give(&mut self, events: &[Arc<Event>]) {
        if let Some(last) = events.last() {
            self.after = last.seq;
            self.place = self.place.map(|place| place.max(last.seq));
            self.may_rest |= last.is_turn_idle();
        }
    }

    /// Whether the row of the turn that is followed has to be looked at.
    fn may_be_idle(&mut self) -> bool {
        let Some(turn_id) = self.turn_id else {
            return false;
        };
        let empty_reads = self.tail.empty_reads();
        // There was news and no event: the turn may have been ended without one.
        let woken_for_nothing = empty_reads != self.empty_reads;
        self.empty_reads = empty_reads;
        self.may_rest || woken_for_nothing || self.tail.has_ended(turn_id)
    }

    async fn look(&mut self) -> Result<TurnLook> {
        let mut tx = self.begin().await?;
        // Before the events: a turn that is idle by then has written all of them.
        let is_idle = match self.turn_id {
            Some(turn_id) => self.is_idle(turns::get(&mut tx, turn_id).await?.state),
            None => false,
        };
        // Also before: all events up to that one are among those that are found.
        let conversation_id = self.conversation_id;
        let last = events::list_last(&mut tx, &[conversation_id]).await?;
        let turn_id = self.turn_id;
        let after = self.after;
        let found = events::list(&mut tx, conversation_id, turn_id, after, MAX_BATCH).await?;
        tx.end().await?;
        self.read_at = Instant::now();
        Ok(TurnLook {
            is_idle,
            events: found.events,
            is_followed: found.is_followed,
            last: last.get(&conversation_id).copied().unwrap_or(after),
        })
    }

    /// How the turn that is followed ended, or that it waits for its client, once all its events were read; `None`
    /// while there is more to come, and while nobody can tell.
    pub async fn outcome(&self) -> Result<Option<TurnOutcome>> {
        let Some(turn_id) = self.turn_id.filter(|_| self.may_rest) else {
            return Ok(None);
        };
        match self.read_outcome(turn_id).await {
            Err(error) if error.is_transient() => Ok(None),
            outcome => outcome,
        }
    }

    async fn read_outcome(&self, turn_id: TurnId) -> Result<Option<TurnOutcome>> {
        let mut tx = self.begin().await?;
        let turn = turns::get(&mut tx, turn_id).await?;
        let outcome = if self.is_idle(turn.state) && self.has_told_all(&mut tx).await? {
            Some(TurnOutcome::read(&mut tx, turn).await?)
        } else {
            None
        };
        tx.end().await?;
        Ok(outcome)
    }

    /// Whether the turn that is followed has ended and all its events were read, as far as this node knows.
    pub async fn has_ended(&self) -> Result<bool> {
        let Some(turn_id) = self.turn_id.filter(|_| self.may_rest) else {
            return Ok(false);
        };
        match self.read_end(turn_id).await {
            Err(error) if error.is_transient() => Ok(false),
            ended => ended,
        }
    }

    async fn read_end(&self, turn_id: TurnId) -> Result<bool> {
        let mut tx = self.begin().await?;
        let turn = turns::find(&mut tx, turn_id).await?;
        let ended = turn.is_none_or(|turn| turn.state.has_ended());
        let ended = ended && self.has_told_all(&mut tx).await?;
        tx.end().await?;
        Ok(ended)
    }

    /// Of a turn that is idle: it may have gone on since the last read.
    async fn has_told_all(&self, tx: &mut TenantTx) -> Result<bool> {
        let turn_id = self.turn_id;
        let after = self.after;
        let more = events::list(tx, self.conversation_id, turn_id, after, 1).await?;
        Ok(more.events.is_empty())
    }

    /// Why the turn that is followed has ended without an answer, if it has.
    pub async fn failure(&self) -> Option<Error> {
        let mut tx = self.begin().await.ok()?;
        let turn = turns::find(&mut tx, self.turn_id?).await.ok()?;
        tx.end().await.ok()?;
        let turn = turn?;
        let failed = turn.state.has_ended() && turn.state != TurnState::Completed;
        failed.then(|| turn.failure())
    }

    async fn begin(&self) -> Result<TenantTx> {
        ServiceCaller::for_tenant(self.tenant_id)
            .begin(&self.app.db)
            .await
    }

    /// Whether nothing comes until somebody asks again.
    fn is_idle(&self, state: TurnState) -> bool {
        match state {
            TurnState::Queued | TurnState::Running => false,
            TurnState::WaitingClient => self.until_idle,
            TurnState::Completed
            | TurnState::Failed
            | TurnState::Cancelled
            | TurnState::Interrupted => true,
        }
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        if let Some(turn_id) = self.turn_id {
            self.tail.unfollow_turn(turn_id);
        }
    }
}
