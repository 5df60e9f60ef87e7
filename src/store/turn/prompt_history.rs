//! The transcript as a prompt needs it.

use bytes::Bytes;
use memchr::memchr_iter;
use sqlx::Row;
use sqlx::postgres::PgRow;

use crate::domain::conversation::message::{MessageKind, Role};
use crate::domain::turn::prompt::HistoryMessage;
use crate::error::Result;
use crate::ids::SessionId;
use crate::store::TenantTx;

/// More than a context window holds, whatever its size.
pub(in crate::store) const MAX_HISTORY_MESSAGES: i64 = 10_000;

/// Between messages and between their parts: characters that no JSON has in it.
const BETWEEN_MESSAGES: u8 = b'\x1e';
const BETWEEN_PARTS: char = '\x1f';

/// The end of a session's transcript, as much as fits into so many tokens, newest first: all of it in two texts,
/// since a row of its own costs more than the message in it, and an array twice as much as a text. `heads` has the
/// role of a message, and more only where there is more. The tokens are added up only where the whole session,
/// with so many, does not fit.
macro_rules! history_messages {
    (session: $session:literal, of_tokens: $of_tokens:literal, fit: $fit:literal, most: $most:literal) => {
        concat!(
            "select string_agg(case
                                 when e.kind = 'normal' and e.tool_calls is null and e.tool_call_id is null
                                      and e.name is null then e.role
                                 else concat(e.role, e'\\x1f', e.kind, e'\\x1f', e.tool_calls, e'\\x1f',
                                             to_json(e.tool_call_id), e'\\x1f', e.name)
                               end, e'\\x1e') as heads,
                    string_agg(coalesce(e.content::text, ''), e'\\x1e') as contents
               from (select m.role, m.kind, m.content, m.tool_calls, m.tool_call_id,
                            case when m.role = 'user' then m.extra -> 'name' end as name
                       from messages m
                      where m.tenant_id = $1
                        and m.session_id = ",
            $session,
            "           and m.undone_at is null
                      order by m.seq desc
                      limit case
                              when ",
            $of_tokens,
            " <= ",
            $fit,
            " then ",
            $most,
            "                 else (select count(*)
                                      from (select sum(w.token_count) over (order by w.seq desc
                                                                            rows unbounded preceding) as tokens
                                              from messages w
                                             where w.tenant_id = $1
                                               and w.session_id = ",
            $session,
            "                                  and w.undone_at is null
                                             order by w.seq desc
                                             limit ",
            $most,
            ") f
                                     where f.tokens <= ",
            $fit,
            ")
                            end) e"
        )
    };
}
pub(in crate::store) use history_messages;

/// Oldest first.
pub async fn list(
    tx: &mut TenantTx,
    session_id: SessionId,
    tokens: i64,
) -> Result<Vec<HistoryMessage>> {
    let row = sqlx::query(history_messages!(
        session: "$2",
        of_tokens: "(select s.token_count from sessions s where s.tenant_id = $1 and s.id = $2)",
        fit: "$3",
        most: "$4"
    ))
    .bind(tx.tenant_id())
    .bind(session_id)
    .bind(tokens)
    .bind(MAX_HISTORY_MESSAGES)
    .fetch_one(tx.connection())
    .await?;
    read_history(&row)
}

/// A row with the columns of `history_messages`; oldest first.
pub(in crate::store) fn read_history(row: &PgRow) -> Result<Vec<HistoryMessage>> {
    let heads: Option<&str> = row.try_get("heads")?;
    let contents: Option<&str> = row.try_get("contents")?;
    let (Some(heads), Some(contents)) = (heads, contents) else {
        return Ok(Vec::new());
    };
    // One copy for all: they are parts of it.
    let contents = Bytes::copy_from_slice(contents.as_bytes());
    let mut begin = 0;
    let ends = memchr_iter(BETWEEN_MESSAGES, &contents).chain([contents.len()]);
    let contents = ends.map(|end| contents.slice(std::mem::replace(&mut begin, end + 1)..end));
    let both = heads.split(char::from(BETWEEN_MESSAGES)).zip(contents);
    let mut past = both
        .map(|(head, content)| read_message(head, content))
        .collect::<Result<Vec<_>>>()?;
    // Newest first: an aggregate without an order of its own takes the rows of a sorted subquery as they come.
    past.reverse();
    Ok(past)
}

fn read_message(head: &str, content: Bytes) -> Result<HistoryMessage> {
    let mut parts = head.split(BETWEEN_PARTS);
    let role = Role::from_column(parts.next().unwrap_or_default())?;
    let kind = parts.next().map(MessageKind::from_column).transpose()?;
    let mut json = || {
        let text = parts.next().filter(|text| !text.is_empty())?;
        Some(Bytes::copy_from_slice(text.as_bytes()))
    };
    Ok(HistoryMessage {
        role,
        kind: kind.unwrap_or(MessageKind::Normal),
        content: Some(content).filter(|content| !content.is_empty()),
        tool_calls: json(),
        tool_call_id: json(),
        name: json(),
    })
}
