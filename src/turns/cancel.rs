//! Stopping a turn because somebody asks for it.

use chrono::{DateTime, Utc};

use super::accept::RunnableTurn;
use super::outcome::{interrupted, try_begin_next};
use super::runner;
use crate::app::App;
use crate::domain::turn::{StopReason, Turn, TurnState};
use crate::error::Result;
use crate::ids::BootId;
use crate::store::TenantTx;
use crate::store::conversation::conversations;
use crate::store::turn::{events, turn_claims, turn_stops, turns};

/// What has to be done after the commit.
#[derive(Debug, Default)]
pub struct Cancelled {
    /// The node that is to be told.
    pub node: Option<BootId>,
    /// What begins instead.
    pub next: Option<RunnableTurn>,
}

/// Stops a turn: one that has not started or waits for its client at once, one that runs as soon as its node
/// hears of it. One that has ended stays as it is.
pub async fn cancel(
    app: &App,
    tx: &mut TenantTx,
    turn: &Turn,
    now: DateTime<Utc>,
) -> Result<Cancelled> {
    conversations::lock(tx, turn.conversation_id).await?;
    // It may have gone on while we waited.
    let turn = turns::get(tx, turn.id).await?;
    let reason = StopReason::Cancelled;
    match turn.state {
        TurnState::Queued => {
            if turn_stops::cancel_queued(tx, turn.id, reason, now).await? {
                let how = (reason.state(), reason.as_str());
                events::insert_end(tx, &turn, how, now).await?;
            }
            Ok(Cancelled::default())
        }
        TurnState::Running => Ok(Cancelled {
            node: turn_stops::request_stop(tx, turn.id, reason, now).await?,
            next: None,
        }),
        TurnState::WaitingClient => {
            if let Some(lease) = turn_claims::claim_waiting(tx, turn.id, runner(app), false).await?
            {
                interrupted(app, tx, &lease, reason, now).await?;
            }
            Ok(Cancelled {
                node: None,
                next: try_begin_next(app, tx, turn.conversation_id, now).await?,
            })
        }
        TurnState::Completed
        | TurnState::Failed
        | TurnState::Cancelled
        | TurnState::Interrupted => Ok(Cancelled::default()),
    }
}
