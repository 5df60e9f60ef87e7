//! Tool calls at the end of a session that have no result.

use chrono::{DateTime, Utc};
use serde_json::Value;
use sqlx::types::Json;

use crate::domain::conversation::message::NewMessage;
use crate::error::Result;
use crate::ids::{SessionId, TurnId};
use crate::store::TenantTx;
use crate::store::conversation::message_columns::to_json;

#[derive(Debug)]
pub struct OpenCalls {
    /// The turn that made the calls; `None` if they were appended or imported.
    pub turn_id: Option<TurnId>,
    /// The ids of the calls, in their order.
    pub ids: Vec<String>,
}

/// The open calls of the agent's last message, if only results follow it: a later result would be in the wrong place.
/// Parsed here and not in SQL: `->>` fails on a text with U+0000, which older rows may contain.
pub async fn find(tx: &mut TenantTx, session_id: SessionId) -> Result<Option<OpenCalls>> {
    let last: Option<(i64, Option<TurnId>, Option<Json<Value>>)> = sqlx::query_as(
        "select m.seq, m.turn_id, m.tool_calls
           from messages m
          where m.tenant_id = $1
            and m.session_id = $2
            and m.role <> 'tool'
            and m.undone_at is null
          order by m.seq desc
          limit 1",
    )
    .bind(tx.tenant_id())
    .bind(session_id)
    .fetch_optional(tx.connection())
    .await?;
    let Some((seq, turn_id, Some(Json(Value::Array(calls))))) = last else {
        return Ok(None);
    };
    let answered: Vec<String> = sqlx::query_scalar(
        "select r.tool_call_id
           from messages r
          where r.tenant_id = $1
            and r.session_id = $2
            and r.seq > $3
            and r.tool_call_id is not null
            and r.undone_at is null",
    )
    .bind(tx.tenant_id())
    .bind(session_id)
    .bind(seq)
    .fetch_all(tx.connection())
    .await?;
    let ids = calls.iter().filter_map(|call| call["id"].as_str());
    let open = ids.filter(|id| !answered.iter().any(|answered_id| answered_id == id));
    let ids: Vec<String> = open.map(str::to_owned).collect();
    Ok((!ids.is_empty()).then_some(OpenCalls { turn_id, ids }))
}

/// Inserts results at the end of a session without an active turn, as part of the turn that made the calls: they are
/// undone with it. An ended session stays ended.
pub async fn insert_results(
    tx: &mut TenantTx,
    session_id: SessionId,
    turn_id: Option<TurnId>,
    results: &[NewMessage],
    now: DateTime<Utc>,
) -> Result<()> {
    let contents: Result<Vec<Option<String>>> = results
        .iter()
        .map(|result| to_json(result.content.as_ref()))
        .collect();
    let calls: Vec<Option<&str>> = results
        .iter()
        .map(|result| result.tool_call_id.as_deref())
        .collect();
    let tokens: Vec<i32> = results.iter().map(NewMessage::tokens).collect();
    sqlx::query(
        "with reserved as (
           update sessions
              set next_seq = next_seq + $3,
                  message_count = message_count + $3,
                  token_count = token_count + $4,
                  last_active_at = greatest(last_active_at, $5)
            where tenant_id = $1
              and id = $2
              and undone_at is null
              and end_reason is distinct from 'compression'
              and turn_id is null
        returning next_seq - $3 as first_seq, last_active_at as at
         )
         insert into messages (tenant_id, session_id, seq, role, kind, content, tool_call_id, token_count, turn_id,
                               created_at)
         select $1, $2, reserved.first_seq + m.position - 1, 'tool', 'normal', m.content::json, m.tool_call_id,
                m.tokens, $6, reserved.at
           from reserved,
                unnest($7::text[], $8::text[], $9::integer[])
                  with ordinality
                  as m (content, tool_call_id, tokens, position)",
    )
    .bind(tx.tenant_id())
    .bind(session_id)
    .bind(results.len() as i64)
    .bind(tokens.iter().copied().map(i64::from).sum::<i64>())
    .bind(now)
    .bind(turn_id)
    .bind(contents?)
    .bind(calls)
    .bind(tokens)
    .execute(tx.connection())
    .await?;
    Ok(())
}
