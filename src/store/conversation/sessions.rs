//! The sessions of chains. A statement checks in its own condition that a state or a number is still the one that
//! the caller saw, never in a query before it.

use chrono::{DateTime, Utc};
use sqlx::postgres::PgRow;
use sqlx::types::Json;
use sqlx::{FromRow, Row};

use super::access_sql::access_columns;
use super::tips::{read_name, read_owner};
use crate::domain::conversation::session::{
    CompressionRecord, ConversationHandle, Edge, EndReason, Session, SessionHandle, SessionState,
};
use crate::domain::conversation::session_name::session_not_found;
use crate::domain::people::access::{Access, Namespace};
use crate::domain::values::paging::{Page, PageRequest};
use crate::error::Result;
use crate::ids::SessionId;
use crate::store::TenantTx;

/// The columns of a session, from `sessions s`, its conversation `c` and the tables of `join_origin!`. `$1` is the
/// tenant and `$2` the caller's namespace.
macro_rules! session_columns {
    () => {
        concat!(
            "s.id, s.depth, s.chain_parent_id, s.edge, s.state, s.end_reason, s.next_seq, s.message_count,
             s.token_count, s.compression, s.created_at, s.last_active_at, s.ended_at, s.conversation_id,
             c.namespace, c.client_id, c.user_id, c.agent, c.title, c.archived, c.pinned,
             (select k.key from slots k where k.tenant_id = $1 and k.id = c.slot_id) as session_key,
             false as granted, ",
            access_columns!(hidden_from: "$2"),
            " as hidden,
             o.id as origin_id, oc.id as origin_conversation_id, oc.namespace as origin_namespace,
             oc.client_id as origin_client_id"
        )
    };
}
pub(in crate::store) use session_columns;

/// The session from which a reset or a branch started.
macro_rules! join_origin {
    () => {
        "left join sessions o
             on o.tenant_id = $1
            and o.id = s.origin_id
           left join conversations oc
             on oc.tenant_id = $1
            and oc.id = o.conversation_id
            and oc.deleted_at is null"
    };
}
pub(in crate::store) use join_origin;

pub(in crate::store) struct SessionRow(pub Session);

impl FromRow<'_, PgRow> for SessionRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        read_session(row)
            .map(Self)
            .map_err(|error| sqlx::Error::Decode(Box::new(error)))
    }
}

fn read_session(row: &PgRow) -> Result<Session> {
    let name = read_name(row)?;
    let chain_parent: Option<SessionId> = row.try_get("chain_parent_id")?;
    let origin: Option<SessionId> = row.try_get("origin_conversation_id")?;
    let parent = match (chain_parent, origin) {
        (Some(id), _) => Some(SessionHandle {
            id,
            name: name.clone(),
        }),
        (None, Some(conversation_id)) => Some(SessionHandle {
            id: row.try_get("origin_id")?,
            name: ConversationHandle {
                conversation_id,
                namespace: Namespace::from_uuid(row.try_get("origin_namespace")?),
                client_id: row.try_get("origin_client_id")?,
                user_id: name.user_id,
                // The statement did not check for an equal name of the caller's own: the id is right in any case.
                hidden: true,
            },
        }),
        (None, None) => None,
    };
    let text = |column: &str| row.try_get::<Option<String>, _>(column);
    let compression: Option<Json<CompressionRecord>> = row.try_get("compression")?;
    Ok(Session {
        id: row.try_get("id")?,
        name,
        owner: read_owner(row)?,
        agent: row.try_get("agent")?,
        parent,
        edge: text("edge")?
            .as_deref()
            .map(Edge::from_column)
            .transpose()?,
        state: SessionState::from_column(&row.try_get::<String, _>("state")?)?,
        end_reason: text("end_reason")?
            .as_deref()
            .map(EndReason::from_column)
            .transpose()?,
        title: row.try_get("title")?,
        depth: row.try_get("depth")?,
        current: row.try_get("current")?,
        last_seq: row.try_get::<i64, _>("next_seq")? - 1,
        message_count: row.try_get("message_count")?,
        token_count: row.try_get("token_count")?,
        created_at: row.try_get("created_at")?,
        last_active_at: row.try_get("last_active_at")?,
        ended_at: row.try_get("ended_at")?,
        archived: row.try_get("archived")?,
        pinned: row.try_get("pinned")?,
        compression: compression.map(|Json(record)| record),
    })
}

/// One session. The caller must have found it with `tips::find`.
pub async fn get(tx: &mut TenantTx, access: &Access, id: SessionId) -> Result<Session> {
    let row: Option<SessionRow> = sqlx::query_as(concat!(
        "select ",
        session_columns!(),
        ", s.id = c.tip_session_id
           and exists (select 1
                         from slots l
                        where l.tenant_id = $1
                          and l.conversation_id = c.id) as current
           from sessions s
           join conversations c
             on c.tenant_id = $1
            and c.id = s.conversation_id ",
        join_origin!(),
        " where s.tenant_id = $1
            and s.id = $3"
    ))
    .bind(tx.tenant_id())
    .bind(access.namespace.as_uuid())
    .bind(id)
    .fetch_optional(tx.connection())
    .await?;
    // It existed a statement ago; it may have been deleted since, and its rows removed.
    row.map(|row| row.0).ok_or_else(session_not_found)
}

/// The sessions of a chain, oldest first, without undone ones. A page starts after a depth.
pub async fn list_lineage(
    tx: &mut TenantTx,
    access: &Access,
    conversation_id: SessionId,
    page: &PageRequest<i32>,
) -> Result<Page<Session, i32>> {
    let rows: Vec<SessionRow> = sqlx::query_as(concat!(
        "select ",
        session_columns!(),
        ", s.id = c.tip_session_id
           and exists (select 1
                         from slots l
                        where l.tenant_id = $1
                          and l.conversation_id = c.id) as current
           from sessions s
           join conversations c
             on c.tenant_id = $1
            and c.id = s.conversation_id ",
        join_origin!(),
        " where s.tenant_id = $1
            and s.conversation_id = $3
            and s.undone_at is null
            and s.depth > $4
          order by s.depth
          limit $5"
    ))
    .bind(tx.tenant_id())
    .bind(access.namespace.as_uuid())
    .bind(conversation_id)
    .bind(page.after.unwrap_or(-1))
    .bind(page.fetch_limit())
    .fetch_all(tx.connection())
    .await?;
    let sessions = rows.into_iter().map(|row| row.0).collect();
    Ok(Page::cut(sessions, page, |session: &Session| session.depth))
}

/// Inserts the first session of a conversation.
pub async fn insert_first(
    tx: &mut TenantTx,
    conversation_id: SessionId,
    origin: Option<(SessionId, Edge)>,
    now: DateTime<Utc>,
) -> Result<()> {
    sqlx::query(
        "insert into sessions (tenant_id, id, conversation_id, depth, origin_id, edge, state, created_at,
                               last_active_at, last_user_at)
         values ($1, $2, $2, 0, $3, $4, 'open', $5, $5, $5)",
    )
    .bind(tx.tenant_id())
    .bind(conversation_id)
    .bind(origin.map(|(id, _)| id))
    .bind(origin.map(|(_, edge)| edge.as_str()))
    .bind(now)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// A session that a compression creates.
pub struct NewChild<'a> {
    pub id: SessionId,
    pub parent_id: SessionId,
    pub record: &'a CompressionRecord,
}

/// Inserts the next session of a chain. Its messages follow in the same transaction. The idle time continues from
/// the parent's.
pub async fn insert_child(
    tx: &mut TenantTx,
    child: &NewChild<'_>,
    now: DateTime<Utc>,
) -> Result<()> {
    sqlx::query(
        "insert into sessions (tenant_id, id, conversation_id, depth, chain_parent_id, edge, state,
                               compression, created_at, last_active_at, last_user_at)
         select p.tenant_id, $3, p.conversation_id, p.depth + 1, p.id, 'compression', 'open', $4, $5,
                p.last_active_at, p.last_user_at
           from sessions p
          where p.tenant_id = $1
            and p.id = $2",
    )
    .bind(tx.tenant_id())
    .bind(child.parent_id)
    .bind(child.id)
    .bind(Json(child.record))
    .bind(now)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Records that the session's present messages came from its compression.
pub async fn update_born_seq(tx: &mut TenantTx, id: SessionId) -> Result<()> {
    sqlx::query(
        "update sessions
            set born_seq = next_seq - 1
          where tenant_id = $1
            and id = $2",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Ends `id` as the parent of a compression. Until the end of the transaction no one can append to it, and
/// afterwards no one ever will. Returns `false` if the session is no longer the end of its chain.
pub async fn end_as_parent(tx: &mut TenantTx, id: SessionId, now: DateTime<Utc>) -> Result<bool> {
    let done = sqlx::query(
        "update sessions
            set state = 'ended', end_reason = 'compression', ended_at = $3
          where tenant_id = $1
            and id = $2
            and undone_at is null
            and end_reason is distinct from 'compression'",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .bind(now)
    .execute(tx.connection())
    .await?;
    Ok(done.rows_affected() > 0)
}

/// Undoes a compression, if no message was appended since. Returns the parent, which is open again.
pub async fn undo_child(
    tx: &mut TenantTx,
    id: SessionId,
    now: DateTime<Utc>,
) -> Result<Option<SessionId>> {
    // The parent first: an append that waited for the parent during its compression keeps that row locked until
    // it ends, and continues with the child.
    sqlx::query(
        "select p.id
           from sessions c
           join sessions p
             on p.tenant_id = $1
            and p.id = c.chain_parent_id
          where c.tenant_id = $1
            and c.id = $2
            for no key update of p",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .execute(tx.connection())
    .await?;
    Ok(sqlx::query_scalar(
        "with undone as (
           update sessions
              set state = 'ended', end_reason = 'uncompressed', ended_at = $3, undone_at = $3
            where tenant_id = $1
              and id = $2
              and depth > 0
              and undone_at is null
              and end_reason is distinct from 'compression'
              and next_seq - 1 = born_seq
        returning chain_parent_id
         )
         update sessions p
            set state = 'open', end_reason = null, ended_at = null
           from undone
          where p.tenant_id = $1
            and p.id = undone.chain_parent_id
      returning p.id",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .bind(now)
    .fetch_optional(tx.connection())
    .await?)
}

/// The child of `id`, if it was compressed and the compression is not undone.
pub async fn find_child(tx: &mut TenantTx, id: SessionId) -> Result<Option<SessionId>> {
    Ok(sqlx::query_scalar(
        "select id
           from sessions
          where tenant_id = $1
            and chain_parent_id = $2
            and undone_at is null",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .fetch_optional(tx.connection())
    .await?)
}

/// Ends the tip of a conversation if no slot points to it any more. The caller must have locked the conversation,
/// as must each transaction that makes a slot point to it.
pub async fn end_unless_current(
    tx: &mut TenantTx,
    conversation_id: SessionId,
    reason: EndReason,
    now: DateTime<Utc>,
) -> Result<()> {
    sqlx::query(
        "update sessions s
            set state = 'ended', end_reason = $3, ended_at = $4
           from conversations c
          where c.tenant_id = $1
            and c.id = $2
            and s.tenant_id = $1
            and s.id = c.tip_session_id
            and s.state = 'open'
            and not exists (select 1
                              from slots k
                             where k.tenant_id = $1
                               and k.conversation_id = c.id)",
    )
    .bind(tx.tenant_id())
    .bind(conversation_id)
    .bind(reason.as_str())
    .bind(now)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Reopens the tip of a conversation, if it has ended.
pub async fn reopen_tip(tx: &mut TenantTx, conversation_id: SessionId) -> Result<()> {
    sqlx::query(
        "update sessions s
            set state = 'open', end_reason = null, ended_at = null
           from conversations c
          where c.tenant_id = $1
            and c.id = $2
            and s.tenant_id = $1
            and s.id = c.tip_session_id
            and s.state = 'ended'",
    )
    .bind(tx.tenant_id())
    .bind(conversation_id)
    .execute(tx.connection())
    .await?;
    Ok(())
}
