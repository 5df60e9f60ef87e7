//! The two statements that write a turn: `START` accepts and starts it, `WRITE` adds messages and events and says how
//! it stands. The table is their legend. `CommonValues` binds what both have, in this order.
//!
//! | value | `START` and `WRITE` |
//! |---|---|
//! | `$1` `$2` `$3` | tenant, turn, conversation |
//! | `$4` `$5` | now, the lease in milliseconds |
//! | `$6` `$7` `$8` | number of messages, number of events, attempt |
//! | `$9` `$10` | tokens of the messages, whether a user spoke |
//! | `$11` `$12` | the sender's identity and its platform |
//! | `$13` to `$19` | messages: roles, kinds, contents, tool calls, tool call ids, tokens, whether spoken |
//! | `$20` `$21` `$22` | events: kinds, the message each is about, data |
//!
//! | value | `START` | `WRITE` |
//! |---|---|---|
//! | `$23` `$24` | agent, principal | fence, version |
//! | `$25` `$26` `$27` | request hash, input, session info | state, reason, detail |
//! | `$28` `$29` | node, reply address | finish reason, the client's tool calls |
//! | `$30` `$31` `$32` | reply via, running turns allowed, tokens of history | input tokens, output tokens, estimated |
//! | `$33` `$34` | messages of history, the sender's user | session, the wait for the client in milliseconds |
//! | `$35` | messages: extras | whether it is the turn's first write |
//! | `$36` | | messages: extras |

use chrono::{DateTime, Utc};
use sqlx::Postgres;
use sqlx::postgres::PgArguments;
use sqlx::query::Query;

use super::prompt_history::history_messages;
use super::turn_counts::{fewer_run, share_count};
use crate::domain::turn::event::NewEvent;
use crate::ids::{IdentityId, SessionId, TenantId, TurnId};
use crate::store::conversation::message_columns::MessageColumns;

/// Inserts the messages and events. It reads `gate` (the session, the turn's first step, the first event's number and
/// the time) and `place` (the first message's number).
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
              last_user_at = case when $10 then gate.at else s.last_user_at end,
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

/// Numbers come from the conversation's row, which is locked first, then the turn and the session: the
/// order that everyone keeps. A turn at this fence and version stands as the writer left it: running. It is not
/// asked for by that state, because Postgres would look for it in the small index of those that run, which is
/// full of those that did.
///
/// Public for the bench that runs it beside the service.
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
              last_user_at = case when $10 then gate.at else s.last_user_at end,
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

/// What both statements write.
pub(super) struct CommonValues<'a> {
    pub tenant_id: TenantId,
    pub turn_id: TurnId,
    pub conversation_id: SessionId,
    pub now: DateTime<Utc>,
    pub lease_ms: i64,
    pub attempt: i32,
    pub sender: Option<&'a (IdentityId, String)>,
    pub events: &'a [NewEvent],
}

pub(super) type PgQuery<'q> = Query<'q, Postgres, PgArguments>;

/// Binds `$1` to `$22`. The extras are bound last, by their statement.
pub(super) fn bind_common<'q>(
    query: PgQuery<'q>,
    values: &CommonValues<'q>,
    columns: MessageColumns<'q>,
) -> PgQuery<'q> {
    let events = values.events;
    let kinds: Vec<&str> = events.iter().map(|event| event.kind).collect();
    let about = |event: &NewEvent| event.message.map(|index| index as i64);
    let about: Vec<Option<i64>> = events.iter().map(about).collect();
    let data = |event: &NewEvent| event.data.as_ref().map(ToString::to_string);
    let data: Vec<Option<String>> = events.iter().map(data).collect();
    query
        .bind(values.tenant_id)
        .bind(values.turn_id)
        .bind(values.conversation_id)
        .bind(values.now)
        .bind(values.lease_ms)
        .bind(columns.roles.len() as i32)
        .bind(events.len() as i64)
        .bind(values.attempt)
        .bind(columns.token_sum())
        .bind(columns.has_spoken())
        .bind(values.sender.map(|(identity_id, _)| *identity_id))
        .bind(values.sender.map(|(_, platform)| platform.as_str()))
        .bind(columns.roles)
        .bind(columns.kinds)
        .bind(columns.contents)
        .bind(columns.tool_calls)
        .bind(columns.tool_call_ids)
        .bind(columns.tokens)
        .bind(columns.is_spoken)
        .bind(kinds)
        .bind(about)
        .bind(data)
}
