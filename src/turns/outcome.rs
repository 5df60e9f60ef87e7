//! How turns end: what a client is told of the end, and the last write of a turn that nobody runs.

use chrono::{DateTime, Utc};
use serde_json::Value;

use super::accept::{RunnableTurn, begin};
use super::limit;
use super::reply::{self, AnsweredTurn};
use super::runner;
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
use crate::store::turn::turn_claims::{self, TurnLease};
use crate::store::turn::turn_writes::{self, Change, Fence, Write};
use crate::store::turn::turns;

/// What a client hears at the end of a turn, or when the turn waits for its tools.
#[derive(Debug, Clone)]
pub struct Outcome {
    pub turn_id: TurnId,
    pub conversation_id: SessionId,
    pub session_id: SessionId,
    pub compressed: bool,
    pub agent: String,
    pub session_info: SessionInfo,
    pub created_at: DateTime<Utc>,
    pub usage: TokenUsage,
    pub said: Said,
}

#[derive(Debug, Clone)]
pub enum Said {
    Answer {
        content: Value,
        /// Null where there are none.
        tool_calls: Value,
        finish_reason: String,
        /// What the model told beside it.
        extra: Option<Box<Extra>>,
    },
    /// It brought no answer: see `Turn::failure`.
    Nothing(Box<Turn>),
}

impl Outcome {
    /// The event that tells it.
    pub fn event(&self) -> &'static str {
        match &self.said {
            Said::Answer { finish_reason, .. } if finish_reason == "tool_calls" => TURN_WAITING,
            Said::Answer { .. } => of_end(TurnState::Completed),
            Said::Nothing(turn) => of_end(turn.state),
        }
    }

    /// Of a turn that has ended, or waits for its client.
    pub async fn of(tx: &mut TenantTx, turn: Turn) -> Result<Self> {
        let said = match turn.state {
            TurnState::Completed | TurnState::WaitingClient => {
                let said = turns::last_said(tx, turn.id).await?;
                let (content, calls, extra) = match said {
                    Some(said) => (said.content, said.tool_calls, said.extra),
                    None => (None, None, None),
                };
                Said::Answer {
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
            | TurnState::Interrupted => Said::Nothing(Box::new(turn.clone())),
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
            said,
        })
    }
}

/// Ends a turn that was taken for that, in a conversation that is held: the client's tools that it waited
/// for are told as interrupted.
pub(super) async fn interrupted(
    app: &App,
    tx: &mut TenantTx,
    lease: &TurnLease,
    reason: StopReason,
    now: DateTime<Utc>,
) -> Result<()> {
    let open = lease.calls.as_deref().unwrap_or_default();
    let results: Vec<NewMessage> = open
        .iter()
        .map(|call| interrupted_result(&call.id, "the client brought no result"))
        .collect();
    end(
        app,
        tx,
        lease,
        &results,
        (reason.state(), reason.as_str()),
        now,
    )
    .await
}

/// The last write of a turn that this transaction has taken, and the word to who waits for a delivery that there is
/// no answer.
pub(super) async fn end(
    app: &App,
    tx: &mut TenantTx,
    lease: &TurnLease,
    messages: &[NewMessage],
    (state, reason): (TurnState, &str),
    now: DateTime<Utc>,
) -> Result<()> {
    let named = (0..messages.len()).map(NewEvent::of_message);
    let last = NewEvent::new(of_end(state)).with(serde_json::json!({ "reason": reason }));
    let told: Vec<NewEvent> = named.chain([last]).collect();
    let tip = conversations::lock(tx, lease.conversation_id).await?;
    let session_id = tip.or(lease.session_id).unwrap_or(lease.conversation_id);
    let write = Write {
        conversation_id: lease.conversation_id,
        session_id,
        messages,
        speaker: None,
        events: &told,
        attempt: lease.attempt,
        starts: false,
        change: &Change {
            state: Some(state),
            reason: Some(reason),
            ..Change::default()
        },
        runner: runner(app),
    };
    let fence = Fence {
        turn_id: lease.id,
        fence: lease.fence,
        version: lease.version,
    };
    let written = turn_writes::write(tx, fence, &write, now).await?;
    let lost = || Error::internal(anyhow::anyhow!("a turn was lost while it was ended"));
    let heard = written.ok_or_else(lost)?;
    if let (Some(ReplyVia::Delivery), Some(to)) = (heard.reply_via, &lease.reply_to) {
        let turn = AnsweredTurn {
            id: lease.id,
            conversation_id: lease.conversation_id,
            session_id,
        };
        reply::deliver(tx, turn, to, Err(reason), now).await?;
    }
    Ok(())
}

/// Takes the next turn of a conversation that is held, if one waits, none is active, and the tenant's limit allows
/// one more: otherwise a sweeper takes it later.
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
        turn_claims::wait_a_second(tx, next).await?;
        return Ok(None);
    }
    let Some(lease) = turn_claims::claim_next(tx, conversation_id, runner(app)).await? else {
        return Ok(None);
    };
    let tip = conversations::lock(tx, conversation_id).await?;
    let gone = || Error::internal(anyhow::anyhow!("a deleted conversation has a queue"));
    begin(app, tx, lease, tip.ok_or_else(gone)?, now)
        .await
        .map(Some)
}

/// The same after the end of another turn in `tx`, which must not be undone by what is wrong with the next: then a
/// sweeper takes that later.
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
                           "the next turn was not started");
            tx.roll_back_to_mark().await?;
            Ok(None)
        }
    }
}
