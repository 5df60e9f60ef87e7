//! What was said. Numbers are taken by one conditional update of the session, in the statement that
//! writes the messages: that alone keeps `seq` without gap or double.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use sqlx::Row;
use sqlx::postgres::PgRow;
use sqlx::types::Json;

use crate::domain::conversation::message::{Message, MessageKind, NewMessage, Role, ToolCall};
use crate::domain::conversation::message_extra::Extra;
use crate::domain::people::user::Identity;
use crate::domain::tenant::compression_settings::Outline;
use crate::domain::values::paging::{Page, PageRequest};
use crate::error::Result;
use crate::ids::SessionId;
use crate::store::TenantTx;
use crate::store::db::page_bytes::{is_followed, within_page_bytes};
use crate::store::turn::turn_writes::{extras, to_json};

/// What is put at the end of a session.
pub struct Append<'a> {
    pub session_id: SessionId,
    pub messages: &'a [NewMessage],
    /// Who said what has the role `user`.
    pub speaker: Option<&'a Identity>,
    /// The last number that the caller saw.
    pub expected_last: Option<i64>,
}

/// Appends to a session that is the end of its chain, opening it if it had ended by a reset or a switch.
/// Answers the number of the first message, or `None` if the session is no longer that end, a turn is active
/// in it, or the last number is not the expected one. A person's message moves the idle clock.
pub async fn append(
    tx: &mut TenantTx,
    append: &Append<'_>,
    now: DateTime<Utc>,
) -> Result<Option<i64>> {
    let messages = append.messages;
    let is_spoken =
        |message: &NewMessage| message.role == Role::User && message.kind == MessageKind::Normal;
    let spoken: Vec<bool> = messages.iter().map(is_spoken).collect();
    let texts = |text: fn(&NewMessage) -> Result<Option<String>>| -> Result<Vec<Option<String>>> {
        messages.iter().map(text).collect()
    };
    let roles: Vec<&str> = messages
        .iter()
        .map(|message| message.role.as_str())
        .collect();
    let kinds: Vec<&str> = messages
        .iter()
        .map(|message| message.kind.as_str())
        .collect();
    let tokens: Vec<i32> = messages.iter().map(NewMessage::tokens).collect();
    let token_sum: i64 = tokens.iter().copied().map(i64::from).sum();
    Ok(sqlx::query_scalar(APPEND)
        .bind(tx.tenant_id())
        .bind(append.session_id)
        .bind(messages.len() as i64)
        .bind(token_sum)
        .bind(spoken.contains(&true))
        .bind(append.expected_last)
        .bind(now)
        .bind(roles)
        .bind(kinds)
        .bind(texts(|message| to_json(message.content.as_ref()))?)
        .bind(texts(|message| to_json(message.tool_calls.as_ref()))?)
        .bind(texts(|message| Ok(message.tool_call_id.clone()))?)
        .bind(tokens)
        .bind(spoken)
        .bind(append.speaker.map(|speaker| speaker.id))
        .bind(
            append
                .speaker
                .map(|speaker| speaker.name.platform().to_string()),
        )
        .bind(extras(messages)?)
        .fetch_optional(tx.connection())
        .await?)
}

/// Public for the bench that runs it beside the service.
pub const APPEND: &str = "with place as (
       update sessions
          set next_seq = next_seq + $3,
              message_count = message_count + $3,
              token_count = token_count + $4,
              last_active_at = greatest(last_active_at, $7),
              last_person_at = case when $5 then greatest(last_active_at, $7) else last_person_at end,
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
     ), put as (
       insert into messages (tenant_id, session_id, seq, role, kind, content, tool_calls, tool_call_id,
                             identity_id, platform, token_count, created_at, extra)
       select $1, $2, place.first_seq + m.place - 1, m.role, m.kind, m.content::json, m.tool_calls::json,
              m.tool_call_id, case when m.spoken then $15 end, case when m.spoken then $16 end, m.tokens, place.at,
              m.extra::json
         from place,
              unnest($8::text[], $9::text[], $10::text[], $11::text[], $12::text[], $13::integer[],
                     $14::boolean[], $17::text[])
                with ordinality
                as m (role, kind, content, tool_calls, tool_call_id, tokens, spoken, extra, place)
     )
     select first_seq
       from place";

/// Copies messages of `from` to the end of `to`, in the order of their numbers. A copy of a copy knows the
/// original; within a chain, what its first link has is original. Only inside the transaction that makes
/// `to`.
pub async fn copy(tx: &mut TenantTx, copy: &Copy<'_>) -> Result<()> {
    let (seqs, through, with_active) = match copy.selection {
        CopySelection::Seqs(seqs) => (Some(seqs), None, true),
        CopySelection::Through(through) => (None, Some(through), true),
        CopySelection::Answered => (None, None, false),
    };
    sqlx::query(
        "with chosen as (
           select m.*, row_number() over (order by m.seq) as place
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
         ), put as (
           insert into messages (tenant_id, session_id, seq, role, kind, content, tool_calls, tool_call_id,
                                 identity_id, platform, token_count, turn_id, copied_session, copied_seq,
                                 created_at, undone_at, extra)
           select c.tenant_id, s.id, s.next_seq + c.place - 1, c.role, c.kind, c.content, c.tool_calls,
                  c.tool_call_id, c.identity_id, c.platform, c.token_count, c.turn_id,
                  case when $6 or f.depth > 0 then coalesce(c.copied_session, c.session_id) else f.id end,
                  case when $6 or f.depth > 0 then coalesce(c.copied_seq, c.seq) else c.seq end,
                  c.created_at, c.undone_at, c.extra
             from chosen c
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
           from (select count(*) as messages, coalesce(sum(token_count), 0) as tokens from put) added
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
    /// Whether they count as messages of their new session: not where they stay within a chain.
    pub counted: bool,
}

#[derive(Debug, Clone, Copy)]
pub enum CopySelection<'a> {
    Seqs(&'a [i64]),
    /// Up to this one.
    Through(i64),
    /// All but those of a turn that is active.
    Answered,
}

/// Reads the columns of `message_columns!`, which come first, by their places: to look up their names would
/// take longer than to read them.
pub(in crate::store) fn read_message(row: &PgRow) -> Result<Message> {
    let raw = |place: usize| -> Result<Option<Box<RawValue>>> {
        let value: Option<Json<Box<RawValue>>> = row.try_get(place)?;
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

/// Columns of `messages m`. The identity is looked up by itself, so that its absence costs nothing.
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

/// How large a row of `messages m` is as it is read.
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

/// Two bounds, where one would do: Postgres then expects few rows whatever the limit, and keeps one plan.
/// Otherwise it plans a short page anew each time, which takes longer than reading it. Public for the
/// bench that runs it beside the service.
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

/// A session's transcript. A page begins after a number.
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

/// The place of a message in a whole chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChainPlace {
    pub depth: i32,
    pub seq: i64,
}

/// Each original message of a whole chain once, oldest first, with the summaries where they were made.
/// What a first link was born with (a branch) is its own; what a later one was born with are copies.
pub async fn list_conversation(
    tx: &mut TenantTx,
    conversation_id: SessionId,
    page: &PageRequest<ChainPlace>,
) -> Result<Page<(i32, Message), ChainPlace>> {
    let after = page.after.unwrap_or(ChainPlace { depth: -1, seq: 0 });
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
    let position = |(depth, message): &(i32, Message)| ChainPlace {
        depth: *depth,
        seq: message.seq,
    };
    Ok(Page::cut_early(messages, page, position, is_followed))
}

/// What a plan to compress needs to see of a session: its beginning, its end, and the last message of a
/// person.
pub async fn outline(
    tx: &mut TenantTx,
    session_id: SessionId,
    head: i64,
    tail: i64,
) -> Result<Vec<Outline>> {
    let rows = sqlx::query(
        "with seen as (
           (select m.seq
              from messages m
             where m.tenant_id = $1
               and m.session_id = $2
             order by m.seq
             limit $3)
            union
           (select m.seq
              from messages m
             where m.tenant_id = $1
               and m.session_id = $2
             order by m.seq desc
             limit $4)
            union
           (select m.seq
              from messages m
             where m.tenant_id = $1
               and m.session_id = $2
               and m.role = 'user'
               and m.kind = 'normal'
             order by m.seq desc
             limit 1)
         )
         select m.seq, m.role, m.kind, m.token_count, m.tool_call_id,
                m.tool_calls
           from seen
           join messages m
             on m.tenant_id = $1
            and m.session_id = $2
            and m.seq = seen.seq
          order by m.seq",
    )
    .bind(tx.tenant_id())
    .bind(session_id)
    .bind(head)
    .bind(tail)
    .fetch_all(tx.connection())
    .await?;
    rows.iter()
        .map(|row| {
            // Not by `->>`, which fails on a text with U+0000: older rows may hold one.
            let calls: Option<Json<Vec<ToolCall>>> = row.try_get("tool_calls")?;
            let calls = calls.map_or_else(Vec::new, |Json(calls)| calls);
            Ok(Outline {
                seq: row.try_get("seq")?,
                role: Role::from_column(row.try_get("role")?)?,
                kind: MessageKind::from_column(row.try_get("kind")?)?,
                tokens: i64::from(row.try_get::<i32, _>("token_count")?),
                tool_call_ids: calls.into_iter().map(|call| call.id).collect(),
                tool_call_id: row.try_get("tool_call_id")?,
            })
        })
        .collect()
}
