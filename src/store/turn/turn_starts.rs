//! How a turn starts that nobody has to wait for: in one statement that accepts it, puts what was said into
//! the transcript, and reads what was said before. It does nothing where the conversation is not idle.

use chrono::{DateTime, Utc};
use sqlx::Row;
use sqlx::types::Json;

use super::prompt_history::{MAX_HISTORY_MESSAGES, history_messages, read_history};
use super::turn_claims::Runner;
use super::turn_counts::{fewer_run, share_count};
use super::turn_writes::{Written, bind_written, extras, messages_and_events};
use super::turns::NewTurn;
use crate::domain::turn::event::NewEvent;
use crate::domain::turn::prompt::HistoryMessage;
use crate::error::{Error, Result};
use crate::ids::{SessionId, UserId};
use crate::store::TenantTx;

/// An idle conversation has no turn that is queued or active. It is read as it was when the statement began; if its
/// row has moved since then, or somebody holds it, so may have its turns, and nothing is done: who accepts, writes or
/// ends a turn moves the row. Public for the bench that runs it beside the service.
pub const START: &str = concat!(
    "with idle as materialized (
       select c.next_turn_no, c.next_event_seq, c.tip_session_id, s.next_seq, s.token_count, s.last_active_at
         from conversations c
         join sessions s
           on s.tenant_id = $1
          and s.id = c.tip_session_id
        where c.tenant_id = $1
          and c.id = $3
          and s.turn_id is null
          and s.undone_at is null
          and s.end_reason is distinct from 'compression'
          and not exists (select 1
                            from turns q
                           where q.tenant_id = $1
                             and q.conversation_id = $3
                             and q.state = 'queued')
          and ",
    fewer_run!("$31"),
    "
          and ($34::uuid is null
               or exists (select 1
                            from identities i
                           where i.tenant_id = $1
                             and i.id = $11
                             and i.user_id = $34))
     ), held as materialized (
       select c.id
         from conversations c
        cross join idle i
        where c.tenant_id = $1
          and c.id = $3
          and c.deleted_at is null
          and c.tip_session_id = i.tip_session_id
          and c.next_turn_no = i.next_turn_no
          and c.next_event_seq = i.next_event_seq
          for no key update of c skip locked
     ), allowed as materialized (
       select h.id
         from held h
        where ",
    share_count!("$31"),
    "
     ), gate as (
       update conversations c
          set next_turn_no = c.next_turn_no + 1,
              next_event_seq = c.next_event_seq + $7,
              last_at = greatest(c.last_at, i.last_active_at, $4)
         from allowed a
        cross join idle i
        where c.tenant_id = $1
          and c.id = a.id
    returning i.next_turn_no as turn_no, i.next_event_seq as first_event, i.tip_session_id as session_id,
              i.next_seq as expected_seq, i.token_count as of_tokens, 0 as first_step, c.last_at as at
     ), turn as (
       insert into turns (tenant_id, id, conversation_id, turn_no, state, agent, principal, request_hash, input, session_info,
                          identity_id, platform, start_session_id, end_session_id, steps, fence, version, attempt,
                          node, lease_until, created_at, started_at, reply_to, reply_via)
       select $1, $2, $3, gate.turn_no, 'running', $23, $24, $25, $26, $27, $11, $12, gate.session_id,
              gate.session_id, $6, 1, 1, $8, $28, clock_timestamp() + $5 * interval '1 millisecond', gate.at,
              gate.at, $29, $30
         from gate
     ), place as (
       update sessions s
          set next_seq = s.next_seq + $6,
              message_count = s.message_count + $6,
              token_count = s.token_count + $9,
              last_active_at = gate.at,
              last_person_at = case when $10 then gate.at else s.last_person_at end,
              state = 'open',
              end_reason = null,
              ended_at = null,
              turn_id = $2
         from gate
        where s.tenant_id = $1
          and s.id = gate.session_id
          and s.turn_id is null
          and s.undone_at is null
          and s.end_reason is distinct from 'compression'
    returning s.next_seq - $6 as first_seq
     ), ",
    messages_and_events!(extras: "$35"),
    ")
     select gate.session_id, gate.expected_seq, gate.at, place.first_seq, p.*
       from gate
       left join place
         on true
       left join lateral (",
    history_messages!(session: "gate.session_id", of_tokens: "gate.of_tokens", fit: "$32", most: "$33"),
    ") p
         on true"
);

/// A turn that has started, at its first fence and version.
#[derive(Debug)]
pub struct Started {
    pub session_id: SessionId,
    pub at: DateTime<Utc>,
    /// What was said before it; `None` if something was said while it started.
    pub past: Option<Vec<HistoryMessage>>,
}

/// Who runs a turn that starts, and how much is allowed to it.
#[derive(Debug, Clone, Copy)]
pub struct Allowance {
    pub runner: Runner,
    /// It starts only if fewer turns of the tenant run; `None`: however many do.
    pub running: Option<i64>,
    /// It starts only if the sender belongs to this user; `None`: that is checked elsewhere.
    pub sender_of: Option<UserId>,
    /// Tokens of what was said before it.
    pub tokens: i64,
}

/// Starts a turn with its events, or answers `None`, and nothing was done.
pub async fn start(
    tx: &mut TenantTx,
    turn: &NewTurn<'_>,
    events: &[NewEvent],
    allowance: Allowance,
    now: DateTime<Utc>,
) -> Result<Option<Started>> {
    let written = Written {
        turn_id: turn.id,
        conversation_id: turn.conversation_id,
        messages: &turn.input.messages,
        speaker: turn.speaker.as_ref(),
        events,
        attempt: 1,
        lease_ms: allowance.runner.lease_ms,
    };
    let row = bind_written(sqlx::query(START), tx.tenant_id(), &written, now)?
        .bind(turn.agent)
        .bind(turn.principal)
        .bind(turn.request_hash.as_slice())
        .bind(Json(turn.input))
        .bind(Json(turn.session_info))
        .bind(allowance.runner.node)
        .bind(turn.reply.map(|(to, _)| Json(to)))
        .bind(turn.reply.map(|(_, via)| via.as_str()))
        .bind(allowance.running)
        .bind(allowance.tokens - written.tokens())
        .bind(MAX_HISTORY_MESSAGES)
        .bind(allowance.sender_of)
        .bind(extras(&turn.input.messages)?)
        .fetch_optional(tx.connection())
        .await?;
    let Some(row) = row else {
        return Ok(None);
    };
    tx.notify_conversation(turn.conversation_id);
    let expected_seq: i64 = row.try_get("expected_seq")?;
    let first_seq: Option<i64> = row.try_get("first_seq")?;
    let moved = || Error::internal(anyhow::anyhow!("an idle conversation was moved"));
    let first_seq = first_seq.ok_or_else(moved)?;
    let past = if first_seq == expected_seq {
        Some(read_history(&row)?)
    } else {
        None
    };
    Ok(Some(Started {
        session_id: row.try_get("session_id")?,
        at: row.try_get("at")?,
        past,
    }))
}
