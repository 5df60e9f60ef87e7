//! Sweeps: how far one has come, and which conversations are old. What somebody else holds is in use: it
//! is passed over and never waited for, so a sweep holds nobody up and meets no deadlock.

use chrono::{DateTime, Utc};
use sqlx::postgres::PgRow;
use sqlx::types::{Json, Uuid};
use sqlx::{FromRow, Row};

use crate::domain::conversation::session::ConversationHandle;
use crate::domain::tenant::TenantSettings;
use crate::domain::tenant::retention::Sweep;
use crate::error::Result;
use crate::ids::{SessionId, SlotId};
use crate::store::TenantTx;
use crate::store::conversation::tips::read_name;

impl FromRow<'_, PgRow> for Sweep {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self {
            cutoff: row.try_get("cutoff")?,
            started_at: row.try_get("started_at")?,
            finished_at: row.try_get("finished_at")?,
            reached: row.try_get("reached")?,
            examined: row.try_get("examined")?,
            deleted: row.try_get("deleted")?,
        })
    }
}

/// For how many days the tenant keeps conversations, which nobody changes until `tx` ends. `None`: for
/// ever, or the tenant is going as a whole.
pub async fn lock_days(tx: &mut TenantTx) -> Result<Option<u32>> {
    let settings: Option<Json<TenantSettings>> = sqlx::query_scalar(
        "select settings
           from tenants
          where id = $1
            and state in ('active', 'suspended')
            for share",
    )
    .bind(tx.tenant_id())
    .fetch_optional(tx.connection())
    .await?;
    Ok(settings.and_then(|Json(settings)| settings.retention.conversations_days))
}

pub async fn find_sweep(tx: &mut TenantTx) -> Result<Option<Sweep>> {
    Ok(sqlx::query_as(
        "select cutoff, started_at, finished_at, reached, examined, deleted
           from retention_sweeps
          where tenant_id = $1",
    )
    .bind(tx.tenant_id())
    .fetch_optional(tx.connection())
    .await?)
}

/// The sweep that runs, held until `tx` ends: two nodes take their steps one after the other.
pub async fn lock_running(tx: &mut TenantTx) -> Result<Option<Sweep>> {
    Ok(sqlx::query_as(
        "select cutoff, started_at, finished_at, reached, examined, deleted
           from retention_sweeps
          where tenant_id = $1
            and finished_at is null
            for no key update",
    )
    .bind(tx.tenant_id())
    .fetch_optional(tx.connection())
    .await?)
}

/// Begins a sweep in the place of the last one, unless one runs.
pub async fn start_sweep(
    tx: &mut TenantTx,
    cutoff: DateTime<Utc>,
    now: DateTime<Utc>,
) -> Result<()> {
    sqlx::query(
        "insert into retention_sweeps as s (tenant_id, cutoff, started_at)
         values ($1, $2, $3)
             on conflict on constraint retention_sweeps_pkey do update
            set cutoff = excluded.cutoff, started_at = excluded.started_at, finished_at = null,
                reached = null, examined = 0, deleted = 0
          where s.tenant_id = $1
            and s.finished_at is not null",
    )
    .bind(tx.tenant_id())
    .bind(cutoff)
    .bind(now)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Stores how far a held sweep has come.
pub async fn update_sweep(tx: &mut TenantTx, sweep: &Sweep) -> Result<()> {
    sqlx::query(
        "update retention_sweeps
            set finished_at = $2, reached = $3, examined = $4, deleted = $5
          where tenant_id = $1",
    )
    .bind(tx.tenant_id())
    .bind(sweep.finished_at)
    .bind(sweep.reached)
    .bind(sweep.examined)
    .bind(sweep.deleted)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Up to `limit` conversations after `reached`, in the order of their ids, and whether each looks old.
/// Nothing is held yet: before one is deleted, `lock_old` judges again.
pub async fn list_conversations(
    tx: &mut TenantTx,
    reached: Option<SessionId>,
    cutoff: DateTime<Utc>,
    limit: i64,
) -> Result<Vec<(SessionId, bool)>> {
    Ok(sqlx::query_as(
        "select c.id, s.last_active_at < $3
           from conversations c
           join sessions s
             on s.tenant_id = $1
            and s.id = c.tip_session_id
          where c.tenant_id = $1
            and c.id > $2
            and c.deleted_at is null
          order by c.id
          limit $4",
    )
    .bind(tx.tenant_id())
    .bind(reached.map_or(Uuid::nil(), |id| id.as_uuid()))
    .bind(cutoff)
    .bind(limit)
    .fetch_all(tx.connection())
    .await?)
}

/// Holds those of `ids` that are old and in nobody's hands, with their tips, until `tx` ends. An append
/// takes its place in the tip's row, so who holds that row decides: one that was quicker is seen here.
pub async fn lock_old(
    tx: &mut TenantTx,
    ids: &[SessionId],
    cutoff: DateTime<Utc>,
) -> Result<Vec<ConversationHandle>> {
    let rows = sqlx::query(
        "select c.id as conversation_id, c.namespace, c.client_id, c.user_id, false as hidden
           from conversations c
           join sessions s
             on s.tenant_id = $1
            and s.id = c.tip_session_id
          where c.tenant_id = $1
            and c.id = any ($2)
            and c.deleted_at is null
            and s.last_active_at < $3
          order by c.id
            for no key update skip locked",
    )
    .bind(tx.tenant_id())
    .bind(ids)
    .bind(cutoff)
    .fetch_all(tx.connection())
    .await?;
    rows.iter().map(read_name).collect()
}

/// Holds the slots that lead to `ids`, which are held, and answers those of `ids` to which a slot leads
/// that is in somebody else's hands.
pub async fn lock_slots(tx: &mut TenantTx, ids: &[SessionId]) -> Result<Vec<SessionId>> {
    let held: Vec<SlotId> = sqlx::query_scalar(
        "select id
           from slots
          where tenant_id = $1
            and conversation_id = any ($2)
          order by id
            for no key update skip locked",
    )
    .bind(tx.tenant_id())
    .bind(ids)
    .fetch_all(tx.connection())
    .await?;
    // No slot can begin to lead to a held conversation: who moves one there must hold it, too.
    Ok(sqlx::query_scalar(
        "select distinct conversation_id
           from slots
          where tenant_id = $1
            and conversation_id = any ($2)
            and id <> all ($3)",
    )
    .bind(tx.tenant_id())
    .bind(ids)
    .bind(held)
    .fetch_all(tx.connection())
    .await?)
}

/// How much is old.
#[derive(Debug, Clone, Copy, PartialEq, Eq, sqlx::FromRow)]
pub struct Old {
    pub conversations: i64,
    /// Each once: copies that compression made are not counted.
    pub messages: i64,
}

pub async fn count_old(tx: &mut TenantTx, cutoff: DateTime<Utc>) -> Result<Old> {
    Ok(sqlx::query_as(
        "with old as (
           select c.id
             from conversations c
             join sessions s
               on s.tenant_id = $1
              and s.id = c.tip_session_id
            where c.tenant_id = $1
              and c.deleted_at is null
              and s.last_active_at < $2
         )
         select (select count(*) from old) as conversations,
                (select coalesce(sum(s.message_count), 0)::bigint
                   from old
                   join sessions s
                     on s.tenant_id = $1
                    and s.conversation_id = old.id
                    and s.undone_at is null) as messages",
    )
    .bind(tx.tenant_id())
    .bind(cutoff)
    .fetch_one(tx.connection())
    .await?)
}
