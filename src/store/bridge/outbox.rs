//! The outbox: what bridges must say on their platforms, written in the transaction of its cause.

use chrono::{DateTime, Utc};
use serde_json::json;

use sqlx::types::Json;

use crate::domain::bridge::chat::Chat;
use crate::domain::bridge::delivery::{Address, DeliveryKind, NewDelivery};
use crate::domain::people::user::Identity;
use crate::error::Result;
use crate::ids::{DeliveryId, IdentityId};
use crate::store::TenantTx;

/// Writes a notice of kind `security` to the direct chat of each identity. Chats are locked in one order, so that
/// two transactions that write to several never wait for each other.
pub async fn insert_security(
    tx: &mut TenantTx,
    to: &[Identity],
    text: &str,
    now: DateTime<Utc>,
) -> Result<()> {
    let address_of = |identity: &Identity| Address::of(&Chat::DM, &identity.name);
    let mut notices: Vec<(Address, IdentityId)> = to
        .iter()
        .map(|identity| (address_of(identity), identity.id))
        .collect();
    notices.sort_by(|(a, _), (b, _)| {
        (&a.platform, &a.scope, &a.chat_ref).cmp(&(&b.platform, &b.scope, &b.chat_ref))
    });
    for (address, identity_id) in notices {
        let delivery = NewDelivery {
            kind: DeliveryKind::Security,
            address: &address,
            identity_id: Some(identity_id),
            text,
            turn_id: None,
            session_id: None,
            conversation_id: None,
            in_reply_to: None,
        };
        insert(tx, &delivery, now).await?;
    }
    Ok(())
}

/// Public for the bench that runs it beside the service.
pub const INSERT: &str = "with place as (
       insert into chats as c (tenant_id, platform, scope, chat_ref, chat, next_seq, due_at)
       values ($1, $3, $4, $5, $6, 2, now())
           on conflict on constraint chats_pkey do update
          set next_seq = c.next_seq + 1, due_at = least(c.due_at, excluded.due_at),
              chat = case when c.chat is null or excluded.chat ? 'id' then excluded.chat else c.chat end
    returning next_seq - 1 as seq
     )
     insert into deliveries (tenant_id, id, platform, scope, chat_ref, seq, kind, identity_id, payload, turn_id,
                             session_id, conversation_id, in_reply_to, visible_at, created_at)
     select $1, $2, $3, $4, $5, place.seq, $7, $8, $9, $10, $11, $12, $13, now(), $14
       from place
         on conflict (tenant_id, turn_id, kind) where turn_id is not null do nothing";

/// Writes a delivery at the end of its chat. The chat's row gives it its number, and is held until `tx` ends:
/// so the order of deliveries is that of commits. A turn's second delivery of a kind is not written.
pub async fn insert(
    tx: &mut TenantTx,
    delivery: &NewDelivery<'_>,
    now: DateTime<Utc>,
) -> Result<()> {
    let address = delivery.address;
    sqlx::query(INSERT)
        .bind(tx.tenant_id())
        .bind(DeliveryId::generate())
        .bind(&address.platform)
        .bind(&address.scope)
        .bind(&address.chat_ref)
        .bind(Json(&address.chat))
        .bind(delivery.kind.as_str())
        .bind(delivery.identity_id)
        .bind(json!({ "text": delivery.text }))
        .bind(delivery.turn_id)
        .bind(delivery.session_id)
        .bind(delivery.conversation_id)
        .bind(delivery.in_reply_to)
        .bind(now)
        .execute(tx.connection())
        .await?;
    tx.notify_deliveries();
    Ok(())
}

/// Locks the chats in which something is pending or leased for these identities, before it is cancelled.
pub async fn lock_chats(tx: &mut TenantTx, identities: &[IdentityId]) -> Result<()> {
    sqlx::query(
        "select c.chat_ref
           from chats c
          where c.tenant_id = $1
            and (c.platform, c.scope, c.chat_ref) in (select d.platform, d.scope, d.chat_ref
                                                        from deliveries d
                                                       where d.tenant_id = $1
                                                         and d.identity_id = any ($2)
                                                         and d.state in ('pending', 'leased'))
          order by c.platform, c.scope, c.chat_ref
            for no key update",
    )
    .bind(tx.tenant_id())
    .bind(identities)
    .execute(tx.connection())
    .await?;
    Ok(())
}
