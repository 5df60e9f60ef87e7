//! Recovers turns that no node runs: their node was lost, their client did not come back, or none started them. Any
//! node finds them, and goes on from the last step that was stored.

use std::time::Instant;

use chrono::{DateTime, Utc};
use futures_util::{StreamExt, stream};
use serde_json::json;

use super::accept::RunnableTurn;
use super::outcome::{begin_next, end, interrupt, try_begin_next};
use super::run::start;
use super::runner;
use crate::app::App;
use crate::auth::ServiceCaller;
use crate::domain::conversation::message::NewMessage;
use crate::domain::turn::event::{MESSAGE_DISCARDED, NewEvent};
use crate::domain::turn::{MAX_LOST, StopReason, TurnState, interrupted_result};
use crate::error::{Code, Error, Result};
use crate::ids::{SessionId, TenantId, TurnId};
use crate::store::TenantTx;
use crate::store::conversation::{conversations, open_calls};
use crate::store::turn::turn_claims::{self, Wait};
use crate::store::turn::turn_lease::TurnLease;
use crate::store::turn::turn_writes::TurnWrite;
use crate::store::turn::{events, turn_stops, turns};
use crate::{sessions, telemetry};

/// Turns that one sweep recovers; the rest is for the other nodes, or the next sweep.
const BATCH: i32 = 50;
const AT_ONCE: usize = 4;

/// After so many failures in a row a turn is ended as failed, without reading what it holds.
const MAX_FAILURES: i32 = 8;

/// Recovers such turns once. Answers how many there were. While the database did not answer no node could renew its
/// leases: after such a time each gets one lease's length to do so, before any turn is claimed.
pub async fn sweep(app: &App) -> Result<usize> {
    let began = Instant::now();
    let lease = app.config.turn_lease;
    let due = turn_claims::list_due(&app.db, BATCH).await;
    if due.is_err() || began.elapsed() > lease / 3 {
        app.db.outages.record(lease);
    }
    let due = due?;
    let count = due.len();
    // Several at once: one whose conversation is locked must not keep the others waiting.
    let recovering = async |(tenant_id, turn_id): (TenantId, TurnId)| {
        if app.shutdown.is_stopping() {
            return;
        }
        if let Err(error) = recover(app, tenant_id, turn_id).await {
            tracing::warn!(tenant = %tenant_id, turn = %turn_id, error = %error, cause = ?error.cause,
                           "turn not recovered");
            // A lock that is held for long says nothing about the turn; while the database is away this fails.
            let cause = if matches!(error.code, Code::Unavailable | Code::Busy) {
                Cause::Outside
            } else {
                Cause::Turn
            };
            if let Err(error) = put_off(app, tenant_id, turn_id, cause).await {
                tracing::warn!(tenant = %tenant_id, turn = %turn_id, error = %error,
                               "turn not put off");
            }
        }
    };
    stream::iter(due)
        .for_each_concurrent(AT_ONCE, recovering)
        .await;
    Ok(count)
}

/// Why a turn was not recovered.
#[derive(Debug, Clone, Copy)]
enum Cause {
    /// A lock or the database was in the way.
    Outside,
    Turn,
}

/// Lets other turns go before one that was not recovered. One that fails again and again by itself is ended.
async fn put_off(app: &App, tenant_id: TenantId, turn_id: TurnId, cause: Cause) -> Result<()> {
    let caller = ServiceCaller::for_tenant(tenant_id);
    let mut tx = caller.begin(&app.db).await?;
    let Some(turn) = turns::find(&mut tx, turn_id).await? else {
        return tx.end().await;
    };
    conversations::lock(&mut tx, turn.conversation_id).await?;
    // A queue fails with its first turn, whichever was tried.
    let first = turn_claims::find_next(&mut tx, turn.conversation_id).await?;
    let failing = match turn.state {
        TurnState::Queued => first.unwrap_or(turn_id),
        TurnState::Running
        | TurnState::WaitingClient
        | TurnState::Completed
        | TurnState::Failed
        | TurnState::Cancelled
        | TurnState::Interrupted => turn_id,
    };
    let failures = match cause {
        Cause::Turn => turn_claims::defer(&mut tx, failing).await?.unwrap_or(0),
        Cause::Outside => {
            turn_claims::postpone(&mut tx, failing).await?;
            0
        }
    };
    if failures >= MAX_FAILURES {
        abandon(app, &mut tx, failing).await?;
        tracing::warn!(tenant = %tenant_id, turn = %failing, failures, "turn ended as failed");
    }
    tx.commit().await
}

/// Ends a turn whose conversation is locked, whatever its row holds.
async fn abandon(app: &App, tx: &mut TenantTx, turn_id: TurnId) -> Result<()> {
    let now = app.clock.now();
    let reason = Code::TurnAbandoned.as_str();
    let why = "the turn could not be recovered";
    let turn = turns::get(tx, turn_id).await?;
    if !turn_stops::fail(tx, turn_id, reason, why, now).await? {
        return Ok(());
    }
    events::insert_end(tx, &turn, (TurnState::Failed, reason), now).await?;
    sessions::close_calls(tx, turn.session_id(), why, now).await
}

async fn recover(app: &App, tenant_id: TenantId, turn_id: TurnId) -> Result<()> {
    let caller = ServiceCaller::for_tenant(tenant_id);
    let mut tx = caller.begin(&app.db).await?;
    let Some(turn) = turns::find(&mut tx, turn_id).await? else {
        return tx.end().await;
    };
    let conversation_id = turn.conversation_id;
    // The transaction that has it locked recovers it, or moves it on.
    if !conversations::try_lock(&mut tx, conversation_id).await? {
        return tx.end().await;
    }
    let next = match turn.state {
        TurnState::Running if turn.node.is_some() && app.db.outages.is_recent() => {
            return tx.end().await;
        }
        TurnState::Running => claim_expired(app, &mut tx, turn_id).await?,
        TurnState::WaitingClient => {
            let now = app.clock.now();
            let lease =
                turn_claims::claim_waiting(&mut tx, turn_id, runner(app), Wait::Overdue).await?;
            if let Some(mut lease) = lease {
                interrupt(&mut tx, &mut lease, StopReason::ToolResultsMissing, now).await?;
            }
            try_begin_next(app, &mut tx, conversation_id, now).await?
        }
        TurnState::Queued => begin_next(app, &mut tx, conversation_id, app.clock.now()).await?,
        TurnState::Completed
        | TurnState::Failed
        | TurnState::Cancelled
        | TurnState::Interrupted => return tx.end().await,
    };
    tx.commit().await?;
    if let Some(next) = next {
        start(app, tenant_id, next, None);
    }
    Ok(())
}

/// Claims a turn whose node was lost, and ends it if it was cancelled or lost too often.
async fn claim_expired(
    app: &App,
    tx: &mut TenantTx,
    turn_id: TurnId,
) -> Result<Option<RunnableTurn>> {
    let now = app.clock.now();
    let Some(mut lease) = turn_claims::claim_expired(tx, turn_id, runner(app)).await? else {
        return Ok(None);
    };
    telemetry::count_recovery();
    tracing::info!(turn = %turn_id, attempt = lease.attempt, "turn claimed from another node");
    let results = interrupted_tools(tx, lease.session_id).await?;
    let ended = match lease.cancelled {
        Some(reason) => Some((reason.state(), reason.as_str())),
        None if lease.lost >= MAX_LOST => Some((TurnState::Failed, Code::TurnAbandoned.as_str())),
        None => None,
    };
    if let Some(state_and_reason) = ended {
        end(tx, &mut lease, &results, state_and_reason, now).await?;
        return try_begin_next(app, tx, lease.conversation_id, now).await;
    }
    restart(tx, &mut lease, &results, now).await?;
    Ok(Some(RunnableTurn {
        lease,
        prompt: None,
    }))
}

/// Results of tool calls whose outcome is not known: a call never stays without a result.
async fn interrupted_tools(tx: &mut TenantTx, session_id: SessionId) -> Result<Vec<NewMessage>> {
    let open = open_calls::find(tx, session_id).await?;
    let open = open.map_or_else(Vec::new, |open| open.ids);
    let why = "the node that ran the tool was lost; whether it had an effect is not known";
    let results = open.iter().map(|call| interrupted_result(call, why));
    Ok(results.collect())
}

/// Discards what the lost node wrote last, and records the results of its tool calls.
async fn restart(
    tx: &mut TenantTx,
    lease: &mut TurnLease,
    results: &[NewMessage],
    now: DateTime<Utc>,
) -> Result<()> {
    let Some(tip) = conversations::lock(tx, lease.conversation_id).await? else {
        let detail = "a running turn has no conversation";
        return Err(Error::internal(anyhow::anyhow!(detail)));
    };
    let discarded =
        NewEvent::new(MESSAGE_DISCARDED).with(json!({ "discarded_attempt": lease.attempt - 1 }));
    let events: Vec<NewEvent> = std::iter::once(discarded)
        .chain((0..results.len()).map(NewEvent::of_message))
        .collect();
    let write = TurnWrite {
        messages: results,
        events: &events,
        ..TurnWrite::default()
    };
    lease.session_id = tip;
    lease.write_claimed(tx, &write, now).await?;
    Ok(())
}
