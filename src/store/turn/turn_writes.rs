//! What a running turn writes, in one statement: messages, events and how it stands. Every write carries
//! the turn's fence and version: a node that lost the turn writes nothing, and a write whose answer was
//! lost is not made twice.

use chrono::{DateTime, Utc};
use serde::Serialize;
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::query::Query;
use sqlx::types::Json;
use sqlx::{Postgres, Row};

use super::turn_claims::Runner;
use crate::domain::bridge::delivery::ReplyVia;
use crate::domain::conversation::message::{MessageKind, NewMessage, Role, ToolCall};
use crate::domain::turn::completion::TokenUsage;
use crate::domain::turn::event::NewEvent;
use crate::domain::turn::{CLIENT_TOOL_TIMEOUT, StopReason, TurnState};
use crate::error::{Error, Result};
use crate::ids::{IdentityId, SessionId, TenantId, TurnId};
use crate::store::TenantTx;

/// The turn that is written, as the writer knows it.
#[derive(Debug, Clone, Copy)]
pub struct Fence {
    pub turn_id: TurnId,
    pub fence: i64,
    pub version: i64,
}

#[derive(Debug)]
pub struct Write<'a> {
    pub conversation_id: SessionId,
    /// The end of the conversation.
    pub session_id: SessionId,
    pub messages: &'a [NewMessage],
    /// Who said what has the role `user`, and on which platform.
    pub speaker: Option<&'a (IdentityId, String)>,
    pub events: &'a [NewEvent],
    pub attempt: i32,
    /// Whether it is the turn's first: it opens a session that had ended.
    pub starts: bool,
    pub change: &'a Change<'a>,
    pub runner: Runner,
}

/// How the turn stands after a write.
#[derive(Debug, Default)]
pub struct Change<'a> {
    /// `None`: it goes on.
    pub state: Option<TurnState>,
    pub reason: Option<&'a str>,
    pub detail: Option<&'a str>,
    pub finish_reason: Option<&'a str>,
    /// The client's tools that it waits for.
    pub calls: Option<&'a [ToolCall]>,
    pub usage: Option<TokenUsage>,
}

/// What a node hears when it writes.
#[derive(Debug, Clone, Copy, Default)]
pub struct WriteAck {
    /// The number of the first message.
    pub first_seq: Option<i64>,
    pub stop: Option<StopReason>,
    /// How the answer gets to who asked on a platform.
    pub reply_via: Option<ReplyVia>,
    /// Whether others came after it in its conversation, and may wait.
    pub followed: bool,
}

/// Puts the messages and events of a write into their tables. Needs the rows `gate` (the session, the turn's
/// first step, the first event's number and the time) and `place` (the first message's number), the values that
/// `bind_written` binds, and the messages' extras.
macro_rules! messages_and_events {
    (extras: $extras:literal) => {
        concat!("said as (
           insert into messages (tenant_id, session_id, seq, role, kind, content, tool_calls, tool_call_id,
                                 identity_id, platform, token_count, turn_id, step, created_at, extra)
           select $1, gate.session_id, place.first_seq + m.place - 1, m.role, m.kind, m.content::json,
                  m.tool_calls::json, m.tool_call_id, case when m.spoken then $11::uuid end,
                  case when m.spoken then $12 end, m.tokens, $2, gate.first_step + m.place - 1, gate.at, m.extra::json
             from place, gate,
                  unnest($13::text[], $14::text[], $15::text[], $16::text[], $17::text[], $18::integer[],
                         $19::boolean[], ", $extras, "::text[])
                    with ordinality
                    as m (role, kind, content, tool_calls, tool_call_id, tokens, spoken, extra, place)
         ), new_events as (
           insert into events (tenant_id, conversation_id, seq, turn_id, attempt, kind, session_id, message_seq,
                               data, created_at)
           select $1, $3, gate.first_event + e.place - 1, $2, $8, e.kind, gate.session_id,
                  (select place.first_seq from place) + e.message, e.data::json, gate.at
             from gate,
                  unnest($20::text[], $21::bigint[], $22::text[])
                    with ordinality
                    as e (kind, message, data, place)")
    };
}
pub(in crate::store) use messages_and_events;

/// What every write brings.
pub(in crate::store) struct Written<'a> {
    pub turn_id: TurnId,
    pub conversation_id: SessionId,
    pub messages: &'a [NewMessage],
    pub speaker: Option<&'a (IdentityId, String)>,
    pub events: &'a [NewEvent],
    pub attempt: i32,
    pub lease_ms: i64,
}

impl Written<'_> {
    pub fn tokens(&self) -> i64 {
        let tokens = self.messages.iter().map(NewMessage::tokens);
        tokens.map(i64::from).sum()
    }
}

type PgQuery<'q> = Query<'q, Postgres, PgArguments>;

/// The first 22 values of a write: tenant, turn, conversation, time, lease, how many messages and events, the
/// attempt, the messages' tokens, whether a person speaks, who, and then both as columns.
pub(in crate::store) fn bind_written<'q>(
    query: PgQuery<'q>,
    tenant_id: TenantId,
    written: &Written<'_>,
    now: DateTime<Utc>,
) -> Result<PgQuery<'q>> {
    let Written {
        messages, events, ..
    } = *written;
    let is_spoken =
        |message: &NewMessage| message.role == Role::User && message.kind == MessageKind::Normal;
    let spoken: Vec<bool> = messages.iter().map(is_spoken).collect();
    let roles: Vec<&str> = messages.iter().map(|one| one.role.as_str()).collect();
    let kinds: Vec<&str> = messages.iter().map(|one| one.kind.as_str()).collect();
    let tokens: Vec<i32> = messages.iter().map(NewMessage::tokens).collect();
    let texts = |text: fn(&NewMessage) -> Result<Option<String>>| -> Result<Vec<Option<String>>> {
        messages.iter().map(text).collect()
    };
    let told: Vec<&str> = events.iter().map(|event| event.kind).collect();
    let named = |event: &NewEvent| event.message.map(|place| place as i64);
    let named: Vec<Option<i64>> = events.iter().map(named).collect();
    let data = |event: &NewEvent| event.data.as_ref().map(ToString::to_string);
    let data: Vec<Option<String>> = events.iter().map(data).collect();
    Ok(query
        .bind(tenant_id)
        .bind(written.turn_id)
        .bind(written.conversation_id)
        .bind(now)
        .bind(written.lease_ms)
        .bind(messages.len() as i32)
        .bind(events.len() as i64)
        .bind(written.attempt)
        .bind(written.tokens())
        .bind(spoken.contains(&true))
        .bind(written.speaker.map(|(identity_id, _)| *identity_id))
        .bind(written.speaker.map(|(_, platform)| platform.clone()))
        .bind(roles)
        .bind(kinds)
        .bind(texts(|message| to_json(message.content.as_ref()))?)
        .bind(texts(|message| to_json(message.tool_calls.as_ref()))?)
        .bind(texts(|message| Ok(message.tool_call_id.clone()))?)
        .bind(tokens)
        .bind(spoken)
        .bind(told)
        .bind(named)
        .bind(data))
}

/// Numbers come from the conversation's row, which is locked first, then the turn and the session: the
/// order that everyone keeps. A turn at this fence and version stands as the writer left it: running. It is not
/// asked for by that state, because Postgres would look for it in the small index of those that run, which is
/// full of those that did.
pub const WRITE: &str = concat!(
    "with numbers as (
       update conversations c
          set next_event_seq = c.next_event_seq + $7,
              last_at = greatest(c.last_at, $4)
         from turns f
        where c.tenant_id = $1
          and c.id = $3
          and c.deleted_at is null
          and f.tenant_id = $1
          and f.id = $2
          and f.fence = $23
          and f.version = $24
          and f.ended_at is null
    returning c.next_event_seq - $7 as first_event, c.next_turn_no, c.last_at as at
     ), gate as (
       update turns t
          set version = t.version + 1,
              state = $25,
              reason = $26,
              detail = $27,
              finish_reason = coalesce($28, t.finish_reason),
              calls = $29,
              steps = t.steps + $6,
              attempt = $8,
              input_tokens = t.input_tokens + $30,
              output_tokens = t.output_tokens + $31,
              usage_estimated = t.usage_estimated or $32,
              start_session_id = coalesce(t.start_session_id, $33),
              end_session_id = $33,
              started_at = coalesce(t.started_at, n.at),
              node = case when $25 = 'running' then t.node end,
              lease_until = case $25
                              when 'running' then clock_timestamp() + $5 * interval '1 millisecond'
                              when 'waiting_client' then clock_timestamp() + $34 * interval '1 millisecond'
                            end,
              ended_at = case when $25 not in ('running', 'waiting_client') then n.at end,
              due_at = case when $25 not in ('running', 'waiting_client')
                         then clock_timestamp() + interval '5 seconds'
                       end,
              failures = 0,
              -- By then it is in the transcript.
              input = case
                        when $25 in ('running', 'waiting_client') then t.input
                        else json_build_object('messages', '[]'::json)
                      end
         from numbers n
        where t.tenant_id = $1
          and t.id = $2
          and t.fence = $23
          and t.version = $24
          and t.ended_at is null
    returning t.steps - $6 as first_step, t.end_session_id as session_id,
              t.cancel_requested_at is not null as cancelled, t.cancel_reason, t.reply_via, n.first_event, n.at,
              n.next_turn_no > t.turn_no + 1 as followed
     ), place as (
       update sessions s
          set next_seq = s.next_seq + $6,
              message_count = s.message_count + $6,
              token_count = s.token_count + $9,
              last_active_at = case when $6 > 0 then gate.at else s.last_active_at end,
              last_person_at = case when $10 then gate.at else s.last_person_at end,
              state = case when $35 then 'open' else s.state end,
              end_reason = case when not $35 then s.end_reason end,
              ended_at = case when not $35 then s.ended_at end,
              turn_id = case when $25 in ('running', 'waiting_client') then $2 end
         from gate
        where s.tenant_id = $1
          and s.id = $33
          and s.undone_at is null
          and s.end_reason is distinct from 'compression'
          and (s.turn_id is null or s.turn_id = $2)
          and ($6 > 0 or $25 <> 'running')
    returning s.next_seq - $6 as first_seq
     ), ",
    messages_and_events!(extras: "$36"),
    ")
     select gate.cancelled, gate.cancel_reason, (select place.first_seq from place) as first_seq,
            gate.reply_via, gate.followed,
            (select o.state from tenants o where o.id = $1) as tenant_state
       from gate"
);

/// Writes, or answers `None` if the turn is no longer at this fence and version.
pub async fn write(
    tx: &mut TenantTx,
    fence: Fence,
    write: &Write<'_>,
    now: DateTime<Utc>,
) -> Result<Option<WriteAck>> {
    let change = write.change;
    let state = change.state.unwrap_or(TurnState::Running);
    let usage = change.usage.unwrap_or(TokenUsage::NONE);
    let written = Written {
        turn_id: fence.turn_id,
        conversation_id: write.conversation_id,
        messages: write.messages,
        speaker: write.speaker,
        events: write.events,
        attempt: write.attempt,
        lease_ms: write.runner.lease_ms,
    };
    let row = bind_written(sqlx::query(WRITE), tx.tenant_id(), &written, now)?
        .bind(fence.fence)
        .bind(fence.version)
        .bind(state.as_str())
        .bind(change.reason)
        .bind(change.detail)
        .bind(change.finish_reason)
        .bind(change.calls.map(Json))
        .bind(usage.input)
        .bind(usage.output)
        .bind(usage.estimated)
        .bind(write.session_id)
        .bind(CLIENT_TOOL_TIMEOUT.num_milliseconds())
        .bind(write.starts)
        .bind(extras(write.messages)?)
        .fetch_optional(tx.connection())
        .await?;
    let Some(row) = row else {
        return Ok(None);
    };
    let first_seq: Option<i64> = row.try_get("first_seq")?;
    if first_seq.is_none() && !write.messages.is_empty() {
        let detail = "the end of a conversation with an active turn was moved";
        return Err(Error::internal(anyhow::anyhow!(detail)));
    }
    let reply_via: Option<String> = row.try_get("reply_via")?;
    Ok(Some(WriteAck {
        first_seq,
        stop: read_stop(&row)?,
        reply_via: reply_via
            .as_deref()
            .map(ReplyVia::from_column)
            .transpose()?,
        followed: row.try_get("followed")?,
    }))
}

pub(in crate::store) fn extras(messages: &[NewMessage]) -> Result<Vec<Option<String>>> {
    messages
        .iter()
        .map(|message| to_json(message.extra.as_ref()))
        .collect()
}

pub(in crate::store) fn to_json<T: Serialize>(value: Option<&T>) -> Result<Option<String>> {
    value
        .map(|value| serde_json::to_string(value).map_err(Error::internal))
        .transpose()
}

/// Says that the turn's node lives, and hears whether it is to stop; `None` if the turn is lost.
pub async fn renew(tx: &mut TenantTx, fence: Fence, runner: Runner) -> Result<Option<WriteAck>> {
    let row = sqlx::query(
        "update turns
            set lease_until = clock_timestamp() + $4 * interval '1 millisecond'
          where tenant_id = $1
            and id = $2
            and fence = $3
            and ended_at is null
            and node is not null
      returning cancel_requested_at is not null as cancelled, cancel_reason,
                (select o.state from tenants o where o.id = $1) as tenant_state",
    )
    .bind(tx.tenant_id())
    .bind(fence.turn_id)
    .bind(fence.fence)
    .bind(runner.lease_ms)
    .fetch_optional(tx.connection())
    .await?;
    let Some(row) = row else {
        return Ok(None);
    };
    Ok(Some(WriteAck {
        stop: read_stop(&row)?,
        ..WriteAck::default()
    }))
}

/// Why the turn is to stop, if it is: somebody asked for it, or its tenant is not served any more.
fn read_stop(row: &PgRow) -> Result<Option<StopReason>> {
    let tenant_state: Option<String> = row.try_get("tenant_state")?;
    if tenant_state.as_deref() != Some("active") {
        return Ok(Some(StopReason::TenantSuspended));
    }
    let cancelled: bool = row.try_get("cancelled")?;
    let reason: Option<String> = row.try_get("cancel_reason")?;
    Ok(cancelled.then(|| StopReason::from_stop_request(reason.as_deref())))
}

/// Gives a turn back: any node may take it at once.
pub async fn release(tx: &mut TenantTx, fence: Fence) -> Result<()> {
    sqlx::query(
        "update turns
            set lease_until = clock_timestamp(), node = null
          where tenant_id = $1
            and id = $2
            and fence = $3
            and state = 'running'",
    )
    .bind(tx.tenant_id())
    .bind(fence.turn_id)
    .bind(fence.fence)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Whether a write of this fence and version was made after all, though its answer was lost.
pub async fn was_applied(tx: &mut TenantTx, fence: Fence) -> Result<bool> {
    Ok(sqlx::query_scalar(
        "select exists (select 1
                          from turns
                         where tenant_id = $1
                           and id = $2
                           and fence = $3
                           and version = $4 + 1)",
    )
    .bind(tx.tenant_id())
    .bind(fence.turn_id)
    .bind(fence.fence)
    .bind(fence.version)
    .fetch_one(tx.connection())
    .await?)
}
