//! `TurnLease`: a turn that a node runs, and the fence that its writes carry.

use chrono::{DateTime, Utc};
use sqlx::Row;
use sqlx::postgres::PgRow;
use sqlx::types::Json;

use super::turns::NewTurn;
use crate::domain::bridge::delivery::ReplyTo;
use crate::domain::conversation::message::ToolCall;
use crate::domain::turn::{SessionInfo, StopReason, TurnInput, TurnState};
use crate::error::Result;
use crate::ids::{BootId, IdentityId, SessionId, TurnId, UserId};

/// A node, and how long it keeps a turn without renewing its lease.
#[derive(Debug, Clone, Copy)]
pub struct Runner {
    pub node: BootId,
    pub lease_ms: i64,
}

/// A turn that this node runs, as its writes have left it. Another node that claims it moves the fence, and from
/// then on this lease writes nothing.
#[derive(Debug, Clone)]
pub struct TurnLease {
    pub id: TurnId,
    pub conversation_id: SessionId,
    /// Where it writes: the tip. The conversation's first session until it has started.
    pub session_id: SessionId,
    pub agent: String,
    pub input: TurnInput,
    pub session_info: SessionInfo,
    pub sender: Option<(IdentityId, String)>,
    /// The conversation's owner.
    pub user_id: Option<UserId>,
    pub steps: i32,
    /// The client's tool calls that it waits for.
    pub calls: Option<Vec<ToolCall>>,
    pub runner: Runner,
    pub fence: i64,
    pub version: i64,
    pub attempt: i32,
    /// How often its node was lost with it.
    pub lost: i32,
    pub state: TurnState,
    pub cancelled: Option<StopReason>,
    pub created_at: DateTime<Utc>,
    pub started_at: Option<DateTime<Utc>>,
    pub reply_to: Option<ReplyTo>,
}

impl TurnLease {
    /// Of a turn that was started by the statement that accepted it.
    pub fn started(
        turn: &NewTurn<'_>,
        runner: Runner,
        session_id: SessionId,
        user_id: Option<UserId>,
        at: DateTime<Utc>,
    ) -> Self {
        Self {
            id: turn.id,
            conversation_id: turn.conversation_id,
            session_id,
            agent: turn.agent.to_owned(),
            input: TurnInput {
                messages: Vec::new(),
                ..turn.input.clone()
            },
            session_info: turn.session_info.clone(),
            sender: turn.sender.clone(),
            user_id,
            steps: i32::try_from(turn.input.messages.len()).unwrap_or(i32::MAX),
            calls: None,
            runner,
            fence: 1,
            version: 1,
            attempt: 1,
            lost: 0,
            state: TurnState::Running,
            cancelled: None,
            created_at: at,
            started_at: Some(at),
            reply_to: turn.reply.map(|(to, _)| to.clone()),
        }
    }
}

macro_rules! lease_columns {
    () => {
        "t.id, t.conversation_id, t.agent, t.input, t.session_info, t.identity_id, t.platform,
         coalesce(t.end_session_id, t.start_session_id, t.conversation_id) as session_id, t.steps, t.calls, t.fence,
         t.version, t.attempt, t.lost, t.state, t.cancel_requested_at is not null as cancelled, t.cancel_reason,
         t.created_at, t.started_at, t.reply_to,
         (select c.user_id
            from conversations c
           where c.tenant_id = $1
             and c.id = t.conversation_id) as user_id"
    };
}
pub(super) use lease_columns;

pub(super) fn read_lease(row: &PgRow, runner: Runner) -> Result<TurnLease> {
    let Json(input): Json<TurnInput> = row.try_get("input")?;
    let Json(session_info): Json<SessionInfo> = row.try_get("session_info")?;
    let calls: Option<Json<Vec<ToolCall>>> = row.try_get("calls")?;
    let reply_to: Option<Json<ReplyTo>> = row.try_get("reply_to")?;
    let identity: Option<IdentityId> = row.try_get("identity_id")?;
    let platform: Option<String> = row.try_get("platform")?;
    let cancelled: bool = row.try_get("cancelled")?;
    let cancel_reason: Option<String> = row.try_get("cancel_reason")?;
    Ok(TurnLease {
        id: row.try_get("id")?,
        conversation_id: row.try_get("conversation_id")?,
        session_id: row.try_get("session_id")?,
        agent: row.try_get("agent")?,
        input,
        session_info,
        sender: identity.zip(platform),
        user_id: row.try_get("user_id")?,
        steps: row.try_get("steps")?,
        calls: calls.map(|Json(calls)| calls),
        runner,
        fence: row.try_get("fence")?,
        version: row.try_get("version")?,
        attempt: row.try_get("attempt")?,
        lost: row.try_get("lost")?,
        state: TurnState::from_column(row.try_get("state")?)?,
        cancelled: cancelled.then(|| StopReason::from_stop_request(cancel_reason.as_deref())),
        created_at: row.try_get("created_at")?,
        started_at: row.try_get("started_at")?,
        reply_to: reply_to.map(|Json(to)| to),
    })
}
