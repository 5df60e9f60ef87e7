//! What a caller gets of a turn. Where the turn runs on this node, its updates come at once; where it runs elsewhere,
//! was lost, or the caller fell behind, the rest comes from its events. The caller need not know which.

use std::collections::VecDeque;
use std::sync::Arc;

use serde_json::Value;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use super::follow::Follower;
use super::live::{LiveUpdate, Piece};
use super::outcome::TurnOutcome;
use crate::app::App;
use crate::domain::conversation::session::ConversationHandle;
use crate::domain::turn::SessionInfo;
use crate::domain::turn::event::{Event, MESSAGE_DELTA, MESSAGE_DISCARDED, TURN_STARTED};
use crate::error::{Code, Error, Result};
use crate::ids::{SessionId, TenantId, TurnId, UserId};

/// A turn that was accepted, and its session as far as it is known before the turn has run.
#[derive(Debug, Clone)]
pub struct AcceptedTurn {
    pub id: TurnId,
    pub name: ConversationHandle,
    pub session_id: SessionId,
    pub session_info: SessionInfo,
    /// The sender's user, where a chat was named.
    pub user_id: Option<UserId>,
    /// Whether an earlier request was accepted as this turn.
    pub is_replay: bool,
}

/// What comes next of a turn.
pub enum Update {
    /// How the turn stands, ahead of its committed event of this name.
    State(&'static str),
    /// What the model added.
    Delta(Piece),
    /// What the model added, as it was stored.
    Text(String),
    /// Any other event.
    Event(Arc<Event>),
    Ended(Box<TurnOutcome>),
    /// Nothing came in the time given.
    Idle,
}

enum Source {
    Live(mpsc::Receiver<LiveUpdate>),
    Events(Box<Follower>),
}

pub struct TurnStream {
    pub turn: AcceptedTurn,
    app: App,
    tenant_id: TenantId,
    /// The event after which the answer to this request comes.
    after: i64,
    source: Source,
    ready: VecDeque<Update>,
    /// Whether the caller has got a part of the answer.
    has_shown: bool,
    /// Bytes of text that the caller has got.
    shown_bytes: usize,
    /// Bytes of the text that comes next that the caller has got before.
    skip_bytes: usize,
    is_lost: bool,
}

impl TurnStream {
    /// From `live`, where the turn runs here, and otherwise from the events after `after`.
    pub fn new(
        app: &App,
        tenant_id: TenantId,
        turn: AcceptedTurn,
        live: Option<mpsc::Receiver<LiveUpdate>>,
        after: i64,
    ) -> Self {
        let mut ready = VecDeque::new();
        let source = match live {
            Some(live) => {
                ready.push_back(Update::State(TURN_STARTED));
                Source::Live(live)
            }
            None => Source::Events(Box::new(follow(app, tenant_id, &turn, after))),
        };
        Self {
            turn,
            app: app.clone(),
            tenant_id,
            after,
            source,
            ready,
            has_shown: false,
            shown_bytes: 0,
            skip_bytes: 0,
            is_lost: false,
        }
    }

    /// The next update, or `Idle` at `until`. Fails with `turn_restarted` where the turn began again elsewhere after a
    /// part of its answer was given.
    pub async fn next(&mut self, until: Instant) -> Result<Update> {
        loop {
            if let Some(update) = self.try_next() {
                return Ok(update);
            }
            if std::mem::take(&mut self.is_lost) {
                if self.has_shown {
                    return Err(self.lost().await);
                }
                self.follow_events();
            }
            match &mut self.source {
                Source::Live(live) => match timeout_at(until, live.recv()).await {
                    Err(_) => return Ok(Update::Idle),
                    Ok(Some(update)) => self.receive(update),
                    // Too far behind: the events have all of it.
                    Ok(None) => {
                        self.skip_bytes = self.shown_bytes;
                        self.follow_events();
                    }
                },
                Source::Events(follower) => {
                    let events = follower.next(until).await?;
                    if events.is_empty() {
                        return Ok(match follower.outcome().await? {
                            Some(outcome) => Update::Ended(Box::new(outcome)),
                            None => Update::Idle,
                        });
                    }
                    for event in events {
                        self.read_event(event)?;
                    }
                }
            }
        }
    }

    /// An update that has come already.
    pub fn try_next(&mut self) -> Option<Update> {
        if self.ready.is_empty()
            && let Source::Live(live) = &mut self.source
            && let Ok(update) = live.try_recv()
        {
            self.receive(update);
        }
        let update = self.ready.pop_front()?;
        match &update {
            Update::Delta(piece) => {
                self.has_shown |= piece.has_words();
                self.shown_bytes += piece.text_bytes();
            }
            Update::Text(_) => self.has_shown = true,
            Update::State(_) | Update::Event(_) | Update::Ended(_) | Update::Idle => {}
        }
        Some(update)
    }

    /// Waits for the end alone, until `until`. For a caller that gets the whole answer at once.
    pub async fn outcome(&mut self, until: Instant) -> Result<Option<TurnOutcome>> {
        loop {
            match &mut self.source {
                Source::Live(live) => match timeout_at(until, live.recv()).await {
                    Err(_) => return Ok(None),
                    Ok(Some(LiveUpdate::Delta(_))) => {}
                    Ok(Some(LiveUpdate::Ended(outcome))) => return Ok(Some(*outcome)),
                    Ok(Some(LiveUpdate::LeaseLost) | None) => self.follow_events(),
                },
                Source::Events(follower) => {
                    let events = follower.next(until).await?;
                    if !events.is_empty() {
                        continue;
                    }
                    if let Some(outcome) = follower.outcome().await? {
                        return Ok(Some(outcome));
                    }
                    if Instant::now() >= until {
                        return Ok(None);
                    }
                }
            }
        }
    }

    fn receive(&mut self, update: LiveUpdate) {
        match update {
            LiveUpdate::Delta(piece) => self.ready.push_back(Update::Delta(piece)),
            LiveUpdate::Ended(outcome) => {
                self.ready.push_back(Update::State(outcome.event()));
                self.ready.push_back(Update::Ended(outcome));
            }
            LiveUpdate::LeaseLost => self.is_lost = true,
        }
    }

    fn read_event(&mut self, event: Arc<Event>) -> Result<()> {
        match event.kind.as_str() {
            MESSAGE_DELTA => {
                let data = event.data.as_ref().map_or("null", |data| data.get());
                let data: Value = serde_json::from_str(data).map_err(Error::internal)?;
                let text = data["text"].as_str().unwrap_or_default();
                let skipped = self.skip_bytes.min(text.len());
                self.skip_bytes -= skipped;
                if let Some(text) = text.get(skipped..).filter(|text| !text.is_empty()) {
                    self.ready.push_back(Update::Text(text.to_owned()));
                }
            }
            MESSAGE_DISCARDED if self.has_shown => return Err(restarted(self.turn.id)),
            MESSAGE_DISCARDED => {
                self.ready
                    .retain(|update| !matches!(update, Update::Text(_)));
                self.ready.push_back(Update::Event(event));
            }
            _ => self.ready.push_back(Update::Event(event)),
        }
        Ok(())
    }

    fn follow_events(&mut self) {
        let follower = follow(&self.app, self.tenant_id, &self.turn, self.after);
        self.source = Source::Events(Box::new(follower));
    }

    /// Why a turn of which a part was shown is no longer this node's: it was stopped, or it began again elsewhere.
    async fn lost(&self) -> Error {
        let follower = follow(&self.app, self.tenant_id, &self.turn, self.after);
        let failure = follower.failure().await;
        failure.unwrap_or_else(|| restarted(self.turn.id))
    }
}

fn follow(app: &App, tenant_id: TenantId, turn: &AcceptedTurn, after: i64) -> Follower {
    let conversation_id = turn.name.conversation_id;
    Follower::of_turn(app, tenant_id, conversation_id, turn.id, after).until_idle()
}

/// The message names the turn: clients keep nothing else of an error.
fn restarted(turn_id: TurnId) -> Error {
    let detail = format!(
        "turn {turn_id} was restarted on another node; discard the partial output and read /v1/turns/{turn_id}"
    );
    Error::new(Code::TurnRestarted, detail)
}

impl Piece {
    /// Whether it is a part of the answer, and not only its frame: a role, or calls that come with the end.
    fn has_words(&self) -> bool {
        let is_word = |(name, value): (&String, &Value)| {
            name != "role" && name != "tool_calls" && !value.is_null() && value != ""
        };
        self.delta.iter().any(is_word) || !self.logprobs.is_null()
    }

    fn text_bytes(&self) -> usize {
        let text = self.delta.get("content").and_then(Value::as_str);
        text.map_or(0, str::len)
    }
}
