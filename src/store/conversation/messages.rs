//! Messages. One conditional update of the session reserves their numbers, in the statement that inserts the
//! messages: only that keeps `seq` without gaps and duplicates.

use chrono::{DateTime, Utc};
use futures_util::TryStreamExt;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use sqlx::Row;
use sqlx::postgres::PgRow;
use sqlx::types::Json;

use crate::domain::conversation::compression::outline::Outline;
use crate::domain::conversation::message::{Message, MessageKind, NewMessage, Role};
use crate::domain::conversation::message_extra::Extra;
use crate::domain::people::user::Identity;
use crate::domain::values::paging::{Page, PageRequest};
use crate::error::Result;
use crate::ids::SessionId;
use crate::store::TenantTx;
use crate::store::conversation::message_columns::MessageColumns;
use crate::store::db::page_bytes::{is_followed, within_page_bytes};

/// Messages for the end of a session.
pub struct Append<'a> {
    pub session_id: SessionId,
    pub messages: &'a [NewMessage],
    /// The sender of the messages with the role `user`.
    pub sender: Option<&'a Identity>,
    /// The last number that the caller saw.
    pub expected_last: Option<i64>,
}

/// Appends to a session that is the end of its chain. A session that a reset or a switch ended opens again.
/// Returns the number of the first message, or `None` if the session is no longer the end, a turn is active in
/// it, or the last number is not the expected one. A user's message restarts the idle time.
pub async fn append(
    tx: &mut TenantTx,
    append: &Append<'_>,
    now: DateTime<Utc>,
) -> Result<Option<i64>> {
    let columns = MessageColumns::new(append.messages)?;
    Ok(sqlx::query_scalar(APPEND)
        .bind(tx.tenant_id())
        .bind(append.session_id)
        .bind(append.messages.len() as i64)
        .bind(columns.token_sum())
        .bind(columns.has_spoken())
        .bind(append.expected_last)
        .bind(now)
        .bind(columns.roles)
        .bind(columns.kinds)
        .bind(columns.contents)
        .bind(columns.tool_calls)
        .bind(columns.tool_call_ids)
        .bind(columns.tokens)
        .bind(columns.is_spoken)
        .bind(append.sender.map(|sender| sender.id))
        .bind(
            append
                .sender
                .map(|sender| sender.name.platform().to_string()),
        )
        .bind(columns.extras)
        .fetch_optional(tx.connection())
        .await?)
}

/// Public for the bench that runs it beside the service.
pub const APPEND: &str = "with reserved as (
       update sessions
          set next_seq = next_seq + $3,
              message_count = message_count + $3,
              token_count = token_count + $4,
              last_active_at = greatest(last_active_at, $7),
              last_user_at = case when $5 then greatest(last_active_at, $7) else last_user_at end,
              state = 'open',
              end_reason = null,
              ended_at = null
        where tenant_id = $1
          and id = $2
          and undone_at is null
          and end_reason is distinct from 'compression'
          and turn_id is null
          and ($6::bigint is null or next_seq - 1 = $6)
    returning next_seq - $3 as first_seq, last_active_at as at
     ), inserted as (
       insert into messages (tenant_id, session_id, seq, role, kind, content, tool_calls, tool_call_id,
                             identity_id, platform, token_count, created_at, extra)
       select $1, $2, reserved.first_seq + m.position - 1, m.role, m.kind, m.content::json, m.tool_calls::json,
              m.tool_call_id, case when m.from_user then $15 end, case when m.from_user then $16 end, m.tokens,
              reserved.at, m.extra::json
         from reserved,
              unnest($8::text[], $9::text[], $10::text[], $11::text[], $12::text[], $13::integer[],
                     $14::boolean[], $17::text[])
                with ordinality
                as m (role, kind, content, tool_calls, tool_call_id, tokens, from_user, extra, position)
     )
     select first_seq
       from reserved";

/// Copies messages of `from` to the end of `to`, in the order of their numbers. A copy of a copy names the
/// original; within a chain, the messages of its first session are originals. Only the transaction that inserts
/// `to` may call it.
pub async fn copy(tx: &mut TenantTx, copy: &Copy<'_>) -> Result<()> {
    let (seqs, through, with_active) = match copy.selection {
        CopySelection::Seqs(seqs) => (Some(seqs), None, true),
        CopySelection::Through(through) => (None, Some(through), true),
        CopySelection::WithoutActiveTurn => (None, None, false),
    };
    sqlx::query(
        "with selected as (
           select m.*, row_number() over (order by m.seq) as position
             from messages m
            where m.tenant_id = $1
              and m.session_id = $2
              and ($4::bigint[] is null or m.seq = any ($4))
              and ($5::bigint is null or m.seq <= $5)
              and ($7 or m.turn_id is null
                   or not exists (select 1
                                    from sessions a
                                   where a.tenant_id = $1
                                     and a.id = $2
                                     and a.turn_id = m.turn_id))
         ), inserted as (
           insert into messages (tenant_id, session_id, seq, role, kind, content, tool_calls, tool_call_id,
                                 identity_id, platform, token_count, turn_id, copied_session, copied_seq,
                                 created_at, undone_at, extra, source_identities)
           select c.tenant_id, s.id, s.next_seq + c.position - 1, c.role, c.kind, c.content, c.tool_calls,
                  c.tool_call_id, c.identity_id, c.platform, c.token_count, c.turn_id,
                  case when $6 or f.depth > 0 then coalesce(c.copied_session, c.session_id) else f.id end,
                  case when $6 or f.depth > 0 then coalesce(c.copied_seq, c.seq) else c.seq end,
                  c.created_at, c.undone_at, c.extra, c.source_identities
             from selected c
             join sessions s
               on s.tenant_id = $1
              and s.id = $3
             join sessions f
               on f.tenant_id = $1
              and f.id = $2
        returning token_count
         )
         update sessions s
            set next_seq = s.next_seq + added.messages,
                token_count = s.token_count + added.tokens,
                message_count = s.message_count + case when $6 then added.messages else 0 end
           from (select count(*) as messages, coalesce(sum(token_count), 0) as tokens from inserted) added
          where s.tenant_id = $1
            and s.id = $3",
    )
    .bind(tx.tenant_id())
    .bind(copy.from)
    .bind(copy.to)
    .bind(seqs)
    .bind(through)
    .bind(copy.counted)
    .bind(with_active)
    .execute(tx.connection())
    .await?;
    Ok(())
}

pub struct Copy<'a> {
    pub from: SessionId,
    pub to: SessionId,
    pub selection: CopySelection<'a>,
    /// Whether the copies count as messages of their new session. Copies within a chain do not.
    pub counted: bool,
}

#[derive(Debug, Clone, Copy)]
pub enum CopySelection<'a> {
    Seqs(&'a [i64]),
    /// Up to and including this number.
    Through(i64),
    /// All but the messages of an active turn.
    WithoutActiveTurn,
}

/// Reads the columns of `message_columns!`, which come first, by their index: finding them by name would take longer
/// than reading them.
pub(in crate::store) fn read_message(row: &PgRow) -> Result<Message> {
    let raw = |index: usize| -> Result<Option<Box<RawValue>>> {
        let value: Option<Json<Box<RawValue>>> = row.try_get(index)?;
        Ok(value.map(|Json(raw)| raw))
    };
    let extra: Option<Json<Box<Extra>>> = row.try_get(15)?;
    let copied_session: Option<SessionId> = row.try_get(10)?;
    let copied_seq: Option<i64> = row.try_get(11)?;
    Ok(Message {
        session_id: row.try_get(0)?,
        seq: row.try_get(1)?,
        role: Role::from_column(row.try_get(2)?)?,
        kind: MessageKind::from_column(row.try_get(3)?)?,
        content: raw(4)?,
        tool_calls: raw(5)?,
        tool_call_id: row.try_get(6)?,
        platform: row.try_get(7)?,
        token_count: row.try_get(8)?,
        turn_id: row.try_get(9)?,
        copied_from: copied_session.zip(copied_seq),
        created_at: row.try_get(12)?,
        identity: row.try_get(13)?,
        undone_at: row.try_get(14)?,
        extra: extra.map(|Json(extra)| extra),
    })
}

/// Columns of `messages m`. A subquery reads the identity, so that a message without one costs nothing.
macro_rules! message_columns {
    () => {
        "m.session_id, m.seq, m.role, m.kind, m.content, m.tool_calls, m.tool_call_id, m.platform,
         m.token_count, m.turn_id, m.copied_session, m.copied_seq, m.created_at,
         case when m.identity_id is not null then
           (select i.platform || case when i.scope = '' then '' else '@' || i.scope end || ':' || i.external_id
              from identities i
             where i.tenant_id = $1
               and i.id = m.identity_id)
         end as identity, m.undone_at, m.extra"
    };
}
pub(in crate::store) use message_columns;

/// The size of a row of `messages m` in a result.
macro_rules! message_bytes {
    () => {
        "coalesce(octet_length(m.content::text), 0) + coalesce(octet_length(m.tool_calls::text), 0)
         + coalesce(octet_length(m.extra::text), 0)"
    };
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    OldestFirst,
    NewestFirst,
}

/// Two bounds, where one would do: Postgres then expects few rows for any limit, and keeps one plan.
/// Otherwise it plans each short page again, which takes longer than reading it. Public for the bench that
/// runs it beside the service.
pub const LIST_NEWEST: &str = within_page_bytes!(
    "seq desc",
    "select ",
    message_columns!(),
    ", ",
    message_bytes!(),
    " as bytes
       from messages m
      where m.tenant_id = $1
        and m.session_id = $2
        and m.seq > $3
        and m.seq < $4
      order by m.seq desc
      limit $5"
);
const LIST_OLDEST: &str = within_page_bytes!(
    "seq",
    "select ",
    message_columns!(),
    ", ",
    message_bytes!(),
    " as bytes
       from messages m
      where m.tenant_id = $1
        and m.session_id = $2
        and m.seq > $3
        and m.seq < $4
      order by m.seq
      limit $5"
);

/// A session's transcript. A page starts after a number.
pub async fn list(
    tx: &mut TenantTx,
    session_id: SessionId,
    order: Order,
    page: &PageRequest<i64>,
) -> Result<Page<Message, i64>> {
    let (sql, above, below) = match order {
        Order::OldestFirst => (LIST_OLDEST, page.after, None),
        Order::NewestFirst => (LIST_NEWEST, None, page.after),
    };
    let rows = sqlx::query(sql)
        .bind(tx.tenant_id())
        .bind(session_id)
        .bind(above.unwrap_or(0))
        .bind(below.unwrap_or(i64::MAX))
        .bind(page.fetch_limit())
        .fetch_all(tx.connection())
        .await?;
    let is_followed = is_followed(&rows)?;
    let messages = rows.iter().map(read_message).collect::<Result<Vec<_>>>()?;
    let position = |message: &Message| message.seq;
    Ok(Page::cut_early(messages, page, position, is_followed))
}

/// The position of a message in a whole chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChainPosition {
    pub depth: i32,
    pub seq: i64,
}

/// Each original message of a whole chain once, oldest first, with each summary at the session that it starts.
/// The initial messages of the first session (of a branch) are its own; those of later sessions are copies.
pub async fn list_conversation(
    tx: &mut TenantTx,
    conversation_id: SessionId,
    page: &PageRequest<ChainPosition>,
) -> Result<Page<(i32, Message), ChainPosition>> {
    let after = page.after.unwrap_or(ChainPosition { depth: -1, seq: 0 });
    let rows = sqlx::query(within_page_bytes!(
        "depth, seq",
        "select ",
        message_columns!(),
        ", s.depth, ",
        message_bytes!(),
        " as bytes
           from sessions s
          join messages m
            on m.tenant_id = $1
           and m.session_id = s.id
         where s.tenant_id = $1
           and s.conversation_id = $2
           and s.undone_at is null
           and s.depth >= $3
           and (s.depth, m.seq) > ($3, $4)
           and (m.copied_seq is null or s.depth = 0)
         order by s.depth, m.seq
         limit $5"
    ))
    .bind(tx.tenant_id())
    .bind(conversation_id)
    .bind(after.depth)
    .bind(after.seq)
    .bind(page.fetch_limit())
    .fetch_all(tx.connection())
    .await?;
    let read = |row: &PgRow| Ok((row.try_get("depth")?, read_message(row)?));
    let is_followed = is_followed(&rows)?;
    let messages = rows.iter().map(read).collect::<Result<Vec<_>>>()?;
    let position = |(depth, message): &(i32, Message)| ChainPosition {
        depth: *depth,
        seq: message.seq,
    };
    Ok(Page::cut_early(messages, page, position, is_followed))
}

/// What a compression plan depends on, of all messages that no undo took back. They are read one by one, without
/// their contents: images and the number of calls are looked for since the newest turn of a user only.
pub async fn list_outline(tx: &mut TenantTx, session_id: SessionId) -> Result<Vec<Outline>> {
    // As a join, `turn` could be read again for each message.
    let mut rows = sqlx::query(
        "with turn as materialized (
           select coalesce(max(a.seq), 0) as after,
                  coalesce(max(a.seq) filter (where a.role = 'assistant'), 0) as model
             from messages a
            where a.tenant_id = $1
              and a.session_id = $2
              and (a.role = 'tool' or (a.role = 'assistant' and a.kind = 'normal'))
              and a.undone_at is null
              and a.seq < (select max(u.seq)
                             from messages u
                            where u.tenant_id = $1
                              and u.session_id = $2
                              and u.role = 'user'
                              and u.kind = 'normal'
                              and u.undone_at is null)
         )
         select m.seq, m.role, m.kind, m.token_count,
                case
                  when m.tool_calls is null then 0
                  when m.seq < (select turn.model from turn) then 1
                  when json_typeof(m.tool_calls) = 'array' then least(json_array_length(m.tool_calls), 255)
                  else 0
                end as calls,
                m.seq > (select turn.after from turn)
                  and m.content is not null
                  and m.content::text like any (array['[%\"type\":\"image%', '[%\"type\":\"input_image%'])
                  as has_image
           from messages m
          where m.tenant_id = $1
            and m.session_id = $2
            and m.undone_at is null
          order by m.seq",
    )
    .bind(tx.tenant_id())
    .bind(session_id)
    .fetch(tx.connection());
    let mut outlines = Vec::new();
    while let Some(row) = rows.try_next().await? {
        let calls: i32 = row.try_get("calls")?;
        outlines.push(Outline {
            seq: row.try_get("seq")?,
            tokens: row.try_get("token_count")?,
            role: Role::from_column(row.try_get("role")?)?,
            kind: MessageKind::from_column(row.try_get("kind")?)?,
            calls: u8::try_from(calls).unwrap_or(u8::MAX),
            has_image: row.try_get("has_image")?,
        });
    }
    Ok(outlines)
}
