//! The table of tenants. It is global, so statements reach it without a tenant. It has no text that a
//! tenant's users wrote.

use chrono::{DateTime, Utc};

use crate::domain::people::display_name::DisplayName;
use crate::domain::tenant::agent::DmScope;
use crate::domain::tenant::limits::{LimitOverrides, Limits};
use crate::domain::tenant::{Tenant, TenantSettings, TenantState, TenantTerms};
use crate::domain::values::paging::{Page, PageRequest, Position};
use crate::error::{Error, Result};
use crate::ids::TenantId;
use crate::store::{Db, TenantTx};

#[derive(sqlx::FromRow)]
struct Row {
    id: TenantId,
    name: String,
    state: String,
    created_at: DateTime<Utc>,
}

impl TryFrom<Row> for Tenant {
    type Error = Error;

    fn try_from(row: Row) -> Result<Self> {
        let state = parse_state(&row.state)?;
        Ok(Self {
            id: row.id,
            name: row.name,
            state,
            created_at: row.created_at,
        })
    }
}

/// The columns of the tenant that each credential look-up returns.
#[derive(sqlx::FromRow)]
pub(in crate::store) struct TermsRow {
    tenant_state: String,
    tenant_limits: serde_json::Value,
    allowed_origins: Vec<String>,
}

impl TryFrom<TermsRow> for TenantTerms {
    type Error = Error;

    fn try_from(row: TermsRow) -> Result<Self> {
        Ok(Self {
            state: parse_state(&row.tenant_state)?,
            limits: LimitOverrides::from_column(&row.tenant_limits).effective(),
            allowed_origins: row.allowed_origins,
        })
    }
}

fn parse_state(column: &str) -> Result<TenantState> {
    TenantState::from_column(column)
        .ok_or_else(|| Error::internal(anyhow::anyhow!("unknown tenant state")))
}

/// Inserts the tenant of `tx`.
pub async fn insert(tx: &mut TenantTx, name: &DisplayName, now: DateTime<Utc>) -> Result<()> {
    let tenant_id = tx.tenant_id();
    sqlx::query(
        "insert into tenants (id, name, state, created_at, updated_at)
         values ($1, $2, 'active', $3, $3)",
    )
    .bind(tenant_id)
    .bind(name.as_str())
    .bind(now)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// For commands without a transaction: a caller with a transaction must not ask for a second connection.
pub async fn find(db: &Db, id: TenantId) -> Result<Option<Tenant>> {
    sqlx::query_as::<_, Row>(
        "select id, name, state, created_at
           from tenants
          where id = $1
            and state <> 'operator'",
    )
    .bind(id)
    .fetch_optional(db.connection().await?.limited())
    .await?
    .map(Tenant::try_from)
    .transpose()
}

/// The same for callers with a transaction, which may be of another tenant.
pub async fn find_in(tx: &mut TenantTx, id: TenantId) -> Result<Option<Tenant>> {
    sqlx::query_as::<_, Row>(
        "select id, name, state, created_at
           from tenants
          where id = $1
            and state <> 'operator'",
    )
    .bind(id)
    .fetch_optional(tx.connection())
    .await?
    .map(Tenant::try_from)
    .transpose()
}

/// Newest first.
pub async fn list(db: &Db, page: &PageRequest) -> Result<Page<Tenant>> {
    let rows = sqlx::query_as::<_, Row>(
        "select id, name, state, created_at
           from tenants
          where state <> 'operator'
            and ($1::timestamptz is null or (created_at, id) < ($1, $2))
          order by created_at desc, id desc
          limit $3",
    )
    .bind(page.after.map(|after| after.created_at))
    .bind(page.after.map(|after| after.id))
    .bind(page.fetch_limit())
    .fetch_all(db.connection().await?.limited())
    .await?;
    let tenants = rows
        .into_iter()
        .map(Tenant::try_from)
        .collect::<Result<Vec<_>>>()?;
    Ok(Page::cut(tenants, page, |tenant| Position {
        created_at: tenant.created_at,
        id: tenant.id.as_uuid(),
    }))
}

/// Locks the tenant until `tx` ends; new rows of the tenant can still be inserted. `for update` would block
/// them, audit entries included: a transaction with the lock on the audit head would wait for us, and we
/// would wait for the head.
pub async fn lock(tx: &mut TenantTx, id: TenantId) -> Result<Option<Tenant>> {
    sqlx::query_as::<_, Row>(
        "select id, name, state, created_at
           from tenants
          where id = $1
            and state <> 'operator'
            for no key update",
    )
    .bind(id)
    .fetch_optional(tx.connection())
    .await?
    .map(Tenant::try_from)
    .transpose()
}

/// True if the tenant of `tx` is active.
pub async fn is_active(tx: &mut TenantTx) -> Result<bool> {
    Ok(sqlx::query_scalar(
        "select exists (select 1
                          from tenants
                         where id = $1
                           and state = 'active')",
    )
    .bind(tx.tenant_id())
    .fetch_one(tx.connection())
    .await?)
}

/// Sets the state of the tenant of `tx`.
pub async fn update_state(tx: &mut TenantTx, state: TenantState, now: DateTime<Utc>) -> Result<()> {
    let tenant_id = tx.tenant_id();
    sqlx::query(
        "update tenants
            set state = $2, updated_at = $3
          where id = $1
            and state <> 'operator'",
    )
    .bind(tenant_id)
    .bind(state.as_str())
    .bind(now)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Renames a tenant.
pub async fn update_name(
    tx: &mut TenantTx,
    id: TenantId,
    name: &DisplayName,
    now: DateTime<Utc>,
) -> Result<()> {
    sqlx::query(
        "update tenants
            set name = $2, updated_at = $3
          where id = $1
            and state <> 'operator'",
    )
    .bind(id)
    .bind(name.as_str())
    .bind(now)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Changes single limits of the tenant of `tx`. Limits in `removed` return to their defaults.
pub async fn update_single_limits(
    tx: &mut TenantTx,
    removed: &[&str],
    changed: &LimitOverrides,
    now: DateTime<Utc>,
) -> Result<()> {
    let tenant_id = tx.tenant_id();
    sqlx::query(
        "update tenants
            set limits = (limits - $2::text[]) || $3, updated_at = $4
          where id = $1",
    )
    .bind(tenant_id)
    .bind(removed)
    .bind(sqlx::types::Json(changed))
    .bind(now)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Replaces all limits of the tenant of `tx`.
pub async fn update_limits(
    tx: &mut TenantTx,
    limits: &LimitOverrides,
    now: DateTime<Utc>,
) -> Result<()> {
    let tenant_id = tx.tenant_id();
    sqlx::query(
        "update tenants
            set limits = $2, updated_at = $3
          where id = $1",
    )
    .bind(tenant_id)
    .bind(sqlx::types::Json(limits))
    .bind(now)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// A tenant with the settings that it controls itself.
#[derive(Debug, Clone)]
pub struct OwnTenant {
    pub tenant: Tenant,
    pub settings: TenantSettings,
    pub allowed_origins: Vec<String>,
}

#[derive(sqlx::FromRow)]
struct OwnRow {
    #[sqlx(flatten)]
    tenant: Row,
    #[sqlx(json)]
    settings: TenantSettings,
    allowed_origins: Vec<String>,
}

/// The tenant of `tx`.
pub async fn get_own(tx: &mut TenantTx) -> Result<OwnTenant> {
    let tenant_id = tx.tenant_id();
    let row = sqlx::query_as::<_, OwnRow>(
        "select id, name, state, created_at, settings, allowed_origins
           from tenants
          where id = $1",
    )
    .bind(tenant_id)
    .fetch_one(tx.connection())
    .await?;
    Ok(OwnTenant {
        tenant: row.tenant.try_into()?,
        settings: row.settings,
        allowed_origins: row.allowed_origins,
    })
}

/// The tenant's DM scope, for agents that set none.
pub async fn find_dm_scope(tx: &mut TenantTx) -> Result<DmScope> {
    let tenant_id = tx.tenant_id();
    let settings: sqlx::types::Json<TenantSettings> = sqlx::query_scalar(
        "select settings
           from tenants
          where id = $1",
    )
    .bind(tenant_id)
    .fetch_one(tx.connection())
    .await?;
    Ok(settings.0.dm_scope)
}

pub async fn update_settings(tx: &mut TenantTx, own: &OwnTenant, now: DateTime<Utc>) -> Result<()> {
    let tenant_id = tx.tenant_id();
    sqlx::query(
        "update tenants
            set name = $2, settings = settings || $3, allowed_origins = $4, updated_at = $5
          where id = $1",
    )
    .bind(tenant_id)
    .bind(&own.tenant.name)
    .bind(sqlx::types::Json(&own.settings))
    .bind(&own.allowed_origins)
    .bind(now)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Deletes up to `limit` rows of a tenant that is being deleted. Returns their number; 0 means that no row is left.
pub async fn erase(db: &Db, id: TenantId, limit: i64) -> Result<i32> {
    Ok(sqlx::query_scalar("select erase_tenant($1, $2::integer)")
        .bind(id)
        .bind(limit)
        .fetch_one(db.connection().await?.limited())
        .await?)
}

/// The effective limits of the tenant of `tx`.
pub async fn get_limits(tx: &mut TenantTx) -> Result<Limits> {
    let stored: serde_json::Value = sqlx::query_scalar(
        "select limits
           from tenants
          where id = $1",
    )
    .bind(tx.tenant_id())
    .fetch_one(tx.connection())
    .await?;
    Ok(LimitOverrides::from_column(&stored).effective())
}
