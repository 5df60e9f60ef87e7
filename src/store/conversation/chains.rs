//! Whole chains of sessions: an export reads them session by session, an import inserts them at once.

use chrono::{DateTime, Utc};
use sqlx::Row;
use sqlx::postgres::PgRow;
use sqlx::types::{Json, Uuid};

use super::messages::{message_columns, read_message};
use crate::domain::conversation::message::Message;
use crate::domain::conversation::session::CompressionRecord;
use crate::domain::transfer::document::Original;
use crate::error::{Error, Result};
use crate::ids::SessionId;
use crate::store::TenantTx;

/// A session of a chain to export.
#[derive(Debug, Clone)]
pub struct ChainSession {
    pub id: SessionId,
    pub depth: i32,
    pub created_at: DateTime<Utc>,
    pub compression: Option<CompressionRecord>,
    pub last_seq: i64,
}

/// The sessions from the one after `depth` up to and including `tip`, oldest first.
pub async fn list_sessions(
    tx: &mut TenantTx,
    conversation_id: SessionId,
    tip: (SessionId, i32),
    depth: i32,
    limit: i64,
) -> Result<Vec<ChainSession>> {
    let rows = sqlx::query(
        "select id, depth, created_at, compression, next_seq - 1 as last_seq
           from sessions
          where tenant_id = $1
            and conversation_id = $2
            and depth > $3
            and (id = $4 or (depth < $5 and undone_at is null))
          order by depth
          limit $6",
    )
    .bind(tx.tenant_id())
    .bind(conversation_id)
    .bind(depth)
    .bind(tip.0)
    .bind(tip.1)
    .bind(limit)
    .fetch_all(tx.connection())
    .await?;
    let read = |row: &PgRow| -> Result<ChainSession> {
        let compression: Option<Json<CompressionRecord>> = row.try_get("compression")?;
        Ok(ChainSession {
            id: row.try_get("id")?,
            depth: row.try_get("depth")?,
            created_at: row.try_get("created_at")?,
            compression: compression.map(|Json(record)| record),
            last_seq: row.try_get("last_seq")?,
        })
    };
    rows.iter().map(read).collect()
}

/// A message. For a copy also the depth of the session in this chain that has the original.
pub struct ChainMessage {
    pub message: Message,
    pub copied_depth: Option<i32>,
}

/// The messages of a session with numbers after `after`, up to `through`.
pub async fn list_messages(
    tx: &mut TenantTx,
    conversation_id: SessionId,
    session_id: SessionId,
    (after, through): (i64, i64),
    limit: i64,
) -> Result<Vec<ChainMessage>> {
    let rows = sqlx::query(concat!(
        "select ",
        message_columns!(),
        ", case when m.copied_session is not null then
             (select o.depth
                from sessions o
               where o.tenant_id = $1
                 and o.id = m.copied_session
                 and o.conversation_id = $2)
           end as copied_depth
           from messages m
          where m.tenant_id = $1
            and m.session_id = $3
            and m.seq > $4
            and m.seq <= $5
          order by m.seq
          limit $6"
    ))
    .bind(tx.tenant_id())
    .bind(conversation_id)
    .bind(session_id)
    .bind(after)
    .bind(through)
    .bind(limit)
    .fetch_all(tx.connection())
    .await?;
    let read = |row: &PgRow| -> Result<ChainMessage> {
        Ok(ChainMessage {
            message: read_message(row)?,
            copied_depth: row.try_get("copied_depth")?,
        })
    };
    rows.iter().map(read).collect()
}

/// A session of a chain to import. The first exists already, empty.
pub struct NewChainSession<'a> {
    pub id: SessionId,
    pub compression: Option<&'a CompressionRecord>,
    pub last_seq: i64,
    pub born_seq: i64,
    pub message_count: i64,
    pub token_count: i64,
}

/// Inserts the sessions after the first. All but the last are ended by the compression that created the next.
pub async fn insert_sessions(
    tx: &mut TenantTx,
    conversation_id: SessionId,
    sessions: &[NewChainSession<'_>],
    now: DateTime<Utc>,
) -> Result<()> {
    let later = sessions.get(1..).unwrap_or_default();
    let ids: Vec<Uuid> = sessions
        .iter()
        .map(|session| session.id.as_uuid())
        .collect();
    let records = later
        .iter()
        .map(|session| serde_json::to_string(&session.compression).map_err(Error::internal))
        .collect::<Result<Vec<_>>>()?;
    sqlx::query(
        "insert into sessions (tenant_id, id, conversation_id, depth, chain_parent_id, edge, state,
                               compression, created_at, last_active_at, last_user_at)
         select $1, l.id, $2, l.depth, l.parent_id, 'compression', 'open', l.compression::jsonb, $3, $3, $3
           from unnest($4::uuid[], $5::uuid[], $6::text[])
                  with ordinality
                  as l (id, parent_id, compression, depth)",
    )
    .bind(tx.tenant_id())
    .bind(conversation_id)
    .bind(now)
    .bind(&ids[1.min(ids.len())..])
    .bind(&ids[..later.len()])
    .bind(records)
    .execute(tx.connection())
    .await?;
    let numbers =
        |number: fn(&NewChainSession) -> i64| sessions.iter().map(number).collect::<Vec<i64>>();
    sqlx::query(
        "update sessions s
            set next_seq = l.last_seq + 1,
                born_seq = l.born_seq,
                message_count = l.message_count,
                token_count = l.token_count,
                state = case when s.depth = $8 then 'open' else 'ended' end,
                end_reason = case when s.depth < $8 then 'compression' end,
                ended_at = case when s.depth < $8 then $2 end
           from unnest($3::uuid[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[])
                  as l (id, last_seq, born_seq, message_count, token_count)
          where s.tenant_id = $1
            and s.id = l.id",
    )
    .bind(tx.tenant_id())
    .bind(now)
    .bind(ids)
    .bind(numbers(|session| session.last_seq))
    .bind(numbers(|session| session.born_seq))
    .bind(numbers(|session| session.message_count))
    .bind(numbers(|session| session.token_count))
    .bind(i32::try_from(later.len()).map_err(Error::internal)?)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Inserts messages without an identity, each into its session.
pub async fn insert_originals(
    tx: &mut TenantTx,
    messages: &[(SessionId, &Original)],
    now: DateTime<Utc>,
) -> Result<()> {
    let texts = |text: fn(&Original) -> Option<&str>| -> Vec<Option<&str>> {
        messages.iter().map(|(_, message)| text(message)).collect()
    };
    let sessions: Vec<Uuid> = messages.iter().map(|(id, _)| id.as_uuid()).collect();
    let seqs: Vec<i64> = messages.iter().map(|(_, message)| message.seq).collect();
    let tokens: Vec<i32> = messages.iter().map(|(_, m)| m.token_count).collect();
    sqlx::query(
        "insert into messages (tenant_id, session_id, seq, role, kind, content, tool_calls, tool_call_id,
                               token_count, created_at, extra)
         select $1, m.session_id, m.seq, m.role, m.kind, m.content::json, m.tool_calls::json, m.tool_call_id,
                m.tokens, $2, m.extra::json
           from unnest($3::uuid[], $4::bigint[], $5::text[], $6::text[], $7::text[], $8::text[], $9::text[],
                       $10::integer[], $11::text[])
                  as m (session_id, seq, role, kind, content, tool_calls, tool_call_id, tokens, extra)",
    )
    .bind(tx.tenant_id())
    .bind(now)
    .bind(sessions)
    .bind(seqs)
    .bind(texts(|message| Some(message.role.as_str())))
    .bind(texts(|message| Some(message.kind.as_str())))
    .bind(texts(|message| message.content.as_deref()))
    .bind(texts(|message| message.tool_calls.as_deref()))
    .bind(texts(|message| message.tool_call_id.as_deref()))
    .bind(tokens)
    .bind(texts(|message| message.extra.as_deref()))
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// A copy to insert, and its original, which must exist.
pub struct NewCopy {
    pub to: (SessionId, i64),
    pub from: (SessionId, i64),
}

pub async fn insert_copies(tx: &mut TenantTx, copies: &[NewCopy]) -> Result<()> {
    let sessions = |end: fn(&NewCopy) -> (SessionId, i64)| -> Vec<Uuid> {
        copies.iter().map(|copy| end(copy).0.as_uuid()).collect()
    };
    let seqs = |end: fn(&NewCopy) -> (SessionId, i64)| -> Vec<i64> {
        copies.iter().map(|copy| end(copy).1).collect()
    };
    let done = sqlx::query(
        "insert into messages (tenant_id, session_id, seq, role, kind, content, tool_calls, tool_call_id,
                               token_count, copied_session, copied_seq, created_at, extra)
         select $1, c.session_id, c.seq, o.role, o.kind, o.content, o.tool_calls, o.tool_call_id,
                o.token_count, o.session_id, o.seq, o.created_at, o.extra
           from unnest($2::uuid[], $3::bigint[], $4::uuid[], $5::bigint[])
                  as c (session_id, seq, from_session, from_seq)
           join messages o
             on o.tenant_id = $1
            and o.session_id = c.from_session
            and o.seq = c.from_seq",
    )
    .bind(tx.tenant_id())
    .bind(sessions(|copy| copy.to))
    .bind(seqs(|copy| copy.to))
    .bind(sessions(|copy| copy.from))
    .bind(seqs(|copy| copy.from))
    .execute(tx.connection())
    .await?;
    if done.rows_affected() == copies.len() as u64 {
        Ok(())
    } else {
        Err(Error::internal(anyhow::anyhow!(
            "a copy without its original"
        )))
    }
}
