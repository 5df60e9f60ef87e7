//! Stopping a turn because somebody asks for it.

use chrono::{DateTime, Utc};

use super::accept::RunnableTurn;
use super::outcome::{interrupt, try_begin_next};
use super::runner;
use crate::app::App;
use crate::domain::turn::{StopReason, Turn, TurnState};
use crate::error::Result;
use crate::store::TenantTx;
use crate::store::conversation::conversations;
use crate::store::turn::turn_claims::{self, Wait};
use crate::store::turn::{events, turn_stops, turns};

/// Stops a turn: one that has not started or waits for its client at once, one that runs as soon as its node is
/// notified. One that has ended stays as it is. Answers the turn that starts instead: `start` it after the commit.
pub async fn cancel(
    app: &App,
    tx: &mut TenantTx,
    turn: &Turn,
    now: DateTime<Utc>,
) -> Result<Option<RunnableTurn>> {
    conversations::lock(tx, turn.conversation_id).await?;
    // It may have gone on while the lock was waited for.
    let turn = turns::get(tx, turn.id).await?;
    let reason = StopReason::Cancelled;
    match turn.state {
        TurnState::Queued => {
            if turn_stops::cancel_queued(tx, turn.id, reason, now).await? {
                let how = (reason.state(), reason.as_str());
                events::insert_end(tx, &turn, how, now).await?;
            }
            Ok(None)
        }
        TurnState::Running => {
            turn_stops::request_stop(tx, turn.id, reason, now).await?;
            Ok(None)
        }
        TurnState::WaitingClient => {
            let lease = turn_claims::claim_waiting(tx, turn.id, runner(app), Wait::Any).await?;
            if let Some(mut lease) = lease {
                interrupt(tx, &mut lease, reason, now).await?;
            }
            try_begin_next(app, tx, turn.conversation_id, now).await
        }
        TurnState::Completed
        | TurnState::Failed
        | TurnState::Cancelled
        | TurnState::Interrupted => Ok(None),
    }
}
