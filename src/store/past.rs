//! The transcript as a prompt needs it.

use serde_json::value::RawValue;
use sqlx::Row;
use sqlx::postgres::PgRow;
use sqlx::types::Json;

use super::TenantTx;
use crate::domain::message::{MessageKind, Role};
use crate::domain::prompt::PastMessage;
use crate::error::Result;
use crate::ids::SessionId;

/// More than a context window holds, whatever its size.
pub(super) const MOST_PAST_MESSAGES: i64 = 10_000;

/// The end of a session's transcript, as much as fits into so many tokens.
macro_rules! past_messages {
    ($session:literal, $tokens:literal, $limit:literal) => {
        concat!(
            "select e.seq, e.role, e.kind, e.content, e.tool_calls, e.tool_call_id
               from (select m.seq, m.role, m.kind, m.content, m.tool_calls, m.tool_call_id,
                            sum(m.token_count) over (order by m.seq desc) as tokens
                       from messages m
                      where m.tenant_id = $1
                        and m.session_id = ",
            $session,
            "   and m.undone_at is null
                      order by m.seq desc
                      limit ",
            $limit,
            ") e
              where e.tokens <= ",
            $tokens
        )
    };
}
pub(super) use past_messages;

/// Oldest first.
pub async fn list(
    tx: &mut TenantTx,
    session_id: SessionId,
    tokens: i64,
) -> Result<Vec<PastMessage>> {
    let rows = sqlx::query(concat!(past_messages!("$2", "$3", "$4"), " order by e.seq"))
        .bind(tx.tenant_id())
        .bind(session_id)
        .bind(tokens)
        .bind(MOST_PAST_MESSAGES)
        .fetch_all(tx.connection())
        .await?;
    rows.iter().map(|row| read_past(row, 0)).collect()
}

/// A row whose columns from `first` on are those of `past_messages`. By their places: there are many rows.
pub(super) fn read_past(row: &PgRow, first: usize) -> Result<PastMessage> {
    let raw = |place: usize| -> Result<Option<Box<RawValue>>> {
        let value: Option<Json<Box<RawValue>>> = row.try_get(place)?;
        Ok(value.map(|Json(raw)| raw))
    };
    Ok(PastMessage {
        role: Role::from_column(row.try_get(first + 1)?)?,
        kind: MessageKind::from_column(row.try_get(first + 2)?)?,
        content: raw(first + 3)?,
        tool_calls: raw(first + 4)?,
        tool_call_id: row.try_get(first + 5)?,
    })
}
