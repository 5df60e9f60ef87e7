//! The history of identities that moved to another user: for counting merges, and for undoing an unlink.

use chrono::{DateTime, Utc};
use serde_json::Value;

use crate::domain::identity_links::{MoveKind, Unlink};
use crate::error::Result;
use crate::ids::{IdentityId, MoveId, UserId};
use crate::store::TenantTx;

pub struct NewMove {
    pub identity_id: IdentityId,
    pub from_user: UserId,
    pub to_user: UserId,
    pub kind: MoveKind,
    pub reason: Option<String>,
    /// The profile of the deleted user.
    pub profile: Option<Value>,
    pub undo_until: Option<DateTime<Utc>>,
}

pub async fn insert(tx: &mut TenantTx, change: &NewMove, now: DateTime<Utc>) -> Result<()> {
    sqlx::query(
        "insert into identity_moves (tenant_id, id, identity_id, from_user, to_user, kind, reason, profile,
                                     created_at, undo_until)
         values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
    )
    .bind(tx.tenant_id())
    .bind(MoveId::generate())
    .bind(change.identity_id)
    .bind(change.from_user)
    .bind(change.to_user)
    .bind(change.kind.as_str())
    .bind(&change.reason)
    .bind(&change.profile)
    .bind(now)
    .bind(change.undo_until)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// How many users were merged into `user_id` after `since`, in one of these ways.
pub async fn count_merges(
    tx: &mut TenantTx,
    user_id: UserId,
    kinds: &[MoveKind],
    since: DateTime<Utc>,
) -> Result<i64> {
    let kinds: Vec<&str> = kinds.iter().map(|kind| kind.as_str()).collect();
    Ok(sqlx::query_scalar(
        "select count(distinct from_user)
           from identity_moves
          where tenant_id = $1
            and to_user = $2
            and kind = any ($3)
            and created_at > $4",
    )
    .bind(tx.tenant_id())
    .bind(user_id)
    .bind(kinds)
    .bind(since)
    .fetch_one(tx.connection())
    .await?)
}

/// The latest unlink of an identity that can still be undone.
pub async fn find_unlink(
    tx: &mut TenantTx,
    identity_id: IdentityId,
    now: DateTime<Utc>,
) -> Result<Option<Unlink>> {
    let row: Option<(UserId, UserId, DateTime<Utc>)> = sqlx::query_as(
        "select from_user, to_user, undo_until
           from identity_moves
          where tenant_id = $1
            and identity_id = $2
            and kind = 'unlink'
            and undone_at is null
            and undo_until > $3
          order by created_at desc
          limit 1",
    )
    .bind(tx.tenant_id())
    .bind(identity_id)
    .bind(now)
    .fetch_optional(tx.connection())
    .await?;
    Ok(row.map(|(from_user, to_user, undo_until)| Unlink {
        identity_id,
        from_user,
        to_user,
        undo_until,
    }))
}

/// Records that the unlinks of an identity are undone.
pub async fn update_undone(
    tx: &mut TenantTx,
    identity_id: IdentityId,
    now: DateTime<Utc>,
) -> Result<()> {
    sqlx::query(
        "update identity_moves
            set undone_at = $3
          where tenant_id = $1
            and identity_id = $2
            and kind = 'unlink'
            and undone_at is null",
    )
    .bind(tx.tenant_id())
    .bind(identity_id)
    .bind(now)
    .execute(tx.connection())
    .await?;
    Ok(())
}
