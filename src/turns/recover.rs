//! Turns that no node works on: their node was lost, their client did not come back, or nobody started
//! them. Any node finds them, and goes on from the last step that was stored.

use std::time::Instant;

use futures_util::{StreamExt, stream};
use serde_json::json;

use super::accept::RunnableTurn;
use super::outcome::{begin_next, end, interrupted, try_begin_next};
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
use crate::store::turn::turn_claims::{self, TurnLease};
use crate::store::turn::turn_writes::{self, Change, Fence, Write};
use crate::store::turn::{events, turn_stops, turns};
use crate::{sessions, telemetry};

/// As many as one look takes; the rest is for the other nodes, or the next look.
const BATCH: i32 = 50;
const AT_ONCE: usize = 4;

/// After so many failures in a row a turn is ended as failed, without reading what it holds.
const MAX_FAILURES: i32 = 8;

/// One look for such turns. Answers how many there were. While the database did not answer no node could renew
/// its leases: after such a time everybody gets one lease's length to do so, before anything is taken over.
pub async fn sweep(app: &App) -> Result<usize> {
    let began = Instant::now();
    let lease = app.config.turn_lease;
    let due = turn_claims::list_due(&app.db, BATCH).await;
    if due.is_err() || began.elapsed() > lease / 3 {
        app.db.outages.record(lease);
    }
    let due = due?;
    let count = due.len();
    // Several at once: one whose conversation somebody holds must not keep the others waiting.
    let recovering = async |(tenant_id, turn_id): (TenantId, TurnId)| {
        if app.shutdown.is_stopping() {
            return;
        }
        if let Err(error) = recover(app, tenant_id, turn_id).await {
            tracing::warn!(tenant = %tenant_id, turn = %turn_id, error = %error, cause = ?error.cause,
                           "a turn was not recovered");
            // Somebody who holds a lock for long says nothing about the turn; while the database is away this fails.
            let counts = !matches!(error.code, Code::Unavailable | Code::Busy);
            if let Err(error) = put_off(app, tenant_id, turn_id, counts).await {
                tracing::warn!(tenant = %tenant_id, turn = %turn_id, error = %error,
                               "a turn was not put off");
            }
        }
    };
    stream::iter(due)
        .for_each_concurrent(AT_ONCE, recovering)
        .await;
    Ok(count)
}

/// Lets others go before a turn that was not recovered. One that fails again and again ends; `counts` says whether
/// this was a failure of its own.
async fn put_off(app: &App, tenant_id: TenantId, turn_id: TurnId, counts: bool) -> Result<()> {
    let caller = ServiceCaller::for_tenant(tenant_id);
    let mut tx = caller.begin(&app.db).await?;
    let Some(turn) = turns::find(&mut tx, turn_id).await? else {
        return Ok(());
    };
    conversations::lock(&mut tx, turn.conversation_id).await?;
    // A queue fails with its first turn, whichever was looked at.
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
    let failures = if counts {
        turn_claims::defer(&mut tx, failing).await?.unwrap_or(0)
    } else {
        turn_claims::wait_a_second(&mut tx, failing).await?;
        0
    };
    if failures >= MAX_FAILURES {
        abandon(app, &mut tx, failing).await?;
        tracing::warn!(tenant = %tenant_id, turn = %failing, failures, "a turn was ended as failed");
    }
    tx.commit().await?;
    app.live.notify(turn.conversation_id);
    Ok(())
}

/// Ends a turn whose conversation is held, whatever its row holds.
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
        return Ok(());
    };
    let conversation_id = turn.conversation_id;
    // Somebody who holds it recovers it, or moves it on.
    if !conversations::try_lock(&mut tx, conversation_id).await? {
        return Ok(());
    }
    let claimed = match turn.state {
        TurnState::Running if turn.node.is_some() && app.db.outages.is_recent() => return Ok(()),
        TurnState::Running => claim_expired(app, &mut tx, turn_id).await?,
        TurnState::WaitingClient => {
            let now = app.clock.now();
            if let Some(lease) =
                turn_claims::claim_waiting(&mut tx, turn_id, runner(app), true).await?
            {
                interrupted(app, &mut tx, &lease, StopReason::ToolResultsMissing, now).await?;
            }
            try_begin_next(app, &mut tx, conversation_id, now).await?
        }
        TurnState::Queued => begin_next(app, &mut tx, conversation_id, app.clock.now()).await?,
        TurnState::Completed
        | TurnState::Failed
        | TurnState::Cancelled
        | TurnState::Interrupted => return Ok(()),
    };
    tx.commit().await?;
    app.live.notify(conversation_id);
    // One that was given up is told so.
    app.live.notify_deliveries(tenant_id);
    if let Some(claimed) = claimed {
        start(app, tenant_id, claimed, None);
    }
    Ok(())
}

/// Goes on with a turn whose node was lost, or ends it where that is all there is to do.
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
    tracing::info!(turn = %turn_id, attempt = lease.attempt, "took a turn over");
    let session_id = lease.session_id.unwrap_or(lease.conversation_id);
    let results = interrupted_tools(tx, session_id).await?;
    let over = match lease.cancelled {
        Some(reason) => Some((reason.state(), reason.as_str())),
        None if lease.lost >= MAX_LOST => Some((TurnState::Failed, Code::TurnAbandoned.as_str())),
        None => None,
    };
    if let Some(how) = over {
        end(app, tx, &lease, &results, how, now).await?;
        return try_begin_next(app, tx, lease.conversation_id, now).await;
    }
    let session_id = go_on(app, tx, &mut lease, &results).await?;
    Ok(Some(RunnableTurn {
        lease,
        session_id,
        past: None,
    }))
}

/// What is told of tools whose outcome nobody knows: a call never stays without a result.
async fn interrupted_tools(tx: &mut TenantTx, session_id: SessionId) -> Result<Vec<NewMessage>> {
    let open = open_calls::find(tx, session_id).await?;
    let open = open.map_or_else(Vec::new, |open| open.ids);
    let why = "the node that ran the tool was lost; whether it had an effect is not known";
    let told = open.iter().map(|call| interrupted_result(call, why));
    Ok(told.collect())
}

/// Tells that what the lost node said last is void, and what became of its tools.
async fn go_on(
    app: &App,
    tx: &mut TenantTx,
    lease: &mut TurnLease,
    results: &[NewMessage],
) -> Result<SessionId> {
    let tip = conversations::lock(tx, lease.conversation_id).await?;
    let gone = || Error::internal(anyhow::anyhow!("a running turn has no conversation"));
    let tip = tip.ok_or_else(gone)?;
    let discarded =
        NewEvent::new(MESSAGE_DISCARDED).with(json!({ "discarded_attempt": lease.attempt - 1 }));
    let told: Vec<NewEvent> = std::iter::once(discarded)
        .chain((0..results.len()).map(NewEvent::of_message))
        .collect();
    let fence = Fence {
        turn_id: lease.id,
        fence: lease.fence,
        version: lease.version,
    };
    let write = Write {
        conversation_id: lease.conversation_id,
        session_id: tip,
        messages: results,
        speaker: None,
        events: &told,
        attempt: lease.attempt,
        starts: false,
        change: &Change::default(),
        runner: runner(app),
    };
    let written = turn_writes::write(tx, fence, &write, app.clock.now()).await?;
    written
        .ok_or_else(|| Error::internal(anyhow::anyhow!("a turn was lost while it was taken")))?;
    lease.version += 1;
    Ok(tip)
}
