//! Conversations: inserting them, listing them by their tips, and the columns of a whole chain of sessions.

use chrono::{DateTime, Utc};

use super::access_sql::access_columns;
use super::sessions::{SessionRow, join_origin, session_columns};
use crate::domain::conversation::session::{NewConversation, Session, SessionState};
use crate::domain::people::access::{Access, Visibility};
use crate::domain::values::paging::{Page, PageRequest};
use crate::error::Result;
use crate::ids::{SessionId, SlotId, UserId};
use crate::store::TenantTx;

/// Inserts the conversation, or nothing if its client id was ever used before. Its first session must follow in
/// the same transaction.
pub async fn insert(
    tx: &mut TenantTx,
    conversation: &NewConversation,
    spent_digest: Option<[u8; 32]>,
    now: DateTime<Utc>,
) -> Result<bool> {
    let done = sqlx::query(
        "insert into conversations (tenant_id, id, slot_id, namespace, client_id, user_id, agent,
                                    tip_session_id, title, created_at)
         select $1, $2, $3, $4, $5, $6, $7, $2, $8, $9
          where not exists (select 1
                              from spent_session_ids
                             where tenant_id = $1
                               and digest = $10)
             on conflict on constraint conversations_client_id_once do nothing",
    )
    .bind(tx.tenant_id())
    .bind(conversation.id)
    .bind(conversation.slot_id)
    .bind(conversation.namespace.as_uuid())
    .bind(&conversation.client_id)
    .bind(conversation.user_id)
    .bind(&conversation.agent)
    .bind(&conversation.title)
    .bind(now)
    .bind(spent_digest.map(|digest| digest.to_vec()))
    .execute(tx.connection())
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Locks the conversation until `tx` ends and returns its tip, or `None` if it is deleted.
pub async fn lock(tx: &mut TenantTx, id: SessionId) -> Result<Option<SessionId>> {
    Ok(sqlx::query_scalar(
        "select tip_session_id
           from conversations
          where tenant_id = $1
            and id = $2
            and deleted_at is null
            for no key update",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .fetch_optional(tx.connection())
    .await?)
}

/// Locks the conversation until `tx` ends. Returns false if another transaction has locked it or it is deleted.
pub async fn try_lock(tx: &mut TenantTx, id: SessionId) -> Result<bool> {
    let locked: Option<i32> = sqlx::query_scalar(
        "select 1
           from conversations
          where tenant_id = $1
            and id = $2
            and deleted_at is null
            for no key update skip locked",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .fetch_optional(tx.connection())
    .await?;
    Ok(locked.is_some())
}

/// Moves the tip: forward by a compression, back by its undo.
pub async fn update_tip(tx: &mut TenantTx, id: SessionId, tip: SessionId) -> Result<()> {
    sqlx::query(
        "update conversations
            set tip_session_id = $3
          where tenant_id = $1
            and id = $2",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .bind(tip)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// The filter of a list of sessions.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    pub user_id: Option<UserId>,
    pub slot_id: Option<SlotId>,
    pub agent: Option<String>,
    pub state: Option<SessionState>,
    pub archived: Option<bool>,
}

/// A list over `$from`, which selects the rows; the conditions filter them.
macro_rules! list_from {
    ($from:literal) => {
        concat!(
            "select ",
            session_columns!(),
            ", exists (select 1
                         from slots l
                        where l.tenant_id = $1
                          and l.conversation_id = c.id
                          and ($3::uuid is null or l.id = $3)) as current
               from ",
            $from,
            " join sessions s
                on s.tenant_id = $1
               and s.id = c.tip_session_id ",
            join_origin!(),
            " left join slots home
                on home.tenant_id = $1
               and home.id = c.slot_id
             where c.tenant_id = $1
               and c.deleted_at is null
               and ($4::uuid is null or c.user_id = $4)
               and ($5::text is null or c.agent = $5)
               and ($6::text is null or s.state = $6)
               and ($7::boolean is null or c.archived = $7)
               and (not $8 or (c.user_id is null and coalesce(home.key not like 'agent:%', true)))
               and ($9::uuid is null or c.tip_session_id < $9)
             order by c.tip_session_id desc
             limit $10"
        )
    };
}

const LIST_ALL: &str = list_from!("conversations c");
const LIST_OF_USER: &str = list_from!(
    "(select *
        from conversations
       where tenant_id = $1
         and user_id = $4) c"
);
const LIST_WITHOUT_USER: &str = list_from!(
    "(select *
        from conversations
       where tenant_id = $1
         and user_id is null) c"
);
const LIST_OF_SLOT: &str = list_from!(
    "(select k.*
        from slot_conversations m
        join conversations k
          on k.tenant_id = $1
         and k.id = m.conversation_id
       where m.tenant_id = $1
         and m.slot_id = $3) c"
);

/// The tips that `access` may see, newest first. With a slot as filter, `current` refers to that slot.
pub async fn list(
    tx: &mut TenantTx,
    access: &Access,
    filter: &Filter,
    page: &PageRequest<SessionId>,
) -> Result<Page<Session, SessionId>> {
    let (user_id, service_only) = match access.visibility {
        Visibility::Tenant => (filter.user_id, false),
        Visibility::Service => (filter.user_id, true),
        Visibility::User(own) => (Some(own), false),
    };
    let sql = match (filter.slot_id, user_id) {
        (Some(_), _) => LIST_OF_SLOT,
        (None, Some(_)) => LIST_OF_USER,
        (None, None) if service_only => LIST_WITHOUT_USER,
        (None, None) => LIST_ALL,
    };
    let rows: Vec<SessionRow> = sqlx::query_as(sql)
        .bind(tx.tenant_id())
        .bind(access.namespace.as_uuid())
        .bind(filter.slot_id)
        .bind(user_id)
        .bind(&filter.agent)
        .bind(filter.state.map(SessionState::as_str))
        .bind(filter.archived)
        .bind(service_only)
        .bind(page.after)
        .bind(page.fetch_limit())
        .fetch_all(tx.connection())
        .await?;
    let sessions = rows.into_iter().map(|row| row.0).collect();
    Ok(Page::cut(sessions, page, |session: &Session| session.id))
}

/// Changes of a conversation; `None` keeps a column.
#[derive(Debug, Clone, Default)]
pub struct Change {
    /// `Some(None)` removes the title.
    pub title: Option<Option<String>>,
    pub archived: Option<bool>,
    pub pinned: Option<bool>,
}

pub async fn update(tx: &mut TenantTx, id: SessionId, change: &Change) -> Result<()> {
    sqlx::query(
        "update conversations
            set title = case when $3 then $4 else title end,
                archived = coalesce($5, archived),
                pinned = coalesce($6, pinned)
          where tenant_id = $1
            and id = $2",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .bind(change.title.is_some())
    .bind(change.title.clone().flatten())
    .bind(change.archived)
    .bind(change.pinned)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Marks conversations as deleted, for all users at once: no slot points to them any more, and a job deletes their
/// rows. Their tips end as if undone: an append that waits for one is then refused instead of acknowledged and
/// lost. Returns those that were not deleted before.
pub async fn update_deleted(
    tx: &mut TenantTx,
    ids: &[SessionId],
    now: DateTime<Utc>,
) -> Result<Vec<SessionId>> {
    Ok(sqlx::query_scalar(
        "with deleted as (
           update conversations
              set deleted_at = $3
            where tenant_id = $1
              and id = any ($2)
              and deleted_at is null
        returning id, tip_session_id
         ), freed as (
           update slots k
              set conversation_id = null, generation = k.generation + 1
             from deleted
            where k.tenant_id = $1
              and k.conversation_id = deleted.id
         ), closed as (
           update sessions s
              set state = 'ended', end_reason = 'uncompressed', ended_at = $3, undone_at = $3
             from deleted
            where s.tenant_id = $1
              and s.id = deleted.tip_session_id
         )
         select id
           from deleted",
    )
    .bind(tx.tenant_id())
    .bind(ids)
    .bind(now)
    .fetch_all(tx.connection())
    .await?)
}

/// Stores for ever that client ids were used.
pub async fn insert_spent_ids(tx: &mut TenantTx, digests: &[[u8; 32]]) -> Result<()> {
    let digests: Vec<&[u8]> = digests.iter().map(<[u8; 32]>::as_slice).collect();
    sqlx::query(
        "insert into spent_session_ids (tenant_id, digest)
         select $1, digest
           from unnest($2::bytea[]) as digest
             on conflict on constraint spent_session_ids_pkey do nothing",
    )
    .bind(tx.tenant_id())
    .bind(digests)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// The first `limit` deleted conversations whose rows still exist.
pub async fn list_deleted(tx: &mut TenantTx, limit: i64) -> Result<Vec<SessionId>> {
    Ok(sqlx::query_scalar(
        "select id
           from conversations
          where tenant_id = $1
            and deleted_at is not null
          order by id
          limit $2",
    )
    .bind(tx.tenant_id())
    .bind(limit)
    .fetch_all(tx.connection())
    .await?)
}

/// The parts of a deleted conversation: each is removed in batches, the conversation last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    Messages,
    Events,
    Turns,
    Conversation,
}

impl Part {
    pub const ALL: [Self; 4] = [
        Self::Messages,
        Self::Events,
        Self::Turns,
        Self::Conversation,
    ];

    /// Public for the test that reads its plan.
    pub fn delete_sql(self) -> &'static str {
        match self {
            Self::Messages => {
                "delete from messages
                  where tenant_id = $1
                    and (session_id, seq) in (select m.session_id, m.seq
                                                from sessions s
                                                join messages m
                                                  on m.tenant_id = $1
                                                 and m.session_id = s.id
                                               where s.tenant_id = $1
                                                 and s.conversation_id = any ($2)
                                               order by m.session_id, m.seq
                                               limit $3)"
            }
            Self::Events => {
                "delete from events
                  where tenant_id = $1
                    and (conversation_id, seq) in (select conversation_id, seq
                                                     from events
                                                    where tenant_id = $1
                                                      and conversation_id = any ($2)
                                                    order by conversation_id, seq
                                                    limit $3)"
            }
            Self::Turns => {
                "delete from turns
                  where tenant_id = $1
                    and id in (select id
                                 from turns
                                where tenant_id = $1
                                  and conversation_id = any ($2)
                                order by id
                                limit $3)"
            }
            // The few rows that refer to it go with it.
            Self::Conversation => {
                "delete from conversations
                  where tenant_id = $1
                    and deleted_at is not null
                    and id in (select id
                                 from unnest($2::uuid[]) as id
                                order by id
                                limit $3)"
            }
        }
    }
}

/// Deletes up to `limit` rows of a part of deleted conversations. Returns their number.
pub async fn delete_part(
    tx: &mut TenantTx,
    part: Part,
    deleted: &[SessionId],
    limit: i64,
) -> Result<u64> {
    let done = sqlx::query(part.delete_sql())
        .bind(tx.tenant_id())
        .bind(deleted)
        .bind(limit)
        .execute(tx.connection())
        .await?;
    Ok(done.rows_affected())
}
