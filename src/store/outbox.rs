//! The outbox: what bridges must say on their platforms, written in the transaction of its cause.

use chrono::{DateTime, Utc};
use serde_json::json;

use super::TenantTx;
use crate::domain::user::Identity;
use crate::error::Result;
use crate::ids::DeliveryId;

/// Writes a notice of kind `security` to the own chat of each account. Chats are taken in one order, so
/// that whoever writes to several at once never waits in a circle.
pub async fn insert_security(
    tx: &mut TenantTx,
    to: &[Identity],
    text: &str,
    now: DateTime<Utc>,
) -> Result<()> {
    let mut chats: Vec<(&str, &str, String, &Identity)> = to
        .iter()
        .map(|identity| {
            let platform = identity.name.platform();
            let chat_ref = format!("dm:{}", identity.name.external_id());
            (
                platform.platform(),
                platform.scope().unwrap_or_default(),
                chat_ref,
                identity,
            )
        })
        .collect();
    chats.sort_by(|a, b| (a.0, a.1, &a.2).cmp(&(b.0, b.1, &b.2)));
    for (platform, scope, chat_ref, identity) in chats {
        let seq: i64 = sqlx::query_scalar(
            "insert into chats as c (tenant_id, platform, scope, chat_ref, next_seq)
             values ($1, $2, $3, $4, 2)
                 on conflict on constraint chats_pkey do update
                set next_seq = c.next_seq + 1
          returning next_seq - 1",
        )
        .bind(tx.tenant_id())
        .bind(platform)
        .bind(scope)
        .bind(&chat_ref)
        .fetch_one(tx.connection())
        .await?;
        sqlx::query(
            "insert into deliveries (tenant_id, id, platform, scope, chat_ref, seq, kind, identity_id, payload,
                                     visible_at, created_at)
             values ($1, $2, $3, $4, $5, $6, 'security', $7, $8, $9, $9)",
        )
        .bind(tx.tenant_id())
        .bind(DeliveryId::generate())
        .bind(platform)
        .bind(scope)
        .bind(&chat_ref)
        .bind(seq)
        .bind(identity.id)
        .bind(json!({ "text": text }))
        .bind(now)
        .execute(tx.connection())
        .await?;
    }
    Ok(())
}
