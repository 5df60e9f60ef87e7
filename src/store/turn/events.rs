//! What happened in conversations, as it was committed.

use std::collections::{HashMap, HashSet};

use chrono::{DateTime, Utc};
use serde_json::value::RawValue;
use sqlx::Row;
use sqlx::postgres::PgRow;
use sqlx::types::{Json, Uuid};

use crate::domain::conversation::message::Role;
use crate::domain::turn::event::{Event, EventMessage, MESSAGE_DISCARDED, of_end};
use crate::domain::turn::{Turn, TurnState};
use crate::error::Result;
use crate::ids::{SessionId, TurnId};
use crate::store::TenantTx;
use crate::store::db::page_bytes::{is_followed, within_page_bytes};

macro_rules! event_from {
    () => {
        "select e.seq, e.turn_id, e.attempt, e.kind, e.session_id, e.conversation_id, e.data, e.created_at,
                m.seq as message_seq, m.role, m.content, m.tool_calls, m.tool_call_id,
                coalesce(octet_length(e.data::text), 0) + coalesce(octet_length(m.content::text), 0)
                + coalesce(octet_length(m.tool_calls::text), 0) as bytes
           from events e
           left join messages m
             on m.tenant_id = $1
            and m.session_id = e.session_id
            and m.seq = e.message_seq "
    };
}

fn read_event(row: &PgRow) -> Result<Event> {
    let raw = |name: &str| -> Result<Option<Box<RawValue>>> {
        let value: Option<Json<Box<RawValue>>> = row.try_get(name)?;
        Ok(value.map(|Json(raw)| raw))
    };
    let message_seq: Option<i64> = row.try_get("message_seq")?;
    let message = match message_seq {
        Some(seq) => Some(EventMessage {
            seq,
            role: Role::from_column(row.try_get("role")?)?,
            content: raw("content")?,
            tool_calls: raw("tool_calls")?,
            tool_call_id: row.try_get("tool_call_id")?,
        }),
        None => None,
    };
    Ok(Event {
        seq: row.try_get("seq")?,
        turn_id: row.try_get("turn_id")?,
        attempt: row.try_get("attempt")?,
        kind: row.try_get("kind")?,
        session_id: row.try_get("session_id")?,
        conversation_id: row.try_get("conversation_id")?,
        data: raw("data")?,
        message,
        created_at: row.try_get("created_at")?,
    })
}

/// Events that are read at once.
pub struct EventBatch {
    pub events: Vec<Event>,
    /// Whether there were others when they were read.
    pub is_followed: bool,
}

/// Events of a conversation after a number, in order; of one turn, where it is named.
pub async fn list(
    tx: &mut TenantTx,
    conversation_id: SessionId,
    turn_id: Option<TurnId>,
    after: i64,
    limit: i64,
) -> Result<EventBatch> {
    let rows = match turn_id {
        Some(turn_id) => {
            sqlx::query(within_page_bytes!(
                "seq",
                event_from!(),
                "where e.tenant_id = $1
                   and e.turn_id = $2
                   and e.seq > $3
                 order by e.seq
                 limit $4"
            ))
            .bind(tx.tenant_id())
            .bind(turn_id)
            .bind(after)
            // One more tells whether there are others.
            .bind(limit + 1)
            .fetch_all(tx.connection())
            .await?
        }
        None => {
            sqlx::query(within_page_bytes!(
                "seq",
                event_from!(),
                "where e.tenant_id = $1
                   and e.conversation_id = $2
                   and e.seq > $3
                 order by e.seq
                 limit $4"
            ))
            .bind(tx.tenant_id())
            .bind(conversation_id)
            .bind(after)
            // One more tells whether there are others.
            .bind(limit + 1)
            .fetch_all(tx.connection())
            .await?
        }
    };
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let is_followed = rows.len() > limit || is_followed(&rows)?;
    let events = rows.iter().take(limit).map(read_event);
    Ok(EventBatch {
        events: events.collect::<Result<_>>()?,
        is_followed,
    })
}

/// The number of the last event of each conversation that is there.
pub async fn list_last(
    tx: &mut TenantTx,
    conversations: &[SessionId],
) -> Result<HashMap<SessionId, i64>> {
    let ids: Vec<Uuid> = conversations.iter().map(SessionId::as_uuid).collect();
    let rows: Vec<(SessionId, i64)> = sqlx::query_as(LIST_LAST)
        .bind(tx.tenant_id())
        .bind(ids)
        .fetch_all(tx.connection())
        .await?;
    Ok(rows.into_iter().collect())
}

/// Public for the test that reads its plan.
pub const LIST_LAST: &str = "select c.id, c.next_event_seq - 1
       from conversations c
      where c.tenant_id = $1
        and c.id = any ($2)
        and c.deleted_at is null";

/// Of these turns, those that have not ended.
pub async fn list_unended_turns(tx: &mut TenantTx, ids: &[TurnId]) -> Result<HashSet<TurnId>> {
    let ids: Vec<Uuid> = ids.iter().map(TurnId::as_uuid).collect();
    let rows: Vec<TurnId> = sqlx::query_scalar(
        "select id
           from turns
          where tenant_id = $1
            and id = any ($2)
            and ended_at is null",
    )
    .bind(tx.tenant_id())
    .bind(ids)
    .fetch_all(tx.connection())
    .await?;
    Ok(rows.into_iter().collect())
}

/// The last event of a turn that nobody runs.
pub async fn insert_end(
    tx: &mut TenantTx,
    turn: &Turn,
    (state, reason): (TurnState, &str),
    now: DateTime<Utc>,
) -> Result<()> {
    sqlx::query(
        "with number as (
           update conversations
              set next_event_seq = next_event_seq + 1
            where tenant_id = $1
              and id = $2
        returning next_event_seq - 1 as seq, tip_session_id
         )
         insert into events (tenant_id, conversation_id, seq, turn_id, attempt, kind, session_id, data, created_at)
         select $1, $2, seq, $3, $4, $5, tip_session_id, json_build_object('reason', $6::text), $7
           from number",
    )
    .bind(tx.tenant_id())
    .bind(turn.conversation_id)
    .bind(turn.id)
    .bind(turn.attempt)
    .bind(of_end(state))
    .bind(reason)
    .bind(now)
    .execute(tx.connection())
    .await?;
    tx.notify_conversation(turn.conversation_id);
    Ok(())
}

/// Where somebody begins who comes to watch: before the first event of the turn that is active, or after
/// the last event there is.
pub async fn find_beginning(tx: &mut TenantTx, conversation_id: SessionId) -> Result<i64> {
    Ok(sqlx::query_scalar(
        "select coalesce((select min(e.seq) - 1
                            from turns t
                            join events e
                              on e.tenant_id = $1
                             and e.turn_id = t.id
                           where t.tenant_id = $1
                             and t.conversation_id = $2
                             and t.state in ('running', 'waiting_client')),
                         c.next_event_seq - 1)
           from conversations c
          where c.tenant_id = $1
            and c.id = $2",
    )
    .bind(tx.tenant_id())
    .bind(conversation_id)
    .fetch_one(tx.connection())
    .await?)
}

/// The event after which a turn's answer comes: that of the last message to the agent, or the one that discarded an
/// earlier attempt.
pub async fn find_answer_start(tx: &mut TenantTx, turn_id: TurnId) -> Result<i64> {
    let last: Option<i64> = sqlx::query_scalar(
        "select max(e.seq)
           from events e
           left join messages m
             on m.tenant_id = $1
            and m.session_id = e.session_id
            and m.seq = e.message_seq
          where e.tenant_id = $1
            and e.turn_id = $2
            and (m.role <> 'assistant' or e.kind = $3)",
    )
    .bind(tx.tenant_id())
    .bind(turn_id)
    .bind(MESSAGE_DISCARDED)
    .fetch_one(tx.connection())
    .await?;
    Ok(last.unwrap_or(0))
}
