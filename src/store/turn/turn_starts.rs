//! Starts a turn in an idle conversation, in one statement: it accepts the turn, appends its messages to the
//! transcript, and reads the history before them. It does nothing where the conversation is not idle.

use chrono::{DateTime, Utc};
use sqlx::Row;
use sqlx::types::Json;

use super::prompt_history::{MAX_HISTORY_MESSAGES, read_history};
use super::turn_lease::Runner;
use super::turn_sql::{CommonValues, START, bind_common};
use super::turns::NewTurn;
use crate::domain::turn::event::NewEvent;
use crate::domain::turn::prompt::HistoryMessage;
use crate::error::{Error, Result};
use crate::ids::{SessionId, UserId};
use crate::store::TenantTx;
use crate::store::conversation::message_columns::MessageColumns;

/// A turn that has started, at its first fence and version.
#[derive(Debug)]
pub struct StartedTurn {
    pub session_id: SessionId,
    pub at: DateTime<Utc>,
    /// The transcript before it; `None` if messages were appended while it started.
    pub history: Option<Vec<HistoryMessage>>,
}

/// Who runs a turn that starts, and under which conditions it does.
#[derive(Debug, Clone, Copy)]
pub struct StartConditions {
    pub runner: Runner,
    /// It starts only if fewer turns of the tenant run; `None`: however many do.
    pub running_below: Option<i64>,
    /// It starts only if the sender belongs to this user; `None`: the caller has checked that.
    pub sender_of: Option<UserId>,
    /// Tokens of history that are read with it, its own messages included.
    pub history_tokens: i64,
}

/// Starts a turn with its events, or answers `None`, and nothing was done.
pub async fn start(
    tx: &mut TenantTx,
    turn: &NewTurn<'_>,
    events: &[NewEvent],
    conditions: StartConditions,
    now: DateTime<Utc>,
) -> Result<Option<StartedTurn>> {
    let values = CommonValues {
        tenant_id: tx.tenant_id(),
        turn_id: turn.id,
        conversation_id: turn.conversation_id,
        now,
        lease_ms: conditions.runner.lease_ms,
        attempt: 1,
        sender: turn.sender.as_ref(),
        events,
    };
    let mut columns = MessageColumns::new(&turn.input.messages)?;
    let extras = std::mem::take(&mut columns.extras);
    let own_tokens = columns.token_sum();
    let row = bind_common(sqlx::query(START), &values, columns)
        .bind(turn.agent)
        .bind(turn.principal)
        .bind(turn.request_hash.as_slice())
        .bind(Json(turn.input))
        .bind(Json(turn.session_info))
        .bind(conditions.runner.node)
        .bind(turn.reply.map(|(to, _)| Json(to)))
        .bind(turn.reply.map(|(_, via)| via.as_str()))
        .bind(conditions.running_below)
        .bind(conditions.history_tokens - own_tokens)
        .bind(MAX_HISTORY_MESSAGES)
        .bind(conditions.sender_of)
        .bind(extras)
        .fetch_optional(tx.connection())
        .await?;
    let Some(row) = row else {
        return Ok(None);
    };
    tx.notify_conversation(turn.conversation_id);
    let expected_seq: i64 = row.try_get("expected_seq")?;
    let first_seq: Option<i64> = row.try_get("first_seq")?;
    let Some(first_seq) = first_seq else {
        let detail = "an idle conversation was moved";
        return Err(Error::internal(anyhow::anyhow!(detail)));
    };
    let history = if first_seq == expected_seq {
        Some(read_history(&row)?)
    } else {
        None
    };
    Ok(Some(StartedTurn {
        session_id: row.try_get("session_id")?,
        at: row.try_get("at")?,
        history,
    }))
}
