//! A tenant's audit: entries are inserted and read, and one row (the head) names the last entry.
//! Times are clamped on reading, so that an impossible time in a manipulated row is a wrong time and no panic.

use chrono::{DateTime, Utc};
use serde_json::Value;

use crate::crypto::Mac;
use crate::domain::tenant::audit::{Action, AuditEntry, AuditHead, AuditLink};
use crate::domain::values::paging::{Page, PageRequest};
use crate::error::Result;
use crate::store::TenantTx;

/// A head as stored, with its signature and the key of the signature.
#[derive(Debug, Clone)]
pub struct SignedHead {
    pub head: AuditHead,
    pub key_id: Vec<u8>,
    pub mac: Vec<u8>,
}

#[derive(sqlx::FromRow)]
struct HeadRow {
    seq: i64,
    hash: Vec<u8>,
    at: DateTime<Utc>,
    key_id: Vec<u8>,
    mac: Vec<u8>,
}

impl From<HeadRow> for SignedHead {
    fn from(row: HeadRow) -> Self {
        Self {
            head: AuditHead {
                seq: row.seq,
                hash: row.hash,
                at: row.at,
            },
            key_id: row.key_id,
            mac: row.mac,
        }
    }
}

/// An entry as read for the check of the chain.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct ChainRow {
    pub seq: i64,
    pub at: DateTime<Utc>,
    pub actor: String,
    pub action: String,
    pub target: Option<String>,
    /// As text: a manipulated value may not be readable as JSON.
    pub detail: String,
    pub key_id: Vec<u8>,
    pub prev_hash: Vec<u8>,
    pub hash: Vec<u8>,
}

#[derive(sqlx::FromRow)]
struct EntryRow {
    seq: i64,
    at: DateTime<Utc>,
    actor: String,
    action: String,
    target: Option<String>,
    detail: Value,
    hash: Vec<u8>,
}

impl From<EntryRow> for AuditEntry {
    fn from(row: EntryRow) -> Self {
        Self {
            seq: row.seq,
            at: row.at,
            actor: row.actor,
            action: row.action,
            target: row.target,
            detail: row.detail,
            hash: row.hash,
        }
    }
}

/// The filter of a list of entries.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    pub action: Option<Action>,
    pub actor: Option<String>,
}

pub async fn find_head(tx: &mut TenantTx) -> Result<Option<SignedHead>> {
    let row = sqlx::query_as::<_, HeadRow>(
        "select seq, hash, least(greatest(at, 'epoch'), '9999-12-31') as at, key_id, mac
           from audit_heads
          where tenant_id = $1",
    )
    .bind(tx.tenant_id())
    .fetch_optional(tx.connection())
    .await?;
    Ok(row.map(SignedHead::from))
}

/// Locks the head until `tx` ends. It is the last lock that a transaction takes.
pub async fn lock_head(tx: &mut TenantTx) -> Result<Option<SignedHead>> {
    let row = sqlx::query_as::<_, HeadRow>(
        "select seq, hash, least(greatest(at, 'epoch'), '9999-12-31') as at, key_id, mac
           from audit_heads
          where tenant_id = $1
            for update",
    )
    .bind(tx.tenant_id())
    .fetch_optional(tx.connection())
    .await?;
    Ok(row.map(SignedHead::from))
}

/// Starts a chain, unless another transaction has just started it.
pub async fn insert_head(tx: &mut TenantTx, head: &AuditHead, mac: &Mac) -> Result<()> {
    sqlx::query(
        "insert into audit_heads (tenant_id, seq, hash, at, key_id, mac)
         values ($1, $2, $3, $4, $5, $6)
             on conflict on constraint audit_heads_pkey do nothing",
    )
    .bind(tx.tenant_id())
    .bind(head.seq)
    .bind(&head.hash)
    .bind(head.at)
    .bind(mac.key_id.as_slice())
    .bind(mac.tag.as_slice())
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Inserts an entry and moves the head to it, in one round trip, since others wait for the head. `tx` must have
/// locked the head.
pub async fn insert(
    tx: &mut TenantTx,
    link: &AuditLink<'_>,
    hash: &Mac,
    head: &AuditHead,
    mac: &Mac,
) -> Result<()> {
    sqlx::query(
        "with entry as (
           insert into audit (tenant_id, seq, at, actor, action, target, detail, key_id, prev_hash, hash)
           values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
         )
         update audit_heads
            set seq = $11, hash = $12, at = $13, key_id = $14, mac = $15
          where tenant_id = $1",
    )
    .bind(link.tenant_id)
    .bind(link.seq)
    .bind(link.at)
    .bind(link.actor)
    .bind(link.action)
    .bind(link.target)
    .bind(link.detail)
    .bind(hash.key_id.as_slice())
    .bind(link.prev_hash)
    .bind(hash.tag.as_slice())
    .bind(head.seq)
    .bind(&head.hash)
    .bind(head.at)
    .bind(mac.key_id.as_slice())
    .bind(mac.tag.as_slice())
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Newest first.
pub async fn list(
    tx: &mut TenantTx,
    filter: &Filter,
    page: &PageRequest<i64>,
) -> Result<Page<AuditEntry, i64>> {
    let rows = sqlx::query_as::<_, EntryRow>(
        "select seq, least(greatest(at, 'epoch'), '9999-12-31') as at, actor, action, target, detail, hash
           from audit
          where tenant_id = $1
            and ($2::bigint is null or seq < $2)
            and ($3::text is null or action = $3)
            and ($4::text is null or actor = $4)
          order by seq desc
          limit $5",
    )
    .bind(tx.tenant_id())
    .bind(page.after)
    .bind(filter.action.map(Action::as_str))
    .bind(filter.actor.as_deref())
    .bind(page.fetch_limit())
    .fetch_all(tx.connection())
    .await?;
    let entries = rows.into_iter().map(AuditEntry::from).collect();
    Ok(Page::cut(entries, page, |entry| entry.seq))
}

/// Up to `limit` entries after the number `after`, oldest first, with every input of their hashes.
pub async fn list_chain(
    tx: &mut TenantTx,
    after: Option<i64>,
    limit: i64,
) -> Result<Vec<ChainRow>> {
    Ok(sqlx::query_as(
        "select seq, least(greatest(at, 'epoch'), '9999-12-31') as at, actor, action, target,
                detail::text as detail, key_id, prev_hash, hash
           from audit
          where tenant_id = $1
            and ($2::bigint is null or seq > $2)
          order by seq
          limit $3",
    )
    .bind(tx.tenant_id())
    .bind(after)
    .bind(limit)
    .fetch_all(tx.connection())
    .await?)
}
