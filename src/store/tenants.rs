//! The table of tenants: global, so reached without a tenant; it holds nothing a tenant's people wrote.

use chrono::{DateTime, Utc};

use super::{Db, TenantTx};
use crate::domain::display_name::DisplayName;
use crate::domain::paging::{Page, PageRequest, Position};
use crate::domain::tenant::{Tenant, TenantState};
use crate::error::{Error, Result};
use crate::ids::TenantId;

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
        let state = TenantState::from_column(&row.state)
            .ok_or_else(|| Error::internal(anyhow::anyhow!("unknown tenant state")))?;
        Ok(Self {
            id: row.id,
            name: row.name,
            state,
            created_at: row.created_at,
        })
    }
}

/// Inserts the tenant that `tx` has entered.
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

pub async fn find(db: &Db, id: TenantId) -> Result<Option<Tenant>> {
    sqlx::query_as::<_, Row>(
        "select id, name, state, created_at
           from tenants
          where id = $1
            and state <> 'operator'",
    )
    .bind(id)
    .fetch_optional(&db.pool)
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
    .fetch_all(&db.pool)
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

/// The tenant, held until `tx` ends; new rows of it can still be added. `for update` would keep them out,
/// the audit's entries too: who holds the audit's head would wait for us, and we for the head.
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

/// Sets the state of the tenant that `tx` has entered.
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
