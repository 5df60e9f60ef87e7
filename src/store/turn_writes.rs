//! What a running turn writes, in one statement: messages, events and how it stands. Every write carries
//! the turn's fence and version: a node that lost the turn writes nothing, and a write whose answer was
//! lost is not made twice.

use chrono::{DateTime, Utc};
use serde::Serialize;
use sqlx::types::Json;

use super::TenantTx;
use super::turn_claims::Runner;
use crate::domain::completion::TokenUsage;
use crate::domain::delivery::ReplyVia;
use crate::domain::event::NewEvent;
use crate::domain::message::{MessageKind, NewMessage, Role, ToolCall};
use crate::domain::turn::{CLIENT_PATIENCE, StopReason, TurnState};
use crate::error::{Error, Result};
use crate::ids::{IdentityId, SessionId, TurnId};

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
pub struct Heard {
    /// The number of the first message.
    pub first_seq: Option<i64>,
    pub stop: Option<StopReason>,
    /// How the answer gets to who asked on a platform.
    pub reply_via: Option<ReplyVia>,
}

/// Numbers come from the conversation's row, which is locked first, then the turn and the session: the
/// order that everyone keeps. A turn at this fence and version stands as the writer left it: running. It is not
/// asked for by that state, because Postgres would look for it in the small index of those that run, which is
/// full of those that did.
pub const WRITE: &str = "with numbers as (
       update conversations c
          set next_event_seq = c.next_event_seq + $6
         from turns f
        where c.tenant_id = $1
          and c.id = $5
          and c.deleted_at is null
          and f.tenant_id = $1
          and f.id = $2
          and f.fence = $3
          and f.version = $4
          and f.ended_at is null
    returning c.next_event_seq - $6 as first_event
     ), gate as (
       update turns t
          set version = t.version + 1,
              state = $7,
              reason = $8,
              detail = $9,
              finish_reason = coalesce($10, t.finish_reason),
              calls = $11,
              steps = t.steps + $12,
              attempt = $13,
              input_tokens = t.input_tokens + $14,
              output_tokens = t.output_tokens + $15,
              usage_estimated = t.usage_estimated or $16,
              start_session_id = coalesce(t.start_session_id, $17),
              end_session_id = $17,
              started_at = coalesce(t.started_at, $18),
              node = case when $7 = 'running' then t.node end,
              lease_until = case $7
                              when 'running' then clock_timestamp() + $19 * interval '1 millisecond'
                              when 'waiting_client' then clock_timestamp() + $20 * interval '1 millisecond'
                            end,
              ended_at = case when $7 not in ('running', 'waiting_client') then $18 end
         from numbers n
        where t.tenant_id = $1
          and t.id = $2
          and t.fence = $3
          and t.version = $4
          and t.ended_at is null
    returning t.steps - $12 as first_step, t.cancel_requested_at is not null as cancelled, t.cancel_reason,
              t.reply_via, n.first_event
     ), place as (
       update sessions s
          set next_seq = s.next_seq + $12,
              message_count = s.message_count + $12,
              token_count = s.token_count + $21,
              last_active_at = case when $12 > 0 then $18 else s.last_active_at end,
              last_person_at = case when $22 then $18 else s.last_person_at end,
              state = case when $23 then 'open' else s.state end,
              end_reason = case when not $23 then s.end_reason end,
              ended_at = case when not $23 then s.ended_at end,
              turn_id = case when $7 in ('running', 'waiting_client') then $2 end
         from gate
        where s.tenant_id = $1
          and s.id = $17
          and s.undone_at is null
          and s.end_reason is distinct from 'compression'
          and (s.turn_id is null or s.turn_id = $2)
          and ($12 > 0 or $7 <> 'running')
    returning s.next_seq - $12 as first_seq
     ), put as (
       insert into messages (tenant_id, session_id, seq, role, kind, content, tool_calls, tool_call_id,
                             identity_id, platform, token_count, turn_id, step, created_at)
       select $1, $17, place.first_seq + m.place - 1, m.role, m.kind, m.content::json, m.tool_calls::json,
              m.tool_call_id, case when m.spoken then $24::uuid end, case when m.spoken then $25 end, m.tokens,
              $2, gate.first_step + m.place - 1, $18
         from place, gate,
              unnest($26::text[], $27::text[], $28::text[], $29::text[], $30::text[], $31::integer[],
                     $32::boolean[])
                with ordinality
                as m (role, kind, content, tool_calls, tool_call_id, tokens, spoken, place)
     ), told as (
       insert into events (tenant_id, conversation_id, seq, turn_id, attempt, kind, session_id, message_seq,
                           data, created_at)
       select $1, $5, gate.first_event + e.place - 1, $2, $13, e.kind, $17,
              (select place.first_seq from place) + e.message, e.data::json, $18
         from gate,
              unnest($33::text[], $34::bigint[], $35::text[])
                with ordinality
                as e (kind, message, data, place)
     )
     select gate.cancelled, gate.cancel_reason, (select place.first_seq from place) as first_seq, gate.reply_via
       from gate";

/// Writes, or answers `None` if the turn is no longer at this fence and version.
pub async fn write(
    tx: &mut TenantTx,
    fence: Fence,
    write: &Write<'_>,
    now: DateTime<Utc>,
) -> Result<Option<Heard>> {
    let (messages, events, change) = (write.messages, write.events, write.change);
    let state = change.state.unwrap_or(TurnState::Running);
    let is_spoken =
        |message: &NewMessage| message.role == Role::User && message.kind == MessageKind::Normal;
    let spoken: Vec<bool> = messages.iter().map(is_spoken).collect();
    let roles: Vec<&str> = messages.iter().map(|one| one.role.as_str()).collect();
    let kinds: Vec<&str> = messages.iter().map(|one| one.kind.as_str()).collect();
    let tokens: Vec<i32> = messages.iter().map(NewMessage::tokens).collect();
    let token_sum: i64 = tokens.iter().copied().map(i64::from).sum();
    let texts = |text: fn(&NewMessage) -> Result<Option<String>>| -> Result<Vec<Option<String>>> {
        messages.iter().map(text).collect()
    };
    let told: Vec<&str> = events.iter().map(|event| event.kind).collect();
    let named = |event: &NewEvent| event.message.map(|place| place as i64);
    let named: Vec<Option<i64>> = events.iter().map(named).collect();
    let data = |event: &NewEvent| event.data.as_ref().map(ToString::to_string);
    let data: Vec<Option<String>> = events.iter().map(data).collect();
    let usage = change.usage.unwrap_or(TokenUsage::NONE);
    type Row = (bool, Option<String>, Option<i64>, Option<String>);
    let row: Option<Row> = sqlx::query_as(WRITE)
        .bind(tx.tenant_id())
        .bind(fence.turn_id)
        .bind(fence.fence)
        .bind(fence.version)
        .bind(write.conversation_id)
        .bind(events.len() as i64)
        .bind(state.as_str())
        .bind(change.reason)
        .bind(change.detail)
        .bind(change.finish_reason)
        .bind(change.calls.map(Json))
        .bind(messages.len() as i32)
        .bind(write.attempt)
        .bind(usage.input)
        .bind(usage.output)
        .bind(usage.estimated)
        .bind(write.session_id)
        .bind(now)
        .bind(write.runner.lease_ms)
        .bind(CLIENT_PATIENCE.num_milliseconds())
        .bind(token_sum)
        .bind(spoken.contains(&true))
        .bind(write.starts)
        .bind(write.speaker.map(|(identity, _)| *identity))
        .bind(write.speaker.map(|(_, platform)| platform.as_str()))
        .bind(roles)
        .bind(kinds)
        .bind(texts(|message| to_json(message.content.as_ref()))?)
        .bind(texts(|message| to_json(message.tool_calls.as_ref()))?)
        .bind(texts(|message| Ok(message.tool_call_id.clone()))?)
        .bind(tokens)
        .bind(spoken)
        .bind(told)
        .bind(named)
        .bind(data)
        .fetch_optional(tx.connection())
        .await?;
    let Some((cancelled, reason, first_seq, reply_via)) = row else {
        return Ok(None);
    };
    if first_seq.is_none() && !messages.is_empty() {
        let detail = "the end of a conversation with an active turn was moved";
        return Err(Error::internal(anyhow::anyhow!(detail)));
    }
    Ok(Some(Heard {
        first_seq,
        stop: cancelled.then(|| StopReason::from_column(reason.as_deref())),
        reply_via: reply_via
            .as_deref()
            .map(ReplyVia::from_column)
            .transpose()?,
    }))
}

fn to_json<T: Serialize>(value: Option<&T>) -> Result<Option<String>> {
    value
        .map(|value| serde_json::to_string(value).map_err(Error::internal))
        .transpose()
}

/// Says that the turn's node lives, and hears whether it is to stop; `None` if the turn is lost.
pub async fn renew(tx: &mut TenantTx, fence: Fence, runner: Runner) -> Result<Option<Heard>> {
    let row: Option<(bool, Option<String>)> = sqlx::query_as(
        "update turns
            set lease_until = clock_timestamp() + $4 * interval '1 millisecond'
          where tenant_id = $1
            and id = $2
            and fence = $3
            and ended_at is null
            and node is not null
      returning cancel_requested_at is not null, cancel_reason",
    )
    .bind(tx.tenant_id())
    .bind(fence.turn_id)
    .bind(fence.fence)
    .bind(runner.lease_ms)
    .fetch_optional(tx.connection())
    .await?;
    Ok(row.map(|(cancelled, reason)| Heard {
        first_seq: None,
        reply_via: None,
        stop: cancelled.then(|| StopReason::from_column(reason.as_deref())),
    }))
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
pub async fn was_made(tx: &mut TenantTx, fence: Fence) -> Result<bool> {
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
