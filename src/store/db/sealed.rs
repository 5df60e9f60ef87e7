//! What is sealed or signed with a secret key, and with which: for counting, and for resealing. A key is named
//! by the four bytes after the first of a sealed value. Pages have an end, so that no statement takes long.

use super::idempotency::RequestName;
use crate::crypto::{KeyId, Mac};
use crate::error::Result;
use crate::ids::IdentityId;
use crate::store::{Db, TenantTx};

/// How often one place of one kind names a key.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct KeyUse {
    pub place: String,
    pub key_id: Vec<u8>,
    pub rows: i64,
}

/// Of all tenants, by the definer function: cheap, and of what is much only a sample.
pub async fn list_in_use(db: &Db, sample: i32) -> Result<Vec<KeyUse>> {
    Ok(
        sqlx::query_as("select place, key_id, rows from secret_keys_in_use($1)")
            .bind(sample)
            .fetch_all(db.connection().await?.limited())
            .await?,
    )
}

/// Of the tenant's agents, issuers, audit head and pending links, of which it has few.
pub async fn list_few(tx: &mut TenantTx) -> Result<Vec<KeyUse>> {
    Ok(sqlx::query_as(
        "select 'agents' as place, substring(api_key_enc from 2 for 4) as key_id, count(*) as rows
           from agents
          where tenant_id = $1
            and api_key_enc is not null
          group by 2
          union all
         select 'issuers', substring(secret_enc from 2 for 4), count(*)
           from issuers
          where tenant_id = $1
            and secret_enc is not null
          group by 2
          union all
         select 'pending_links', substring(code_enc from 2 for 4), count(*)
           from pending_links
          where tenant_id = $1
          group by 2
          union all
         select 'audit_heads', key_id, 1
           from audit_heads
          where tenant_id = $1",
    )
    .bind(tx.tenant_id())
    .fetch_all(tx.connection())
    .await?)
}

/// Of a page of the tenant's audit: by key how many of its entries, and the last of them.
pub async fn list_entry_keys(
    tx: &mut TenantTx,
    after: i64,
    limit: i64,
) -> Result<Vec<(Vec<u8>, i64, i64)>> {
    Ok(sqlx::query_as(
        "select key_id, count(*), max(seq)
           from (select key_id, seq
                   from audit
                  where tenant_id = $1
                    and seq > $2
                  order by seq
                  limit $3) page
          group by key_id",
    )
    .bind(tx.tenant_id())
    .bind(after)
    .bind(limit)
    .fetch_all(tx.connection())
    .await?)
}

#[derive(Debug, sqlx::FromRow)]
pub struct AnswerKeys {
    principal: String,
    route: String,
    key: String,
    /// Of the answer, and of the secrets in it.
    pub answer: Option<Vec<u8>>,
    pub secrets: Option<Vec<u8>>,
}

impl AnswerKeys {
    pub fn into_name(self) -> RequestName {
        RequestName {
            principal: self.principal,
            route: self.route,
            key: self.key,
        }
    }
}

/// Of a page of the tenant's stored answers.
pub async fn list_answer_keys(
    tx: &mut TenantTx,
    after: Option<&RequestName>,
    limit: i64,
) -> Result<Vec<AnswerKeys>> {
    let text = |part: fn(&RequestName) -> &str| after.map_or("", part);
    Ok(sqlx::query_as(
        "select principal, route, key, substring(answer_enc from 2 for 4) as answer,
                substring(secrets_enc from 2 for 4) as secrets
           from idempotency
          where tenant_id = $1
            and (principal, route, key) > ($2, $3, $4)
          order by principal, route, key
          limit $5",
    )
    .bind(tx.tenant_id())
    .bind(text(|name| &name.principal))
    .bind(text(|name| &name.route))
    .bind(text(|name| &name.key))
    .bind(limit)
    .fetch_all(tx.connection())
    .await?)
}

/// The name of a receipt, and the key of its answer if it has one.
#[derive(Debug, sqlx::FromRow)]
pub struct ReceiptKey {
    pub platform: String,
    pub scope: String,
    pub chat_ref: String,
    pub identity_id: IdentityId,
    pub message_id: String,
    pub answer: Option<Vec<u8>>,
}

/// A page of the tenant's receipts.
pub async fn list_receipt_keys(
    tx: &mut TenantTx,
    after: Option<&ReceiptKey>,
    limit: i64,
) -> Result<Vec<ReceiptKey>> {
    let text = |part: fn(&ReceiptKey) -> &str| after.map_or("", part);
    let identity = after.map_or(sqlx::types::Uuid::nil(), |after| {
        after.identity_id.as_uuid()
    });
    Ok(sqlx::query_as(
        "select platform, scope, chat_ref, identity_id, message_id, substring(answer_enc from 2 for 4) as answer
           from inbound_receipts
          where tenant_id = $1
            and (platform, scope, chat_ref, identity_id, message_id) > ($2, $3, $4, $5, $6)
          order by platform, scope, chat_ref, identity_id, message_id
          limit $7",
    )
    .bind(tx.tenant_id())
    .bind(text(|name| &name.platform))
    .bind(text(|name| &name.scope))
    .bind(text(|name| &name.chat_ref))
    .bind(identity)
    .bind(text(|name| &name.message_id))
    .bind(limit)
    .fetch_all(tx.connection())
    .await?)
}

/// Agents after `after` whose key another than `key_id` sealed: their names and sealed keys.
pub async fn list_agents(
    tx: &mut TenantTx,
    key_id: KeyId,
    after: &str,
    limit: i64,
) -> Result<Vec<(String, Vec<u8>)>> {
    Ok(sqlx::query_as(
        "select name, api_key_enc
           from agents
          where tenant_id = $1
            and substring(api_key_enc from 2 for 4) <> $2
            and name > $3
          order by name
          limit $4",
    )
    .bind(tx.tenant_id())
    .bind(key_id.as_slice())
    .bind(after)
    .bind(limit)
    .fetch_all(tx.connection())
    .await?)
}

/// The same of issuers and their secrets.
pub async fn list_issuers(
    tx: &mut TenantTx,
    key_id: KeyId,
    after: &str,
    limit: i64,
) -> Result<Vec<(String, Vec<u8>)>> {
    Ok(sqlx::query_as(
        "select name, secret_enc
           from issuers
          where tenant_id = $1
            and substring(secret_enc from 2 for 4) <> $2
            and name > $3
          order by name
          limit $4",
    )
    .bind(tx.tenant_id())
    .bind(key_id.as_slice())
    .bind(after)
    .bind(limit)
    .fetch_all(tx.connection())
    .await?)
}

/// False if somebody has put another key since `old` was read.
pub async fn replace_agent_key(
    tx: &mut TenantTx,
    name: &str,
    old: &[u8],
    new: &[u8],
) -> Result<bool> {
    let done = sqlx::query(
        "update agents
            set api_key_enc = $4
          where tenant_id = $1
            and name = $2
            and api_key_enc = $3",
    )
    .bind(tx.tenant_id())
    .bind(name)
    .bind(old)
    .bind(new)
    .execute(tx.connection())
    .await?;
    Ok(done.rows_affected() == 1)
}

/// The same of an issuer's secret.
pub async fn replace_issuer_secret(
    tx: &mut TenantTx,
    name: &str,
    old: &[u8],
    new: &[u8],
) -> Result<bool> {
    let done = sqlx::query(
        "update issuers
            set secret_enc = $4
          where tenant_id = $1
            and name = $2
            and secret_enc = $3",
    )
    .bind(tx.tenant_id())
    .bind(name)
    .bind(old)
    .bind(new)
    .execute(tx.connection())
    .await?;
    Ok(done.rows_affected() == 1)
}

pub async fn find_receipt(tx: &mut TenantTx, name: &ReceiptKey) -> Result<Option<Vec<u8>>> {
    let found: Option<Option<Vec<u8>>> = sqlx::query_scalar(
        "select answer_enc
           from inbound_receipts
          where tenant_id = $1
            and platform = $2
            and scope = $3
            and chat_ref = $4
            and identity_id = $5
            and message_id = $6",
    )
    .bind(tx.tenant_id())
    .bind(&name.platform)
    .bind(&name.scope)
    .bind(&name.chat_ref)
    .bind(name.identity_id)
    .bind(&name.message_id)
    .fetch_optional(tx.connection())
    .await?;
    Ok(found.flatten())
}

pub async fn replace_receipt(
    tx: &mut TenantTx,
    name: &ReceiptKey,
    old: &[u8],
    new: &[u8],
) -> Result<bool> {
    let done = sqlx::query(
        "update inbound_receipts
            set answer_enc = $8
          where tenant_id = $1
            and platform = $2
            and scope = $3
            and chat_ref = $4
            and identity_id = $5
            and message_id = $6
            and answer_enc = $7",
    )
    .bind(tx.tenant_id())
    .bind(&name.platform)
    .bind(&name.scope)
    .bind(&name.chat_ref)
    .bind(name.identity_id)
    .bind(&name.message_id)
    .bind(old)
    .bind(new)
    .execute(tx.connection())
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Replaces the signature of the tenant's audit head, which `tx` has locked.
pub async fn replace_head_mac(tx: &mut TenantTx, mac: &Mac) -> Result<()> {
    sqlx::query(
        "update audit_heads
            set key_id = $2, mac = $3
          where tenant_id = $1",
    )
    .bind(tx.tenant_id())
    .bind(mac.key_id.as_slice())
    .bind(mac.tag.as_slice())
    .execute(tx.connection())
    .await?;
    Ok(())
}
