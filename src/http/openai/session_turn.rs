//! The turn that a chat request became, and what comes of it: from the node's own channel where it runs here, from its
//! events where it runs elsewhere or later.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use crate::domain::conversation::session::ConversationHandle;
use crate::domain::turn::SessionInfo;
use crate::domain::turn::event::Event;
use crate::error::Result;
use crate::ids::{SessionId, TurnId};
use crate::turns::{Follower, LiveUpdate, Outcome, Piece};

/// The turn that a request became.
pub struct Turn {
    pub id: TurnId,
    pub name: ConversationHandle,
    pub session_id: SessionId,
    pub session_info: SessionInfo,
    /// The event after which its answer to this request comes.
    pub after: i64,
    /// Whether it is what an earlier request became.
    pub replayed: bool,
    pub source: Source,
}

/// Where the answer comes from.
pub enum Source {
    /// The turn runs here.
    Live(mpsc::Receiver<LiveUpdate>),
    /// Elsewhere, or later.
    Events(Box<Follower>),
}

/// What comes next of a turn.
pub enum Next {
    Delta(Piece),
    Events(Vec<Arc<Event>>),
    Ended(Box<Outcome>),
    /// The node lost it: the rest is in the events.
    Elsewhere,
    /// The client was too far behind to be told directly: the rest is in the events.
    Behind,
    /// Nothing until then.
    Quiet,
}

impl From<LiveUpdate> for Next {
    fn from(ahead: LiveUpdate) -> Self {
        match ahead {
            LiveUpdate::Delta(piece) => Self::Delta(piece),
            LiveUpdate::Ended(outcome) => Self::Ended(outcome),
            LiveUpdate::Lost => Self::Elsewhere,
        }
    }
}

impl Turn {
    /// What has already come of a turn that runs here.
    pub fn at_hand(&mut self) -> Option<Next> {
        let Source::Live(ahead) = &mut self.source else {
            return None;
        };
        ahead.try_recv().ok().map(Next::from)
    }

    pub async fn next(&mut self, until: Instant) -> Result<Next> {
        match &mut self.source {
            Source::Live(live) => match timeout_at(until, live.recv()).await {
                Err(_) => Ok(Next::Quiet),
                Ok(Some(ahead)) => Ok(ahead.into()),
                Ok(None) => Ok(Next::Behind),
            },
            Source::Events(follower) => {
                let events = follower.next(until).await?;
                if !events.is_empty() {
                    return Ok(Next::Events(events));
                }
                match follower.outcome().await? {
                    Some(outcome) => Ok(Next::Ended(Box::new(outcome))),
                    None => Ok(Next::Quiet),
                }
            }
        }
    }
}
