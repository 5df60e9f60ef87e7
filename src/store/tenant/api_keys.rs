//! A tenant's API keys. The digest is written, and compared inside Postgres. It is never read.

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use sqlx::types::Uuid;

use super::tenants::TermsRow;
use crate::domain::people::platform::PlatformScope;
use crate::domain::tenant::TenantTerms;
use crate::domain::tenant::api_key::{ApiKey, NewApiKey, PresentedKey, Scope};
use crate::domain::values::paging::{Page, PageRequest, Position};
use crate::error::{Error, Result};
use crate::ids::{ApiKeyId, TenantId};
use crate::store::{Db, TenantTx};

#[derive(sqlx::FromRow)]
struct Row {
    id: ApiKeyId,
    name: String,
    scopes: Vec<String>,
    platforms: Vec<String>,
    created_at: DateTime<Utc>,
    expires_at: Option<DateTime<Utc>>,
    revoked_at: Option<DateTime<Utc>>,
    last_used_at: Option<DateTime<Utc>>,
}

impl TryFrom<Row> for ApiKey {
    type Error = Error;

    fn try_from(row: Row) -> Result<Self> {
        Ok(Self {
            id: row.id,
            name: row.name,
            scopes: parse_scopes(&row.scopes)?,
            platforms: parse_platforms(&row.platforms)?,
            created_at: row.created_at,
            expires_at: row.expires_at,
            revoked_at: row.revoked_at,
            last_used_at: row.last_used_at,
        })
    }
}

/// The result of the definer function for a key with the right digest.
#[derive(Debug, Clone)]
pub struct KeyMatch {
    pub tenant_id: TenantId,
    pub id: ApiKeyId,
    pub scopes: Vec<Scope>,
    pub platforms: Vec<PlatformScope>,
    pub expires_at: Option<DateTime<Utc>>,
    pub revoked_at: Option<DateTime<Utc>>,
    pub last_used_at: Option<DateTime<Utc>>,
    pub terms: TenantTerms,
}

#[derive(sqlx::FromRow)]
struct MatchRow {
    tenant_id: TenantId,
    id: ApiKeyId,
    scopes: Vec<String>,
    platforms: Vec<String>,
    expires_at: Option<DateTime<Utc>>,
    revoked_at: Option<DateTime<Utc>>,
    last_used_at: Option<DateTime<Utc>>,
    #[sqlx(flatten)]
    terms: TermsRow,
}

fn parse_scopes(columns: &[String]) -> Result<Vec<Scope>> {
    columns
        .iter()
        .map(|text| Scope::from_column(text))
        .collect::<Option<_>>()
        .ok_or_else(|| Error::internal(anyhow::anyhow!("unknown scope in api_keys")))
}

fn parse_platforms(columns: &[String]) -> Result<Vec<PlatformScope>> {
    columns
        .iter()
        .map(|text| text.parse().map_err(Error::internal))
        .collect()
}

/// Finds a presented key before a tenant is entered.
pub async fn find_presented(db: &Db, key: &PresentedKey) -> Result<Option<KeyMatch>> {
    let row = sqlx::query_as::<_, MatchRow>(
        "select tenant_id, id, scopes, platforms, expires_at, revoked_at, last_used_at,
                tenant_state, tenant_limits, allowed_origins
           from find_api_key($1, $2, $3)",
    )
    .bind(key.tenant_id)
    .bind(key.id)
    .bind(key.digest.as_slice())
    .fetch_optional(db.connection().await?.limited())
    .await?;
    row.map(KeyMatch::try_from).transpose()
}

impl TryFrom<MatchRow> for KeyMatch {
    type Error = Error;

    fn try_from(row: MatchRow) -> Result<Self> {
        Ok(Self {
            tenant_id: row.tenant_id,
            id: row.id,
            scopes: parse_scopes(&row.scopes)?,
            platforms: parse_platforms(&row.platforms)?,
            expires_at: row.expires_at,
            revoked_at: row.revoked_at,
            last_used_at: row.last_used_at,
            terms: row.terms.try_into()?,
        })
    }
}

#[derive(sqlx::FromRow)]
struct IndexedRow {
    position: i64,
    #[sqlx(flatten)]
    key: MatchRow,
}

/// The same for many keys of any tenants. Each match is under the index of its key in `keys`.
pub async fn list_presented(db: &Db, keys: &[&PresentedKey]) -> Result<HashMap<usize, KeyMatch>> {
    if keys.is_empty() {
        return Ok(HashMap::new());
    }
    let tenants: Vec<Uuid> = keys.iter().map(|key| key.tenant_id.as_uuid()).collect();
    let ids: Vec<Uuid> = keys.iter().map(|key| key.id.as_uuid()).collect();
    let digests: Vec<&[u8]> = keys.iter().map(|key| key.digest.as_slice()).collect();
    let rows = sqlx::query_as::<_, IndexedRow>(
        "select k.position, f.tenant_id, f.id, f.scopes, f.platforms, f.expires_at, f.revoked_at,
                f.last_used_at, f.tenant_state, f.tenant_limits, f.allowed_origins
           from unnest($1::uuid[], $2::uuid[], $3::bytea[]) with ordinality
                  as k (tenant_id, id, digest, position)
          cross join find_api_key(k.tenant_id, k.id, k.digest) f",
    )
    .bind(tenants)
    .bind(ids)
    .bind(digests)
    .fetch_all(db.connection().await?.limited())
    .await?;
    let indexed = |row: IndexedRow| Ok((row.position as usize - 1, row.key.try_into()?));
    rows.into_iter().map(indexed).collect()
}

pub async fn insert(
    tx: &mut TenantTx,
    id: ApiKeyId,
    digest: [u8; 32],
    key: &NewApiKey,
    now: DateTime<Utc>,
) -> Result<()> {
    let scopes: Vec<&str> = key.scopes.iter().map(|scope| scope.as_str()).collect();
    let platforms: Vec<String> = key.platforms.iter().map(ToString::to_string).collect();
    sqlx::query(
        "insert into api_keys (tenant_id, id, digest, name, scopes, platforms, created_at, expires_at)
         values ($1, $2, $3, $4, $5, $6, $7, $8)",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .bind(digest.as_slice())
    .bind(key.name.as_str())
    .bind(scopes)
    .bind(platforms)
    .bind(now)
    .bind(key.expires_at)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Newest first, revoked keys included.
pub async fn list(tx: &mut TenantTx, page: &PageRequest) -> Result<Page<ApiKey>> {
    let rows = sqlx::query_as::<_, Row>(
        "select id, name, scopes, platforms, created_at, expires_at, revoked_at, last_used_at
           from api_keys
          where tenant_id = $1
            and ($2::timestamptz is null or (created_at, id) < ($2, $3))
          order by created_at desc, id desc
          limit $4",
    )
    .bind(tx.tenant_id())
    .bind(page.after.map(|after| after.created_at))
    .bind(page.after.map(|after| after.id))
    .bind(page.fetch_limit())
    .fetch_all(tx.connection())
    .await?;
    let keys = rows
        .into_iter()
        .map(ApiKey::try_from)
        .collect::<Result<Vec<_>>>()?;
    Ok(Page::cut(keys, page, |key| Position {
        created_at: key.created_at,
        id: key.id.as_uuid(),
    }))
}

/// True if a usable bridge key vouches for `platform`, in any of its scopes.
pub async fn any_vouches_for(
    tx: &mut TenantTx,
    platform: &str,
    now: DateTime<Utc>,
) -> Result<bool> {
    Ok(sqlx::query_scalar(
        "select exists (select 1
                          from api_keys, unnest(platforms) as entry
                         where tenant_id = $1
                           and split_part(entry, '@', 1) = $2
                           and revoked_at is null
                           and (expires_at is null or expires_at > $3))",
    )
    .bind(tx.tenant_id())
    .bind(platform)
    .bind(now)
    .fetch_one(tx.connection())
    .await?)
}

pub async fn find(tx: &mut TenantTx, id: ApiKeyId) -> Result<Option<ApiKey>> {
    sqlx::query_as::<_, Row>(
        "select id, name, scopes, platforms, created_at, expires_at, revoked_at, last_used_at
           from api_keys
          where tenant_id = $1
            and id = $2",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .fetch_optional(tx.connection())
    .await?
    .map(ApiKey::try_from)
    .transpose()
}

/// True if another admin key than `id` is not revoked and never expires.
pub async fn has_other_lasting_admin(tx: &mut TenantTx, id: ApiKeyId) -> Result<bool> {
    Ok(sqlx::query_scalar(
        "select exists (select 1
                          from api_keys
                         where tenant_id = $1
                           and id <> $2
                           and 'admin' = any (scopes)
                           and expires_at is null
                           and revoked_at is null)",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .fetch_one(tx.connection())
    .await?)
}

/// The number of keys that are not revoked.
pub async fn count(tx: &mut TenantTx) -> Result<i64> {
    Ok(sqlx::query_scalar(
        "select count(*)
           from api_keys
          where tenant_id = $1
            and revoked_at is null",
    )
    .bind(tx.tenant_id())
    .fetch_one(tx.connection())
    .await?)
}

/// Revokes a key. Returns true if this call did: the key exists and was not revoked yet.
pub async fn update_revoked(tx: &mut TenantTx, id: ApiKeyId, now: DateTime<Utc>) -> Result<bool> {
    let done = sqlx::query(
        "update api_keys
            set revoked_at = $3
          where tenant_id = $1
            and id = $2
            and revoked_at is null",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .bind(now)
    .execute(tx.connection())
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Stores a use of the key, unless a use after `unless_after` is stored: all nodes together write once a minute.
pub async fn update_last_used(
    tx: &mut TenantTx,
    id: ApiKeyId,
    now: DateTime<Utc>,
    unless_after: DateTime<Utc>,
) -> Result<()> {
    sqlx::query(
        "update api_keys
            set last_used_at = $3
          where tenant_id = $1
            and id = $2
            and (last_used_at is null or last_used_at <= $4)",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .bind(now)
    .bind(unless_after)
    .execute(tx.connection())
    .await?;
    Ok(())
}
