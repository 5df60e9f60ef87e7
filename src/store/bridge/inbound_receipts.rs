//! Receipts of messages of platforms: each is written once, in the transaction of the message's result.

use chrono::{DateTime, Utc};
use serde_json::Value;
use sqlx::types::Json;

use crate::domain::bridge::delivery::Address;
use crate::error::Result;
use crate::ids::{IdentityId, TenantId, TurnId};
use crate::store::TenantTx;

/// A message, as its platform names it.
#[derive(Debug, Clone, Copy)]
pub struct ReceiptName<'a> {
    pub address: &'a Address,
    /// Who sent it.
    pub identity_id: IdentityId,
    pub message_id: &'a str,
    /// When it was sent, as the bridge says.
    pub sent_at: Option<DateTime<Utc>>,
}

/// What binds a sealed answer to its receipt. `place` is platform, scope and chat.
pub fn seal_context(
    tenant_id: TenantId,
    place: [&str; 3],
    sender: IdentityId,
    message_id: &str,
) -> String {
    let [platform, scope, chat_ref] = place;
    format!("receipts/{tenant_id}/{platform}@{scope}/{chat_ref}/{sender}/{message_id}")
}

#[derive(Debug, sqlx::FromRow)]
pub struct Receipt {
    pub turn_id: Option<TurnId>,
    pub answer_enc: Option<Vec<u8>>,
}

/// Public, as `UPDATE` is, for the bench that runs them beside the service.
pub const CLAIM: &str =
    "insert into inbound_receipts as r (tenant_id, platform, scope, chat_ref, identity_id,
                                        message_id, sent_at, created_at)
     values ($1, $2, $3, $4, $5, $6, $9, $7)
         on conflict on constraint inbound_receipts_pkey do update
        set created_at = excluded.created_at, turn_id = null, answer_enc = null, edited = null
      where r.tenant_id = $1
        and r.created_at <= $8";

/// True if this transaction takes the message; a twin waits here until the first has committed.
pub async fn claim(
    tx: &mut TenantTx,
    name: ReceiptName<'_>,
    now: DateTime<Utc>,
    forgotten_before: DateTime<Utc>,
) -> Result<bool> {
    let claimed = sqlx::query(CLAIM)
        .bind(tx.tenant_id())
        .bind(&name.address.platform)
        .bind(&name.address.scope)
        .bind(&name.address.chat_ref)
        .bind(name.identity_id)
        .bind(name.message_id)
        .bind(now)
        .bind(forgotten_before)
        .bind(name.sent_at)
        .execute(tx.connection())
        .await?;
    Ok(claimed.rows_affected() == 1)
}

pub async fn find(tx: &mut TenantTx, name: ReceiptName<'_>) -> Result<Option<Receipt>> {
    Ok(sqlx::query_as(
        "select turn_id, answer_enc
           from inbound_receipts
          where tenant_id = $1
            and platform = $2
            and scope = $3
            and chat_ref = $4
            and identity_id = $5
            and message_id = $6",
    )
    .bind(tx.tenant_id())
    .bind(&name.address.platform)
    .bind(&name.address.scope)
    .bind(&name.address.chat_ref)
    .bind(name.identity_id)
    .bind(name.message_id)
    .fetch_optional(tx.connection())
    .await?)
}

pub const UPDATE: &str = "update inbound_receipts
        set turn_id = coalesce($7, turn_id), answer_enc = coalesce($8, answer_enc),
            edited = coalesce($9, edited)
      where tenant_id = $1
        and platform = $2
        and scope = $3
        and chat_ref = $4
        and identity_id = $5
        and message_id = $6";

/// Notes the result: a turn, or a command's answer; or what it was changed to.
pub async fn update(
    tx: &mut TenantTx,
    name: ReceiptName<'_>,
    turn_id: Option<TurnId>,
    answer_enc: Option<&[u8]>,
    edited: Option<&Value>,
) -> Result<()> {
    sqlx::query(UPDATE)
        .bind(tx.tenant_id())
        .bind(&name.address.platform)
        .bind(&name.address.scope)
        .bind(&name.address.chat_ref)
        .bind(name.identity_id)
        .bind(name.message_id)
        .bind(turn_id)
        .bind(answer_enc)
        .bind(edited.map(Json))
        .execute(tx.connection())
        .await?;
    Ok(())
}
