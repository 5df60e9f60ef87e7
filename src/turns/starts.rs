//! The ways in which a turn starts to run, each a step of the transaction that accepts or claims it.

use chrono::{DateTime, Utc};

use super::accept::{RunnableTurn, TurnRequest, not_idle};
use super::target::ResolvedTarget;
use super::{limit, runner};
use crate::app::App;
use crate::domain::conversation::message::{NewMessage, Role};
use crate::domain::turn::event::{NewEvent, TURN_STARTED};
use crate::domain::turn::prompt::{HistoryMessage, token_budget};
use crate::domain::turn::{interrupted_result, match_results, unknown_call};
use crate::error::Result;
use crate::ids::{SessionId, TurnId, UserId};
use crate::store::TenantTx;
use crate::store::turn::prompt_history;
use crate::store::turn::turn_claims::{self, Wait};
use crate::store::turn::turn_lease::TurnLease;
use crate::store::turn::turn_starts::{self, StartConditions};
use crate::store::turn::turn_stops;
use crate::store::turn::turn_writes::TurnWrite;
use crate::store::turn::turns::NewTurn;

/// A turn as it is stored, and what of its target decides how it starts.
pub(super) struct TargetedTurn<'a> {
    pub row: NewTurn<'a>,
    /// The conversation's owner.
    owner: Option<UserId>,
    /// The sender's user, where a chat was named.
    chat_of: Option<UserId>,
}

pub(super) fn new_turn<'a>(
    request: &'a TurnRequest<'_>,
    request_hash: [u8; 32],
    found: &'a ResolvedTarget,
) -> TargetedTurn<'a> {
    let sender = request.access.sender.as_ref();
    let row = NewTurn {
        id: TurnId::generate(),
        conversation_id: found.tip.name.conversation_id,
        agent: &request.agent.name,
        principal: request.principal,
        request_hash,
        input: &request.input,
        session_info: &found.session_info,
        sender: sender.map(|sender| (sender.id, sender.name.platform().to_string())),
        reply: request.reply.as_ref().map(|(to, via)| (to, *via)),
    };
    TargetedTurn {
        row,
        owner: found.tip.owner.user_id,
        chat_of: found.chat_of,
    }
}

/// Starts a turn where its conversation is idle, and fewer than `running_below` of the tenant's turns run.
pub(super) async fn start(
    app: &App,
    tx: &mut TenantTx,
    request: &TurnRequest<'_>,
    turn: &TargetedTurn<'_>,
    running_below: Option<i64>,
    now: DateTime<Utc>,
) -> Result<Option<RunnableTurn>> {
    let messages = &request.input.messages;
    let conditions = StartConditions {
        runner: runner(app),
        running_below,
        // Without a bound the conversation is locked, and the sender was checked since.
        sender_of: running_below.and(turn.chat_of),
        history_tokens: token_budget(&request.agent.spec),
    };
    let events = started_events(messages);
    let started = turn_starts::start(tx, &turn.row, &events, conditions, now).await?;
    let Some(started) = started else {
        return Ok(None);
    };
    let prompt = match started.history {
        Some(mut history) => {
            for message in messages {
                history.push(HistoryMessage::of(message)?);
            }
            Some((request.agent.clone(), history))
        }
        None => None,
    };
    let lease = TurnLease::started(
        &turn.row,
        conditions.runner,
        started.session_id,
        turn.owner,
        started.at,
    );
    Ok(Some(RunnableTurn { lease, prompt }))
}

/// Starts a turn in a conversation that is locked and idle, if the tenant's limit allows one more.
pub(super) async fn start_counted(
    app: &App,
    tx: &mut TenantTx,
    request: &TurnRequest<'_>,
    turn: &TargetedTurn<'_>,
    tip: SessionId,
    now: DateTime<Utc>,
) -> Result<RunnableTurn> {
    limit::allow_one(app, tx, request.agent.limits.concurrent_turns).await?;
    if let Some(started) = start(app, tx, request, turn, None, now).await? {
        return Ok(started);
    }
    // No other turn is in the way: the session names a turn that has ended.
    turn_stops::release_ended(tx, tip).await?;
    let started = start(app, tx, request, turn, None, now).await?;
    started.ok_or_else(not_idle)
}

/// The events of a turn that starts with these messages.
fn started_events(messages: &[NewMessage]) -> Vec<NewEvent> {
    let of_messages = (0..messages.len()).map(NewEvent::of_message);
    std::iter::once(NewEvent::new(TURN_STARTED))
        .chain(of_messages)
        .collect()
}

/// Starts a turn that was claimed from its queue: appends its messages to the tip.
pub(super) async fn begin(
    tx: &mut TenantTx,
    mut lease: TurnLease,
    tip: SessionId,
    now: DateTime<Utc>,
) -> Result<RunnableTurn> {
    let messages = std::mem::take(&mut lease.input.messages);
    let write = TurnWrite {
        messages: &messages,
        events: &started_events(&messages),
        ..TurnWrite::default()
    };
    lease.session_id = tip;
    lease.write_claimed(tx, &write, now).await?;
    Ok(RunnableTurn {
        lease,
        prompt: None,
    })
}

/// Goes on with the turn that waits for its client, with the results that the request brings.
pub(super) async fn continue_waiting(
    app: &App,
    tx: &mut TenantTx,
    request: TurnRequest<'_>,
    request_hash: [u8; 32],
    (turn_id, tip): (TurnId, SessionId),
    now: DateTime<Utc>,
) -> Result<RunnableTurn> {
    limit::allow_one(app, tx, request.agent.limits.concurrent_turns).await?;
    let lease = turn_claims::claim_waiting(tx, turn_id, runner(app), Wait::Any).await?;
    let mut lease = lease.ok_or_else(|| unknown_call(0))?;
    let calls = lease.calls.take().unwrap_or_default();
    let mut messages: Vec<NewMessage> = Vec::new();
    for (call, result) in match_results(&calls, &request.input.messages)? {
        messages.push(match result {
            Some(result) => result.clone(),
            None => interrupted_result(&call.id, "the client brought no result"),
        });
    }
    let others = request.input.messages.iter();
    messages.extend(others.filter(|one| one.role != Role::Tool).cloned());
    turn_claims::update_input(tx, turn_id, request_hash, &request.input).await?;
    lease.input = request.input;
    let events: Vec<NewEvent> = (0..messages.len()).map(NewEvent::of_message).collect();
    let write = TurnWrite {
        messages: &messages,
        events: &events,
        ..TurnWrite::default()
    };
    lease.session_id = tip;
    lease.write_claimed(tx, &write, now).await?;
    let budget = token_budget(&request.agent.spec);
    let history = prompt_history::list(tx, tip, budget).await?;
    Ok(RunnableTurn {
        lease,
        prompt: Some((request.agent.clone(), history)),
    })
}
