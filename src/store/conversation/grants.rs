//! Grants: other users who can or could read a conversation.

use chrono::{DateTime, Utc};

use crate::domain::conversation::grant::{Grant, GrantVia};
use crate::domain::values::paging::{Page, PageRequest, Position};
use crate::error::{Error, Result};
use crate::ids::{SessionId, UserId};
use crate::store::TenantTx;

#[derive(sqlx::FromRow)]
struct Row {
    user_id: UserId,
    via: String,
    created_at: DateTime<Utc>,
    expires_at: DateTime<Utc>,
    revoked_at: Option<DateTime<Utc>>,
}

impl TryFrom<Row> for Grant {
    type Error = Error;

    fn try_from(row: Row) -> Result<Self> {
        Ok(Self {
            user_id: row.user_id,
            via: GrantVia::from_column(&row.via)?,
            created_at: row.created_at,
            expires_at: row.expires_at,
            revoked_at: row.revoked_at,
        })
    }
}

/// Newest first, expired and revoked grants included.
pub async fn list(
    tx: &mut TenantTx,
    conversation_id: SessionId,
    page: &PageRequest,
) -> Result<Page<Grant>> {
    let rows = sqlx::query_as::<_, Row>(
        "select user_id, via, created_at, expires_at, revoked_at
           from conversation_grants
          where tenant_id = $1
            and conversation_id = $2
            and ($3::timestamptz is null or (created_at, user_id) < ($3, $4))
          order by created_at desc, user_id desc
          limit $5",
    )
    .bind(tx.tenant_id())
    .bind(conversation_id)
    .bind(page.after.map(|after| after.created_at))
    .bind(page.after.map(|after| after.id))
    .bind(page.fetch_limit())
    .fetch_all(tx.connection())
    .await?;
    let grants = rows
        .into_iter()
        .map(Grant::try_from)
        .collect::<Result<Vec<_>>>()?;
    Ok(Page::cut(grants, page, |grant| Position {
        created_at: grant.created_at,
        id: grant.user_id.as_uuid(),
    }))
}

/// Revokes the grant of one user, or all grants. Returns the users whose grants this call revoked. The caller must
/// have locked the conversation.
pub async fn update_revoked(
    tx: &mut TenantTx,
    conversation_id: SessionId,
    user_id: Option<UserId>,
    now: DateTime<Utc>,
) -> Result<Vec<UserId>> {
    let mut revoked: Vec<UserId> = sqlx::query_scalar(
        "update conversation_grants
            set revoked_at = $4
          where tenant_id = $1
            and conversation_id = $2
            and ($3::uuid is null or user_id = $3)
            and revoked_at is null
      returning user_id",
    )
    .bind(tx.tenant_id())
    .bind(conversation_id)
    .bind(user_id)
    .bind(now)
    .fetch_all(tx.connection())
    .await?;
    revoked.sort_unstable();
    Ok(revoked)
}
