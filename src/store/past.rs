//! The transcript as a prompt needs it.

use serde_json::value::RawValue;
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::TenantTx;
use crate::domain::message::{MessageKind, Role};
use crate::domain::prompt::PastMessage;
use crate::error::{Error, Result};
use crate::ids::SessionId;

/// More than a context window holds, whatever its size.
pub(super) const MOST_PAST_MESSAGES: i64 = 10_000;

/// The end of a session's transcript, as much as fits into so many tokens: all in one row, since a row of its own
/// costs more than the message in it.
macro_rules! past_messages {
    ($session:literal, $tokens:literal, $limit:literal) => {
        concat!(
            "select array_agg(e.seq) as seqs, array_agg(e.role) as roles, array_agg(e.kind) as kinds,
                    array_agg(e.content::text) as contents, array_agg(e.tool_calls::text) as tool_calls,
                    array_agg(e.tool_call_id) as tool_call_ids
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
    let row = sqlx::query(past_messages!("$2", "$3", "$4"))
        .bind(tx.tenant_id())
        .bind(session_id)
        .bind(tokens)
        .bind(MOST_PAST_MESSAGES)
        .fetch_one(tx.connection())
        .await?;
    read_past(&row)
}

/// A row with the columns of `past_messages`.
pub(super) fn read_past(row: &PgRow) -> Result<Vec<PastMessage>> {
    let Some(seqs) = row.try_get::<Option<Vec<i64>>, _>("seqs")? else {
        return Ok(Vec::new());
    };
    let roles: Vec<String> = row.try_get("roles")?;
    let kinds: Vec<String> = row.try_get("kinds")?;
    let contents: Vec<Option<String>> = row.try_get("contents")?;
    let tool_calls: Vec<Option<String>> = row.try_get("tool_calls")?;
    let tool_call_ids: Vec<Option<String>> = row.try_get("tool_call_ids")?;
    let raw = |text: String| RawValue::from_string(text).map_err(Error::internal);
    let said = roles.into_iter().zip(kinds).zip(contents);
    let tools = tool_calls.into_iter().zip(tool_call_ids);
    let mut past = Vec::with_capacity(seqs.len());
    for (seq, (((role, kind), content), (calls, call_id))) in seqs.into_iter().zip(said.zip(tools))
    {
        let message = PastMessage {
            role: Role::from_column(&role)?,
            kind: MessageKind::from_column(&kind)?,
            content: content.map(raw).transpose()?,
            tool_calls: calls.map(raw).transpose()?,
            tool_call_id: call_id,
        };
        past.push((seq, message));
    }
    // They come newest first, which no statement promises.
    past.sort_by_key(|(seq, _)| *seq);
    Ok(past.into_iter().map(|(_, message)| message).collect())
}
