//! The end of a turn: what its caller gets, the last write of a turn that no node runs, and the next turn.

use chrono::{DateTime, Utc};
use serde_json::{Value, json};

use super::accept::RunnableTurn;
use super::reply::{self, AnsweredTurn};
use super::starts::begin;
use super::{limit, runner};
use crate::app::App;
use crate::domain::bridge::delivery::ReplyVia;
use crate::domain::conversation::message::NewMessage;
use crate::domain::conversation::message_extra::Extra;
use crate::domain::turn::completion::TokenUsage;
use crate::domain::turn::event::{NewEvent, TURN_WAITING, of_end};
use crate::domain::turn::{SessionInfo, StopReason, Turn, TurnState, interrupted_result};
use crate::error::{Error, Result};
use crate::ids::{SessionId, TurnId};
use crate::store::TenantTx;
use crate::store::conversation::conversations;
use crate::store::tenant::tenants;
use crate::store::turn::turn_claims;
use crate::store::turn::turn_lease::TurnLease;
use crate::store::turn::turn_writes::{Change, TurnWrite};
use crate::store::turn::turns;

/// What a caller gets when a turn has ended, or waits for the caller's tools.
#[derive(Debug, Clone)]
pub struct TurnOutcome {
    pub turn_id: TurnId,
    pub conversation_id: SessionId,
    pub session_id: SessionId,
    pub compressed: bool,
    pub agent: String,
    pub session_info: SessionInfo,
    pub created_at: DateTime<Utc>,
    pub usage: TokenUsage,
    pub result: TurnResult,
}

#[derive(Debug, Clone)]
pub enum TurnResult {
    Answer {
        content: Value,
        /// Null where there are none.
        tool_calls: Value,
        finish_reason: String,
        /// What the model sent beside it.
        extra: Option<Box<Extra>>,
    },
    /// It has no answer: see `Turn::failure`.
    Failure(Box<Turn>),
}

impl TurnOutcome {
    /// The event of this outcome.
    pub fn event(&self) -> &'static str {
        match &self.result {
            TurnResult::Answer { finish_reason, .. } if finish_reason == "tool_calls" => {
                TURN_WAITING
            }
            TurnResult::Answer { .. } => of_end(TurnState::Completed),
            TurnResult::Failure(turn) => of_end(turn.state),
        }
    }

    /// Reads the outcome of a turn that has ended, or waits for its client.
    pub async fn read(tx: &mut TenantTx, turn: Turn) -> Result<Self> {
        let result = match turn.state {
            TurnState::Completed | TurnState::WaitingClient => {
                let answer = turns::find_last_answer(tx, turn.id).await?;
                let (content, calls, extra) = match answer {
                    Some(answer) => (answer.content, answer.tool_calls, answer.extra),
                    None => (None, None, None),
                };
                TurnResult::Answer {
                    content: content.map_or(Value::Null, |content| content.0),
                    tool_calls: calls.map_or(Value::Null, |calls| calls.0),
                    finish_reason: turn
                        .finish_reason
                        .clone()
                        .unwrap_or_else(|| "stop".to_owned()),
                    extra: extra.map(|extra| extra.0),
                }
            }
            TurnState::Queued
            | TurnState::Running
            | TurnState::Failed
            | TurnState::Cancelled
            | TurnState::Interrupted => TurnResult::Failure(Box::new(turn.clone())),
        };
        Ok(Self {
            turn_id: turn.id,
            conversation_id: turn.conversation_id,
            session_id: turn.session_id(),
            compressed: turn.compressed(),
            agent: turn.agent,
            session_info: turn.session_info,
            created_at: turn.created_at,
            usage: turn.usage,
            result,
        })
    }
}

/// Ends a turn that was claimed for that, in a conversation that is locked. The client's tool calls that it waited
/// for get results that say they were interrupted.
pub(super) async fn interrupt(
    tx: &mut TenantTx,
    lease: &mut TurnLease,
    reason: StopReason,
    now: DateTime<Utc>,
) -> Result<()> {
    let open = lease.calls.as_deref().unwrap_or_default();
    let results: Vec<NewMessage> = open
        .iter()
        .map(|call| interrupted_result(&call.id, "the client brought no result"))
        .collect();
    end(tx, lease, &results, (reason.state(), reason.as_str()), now).await
}

/// The last write of a turn that this transaction has claimed, and the notice to a sender who waits for a delivery
/// that there is no answer.
pub(super) async fn end(
    tx: &mut TenantTx,
    lease: &mut TurnLease,
    messages: &[NewMessage],
    (state, reason): (TurnState, &str),
    now: DateTime<Utc>,
) -> Result<()> {
    let of_messages = (0..messages.len()).map(NewEvent::of_message);
    let events: Vec<NewEvent> = of_messages
        .chain([end_event(state, Some(reason))])
        .collect();
    let tip = conversations::lock(tx, lease.conversation_id).await?;
    lease.session_id = tip.unwrap_or(lease.session_id);
    let write = TurnWrite {
        messages,
        events: &events,
        change: Change {
            state: Some(state),
            reason: Some(reason),
            ..Change::default()
        },
    };
    let ack = lease.write_claimed(tx, &write, now).await?;
    if let (Some(ReplyVia::Delivery), Some(to)) = (ack.reply_via, &lease.reply_to) {
        let turn = AnsweredTurn::of_lease(lease);
        reply::deliver(tx, turn, to, Err(reason), now).await?;
    }
    Ok(())
}

pub(super) fn end_event(state: TurnState, reason: Option<&str>) -> NewEvent {
    NewEvent::new(of_end(state)).with(json!({ "reason": reason }))
}

/// Claims and starts the next turn of a conversation that is locked, if one waits, none is active, and the tenant's
/// limit allows one more. Otherwise a sweeper starts it later.
pub(super) async fn begin_next(
    app: &App,
    tx: &mut TenantTx,
    conversation_id: SessionId,
    now: DateTime<Utc>,
) -> Result<Option<RunnableTurn>> {
    let Some(next) = turn_claims::find_next(tx, conversation_id).await? else {
        return Ok(None);
    };
    let concurrent_turns = tenants::get_limits(tx).await?.concurrent_turns;
    if !limit::try_allow_one(app, tx, concurrent_turns).await? {
        turn_claims::postpone(tx, next).await?;
        return Ok(None);
    }
    let Some(lease) = turn_claims::claim_next(tx, conversation_id, runner(app)).await? else {
        return Ok(None);
    };
    let Some(tip) = conversations::lock(tx, conversation_id).await? else {
        let detail = "a deleted conversation has a queue";
        return Err(Error::internal(anyhow::anyhow!(detail)));
    };
    begin(tx, lease, tip, now).await.map(Some)
}

/// The same after the end of another turn in `tx`, which a failure of the next turn must not undo. Then a sweeper
/// starts it later.
pub(super) async fn try_begin_next(
    app: &App,
    tx: &mut TenantTx,
    conversation_id: SessionId,
    now: DateTime<Utc>,
) -> Result<Option<RunnableTurn>> {
    tx.mark().await?;
    match begin_next(app, tx, conversation_id, now).await {
        Ok(next) => Ok(next),
        Err(error) => {
            tracing::warn!(conversation = %conversation_id, error = %error, cause = ?error.cause,
                           "next turn not started");
            tx.roll_back_to_mark().await?;
            Ok(None)
        }
    }
}
