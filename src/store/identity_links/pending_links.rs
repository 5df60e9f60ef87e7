//! Links that wait for confirmation in a chat.

use chrono::{DateTime, Utc};

use crate::error::Result;
use crate::ids::IdentityId;
use crate::store::TenantTx;

/// Stores a sealed code for an identity. It replaces an older one.
pub async fn upsert(
    tx: &mut TenantTx,
    identity_id: IdentityId,
    code_enc: &[u8],
    expires_at: DateTime<Utc>,
) -> Result<()> {
    sqlx::query(
        "insert into pending_links (tenant_id, identity_id, code_enc, expires_at)
         values ($1, $2, $3, $4)
             on conflict on constraint pending_links_pkey do update
            set code_enc = excluded.code_enc, expires_at = excluded.expires_at",
    )
    .bind(tx.tenant_id())
    .bind(identity_id)
    .bind(code_enc)
    .bind(expires_at)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Deletes the pending link and returns its sealed code, unless it has expired.
pub async fn claim(
    tx: &mut TenantTx,
    identity_id: IdentityId,
    now: DateTime<Utc>,
) -> Result<Option<Vec<u8>>> {
    let deleted: Option<(Vec<u8>, DateTime<Utc>)> = sqlx::query_as(
        "delete from pending_links
          where tenant_id = $1
            and identity_id = $2
      returning code_enc, expires_at",
    )
    .bind(tx.tenant_id())
    .bind(identity_id)
    .fetch_optional(tx.connection())
    .await?;
    let valid = deleted.filter(|(_, expires_at)| *expires_at > now);
    Ok(valid.map(|(code, _)| code))
}
