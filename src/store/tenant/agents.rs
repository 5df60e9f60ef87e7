//! A tenant's agents: the checked document, and in a column of its own the sealed key of the upstream.

use chrono::{DateTime, Utc};
use sqlx::types::Json;

use crate::domain::tenant::agent::AgentSpec;
use crate::error::Result;
use crate::store::TenantTx;

#[derive(Debug, Clone, sqlx::FromRow)]
pub struct AgentRow {
    pub name: String,
    #[sqlx(json)]
    pub spec: AgentSpec,
    pub api_key_enc: Option<Vec<u8>>,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
}

/// Locks the row until `tx` ends, so that a decision based on it still holds when the row is replaced.
pub async fn lock(tx: &mut TenantTx, name: &str) -> Result<Option<AgentRow>> {
    Ok(sqlx::query_as(
        "select name, spec, api_key_enc, created_at, updated_at
           from agents
          where tenant_id = $1
            and name = $2
            for update",
    )
    .bind(tx.tenant_id())
    .bind(name)
    .fetch_optional(tx.connection())
    .await?)
}

pub async fn find(tx: &mut TenantTx, name: &str) -> Result<Option<AgentRow>> {
    Ok(sqlx::query_as(
        "select name, spec, api_key_enc, created_at, updated_at
           from agents
          where tenant_id = $1
            and name = $2",
    )
    .bind(tx.tenant_id())
    .bind(name)
    .fetch_optional(tx.connection())
    .await?)
}

/// All agents, by name: a tenant has a handful.
pub async fn list(tx: &mut TenantTx) -> Result<Vec<AgentRow>> {
    Ok(sqlx::query_as(
        "select name, spec, api_key_enc, created_at, updated_at
           from agents
          where tenant_id = $1
          order by name",
    )
    .bind(tx.tenant_id())
    .fetch_all(tx.connection())
    .await?)
}

pub async fn upsert(
    tx: &mut TenantTx,
    name: &str,
    spec: &AgentSpec,
    api_key_enc: Option<&[u8]>,
    now: DateTime<Utc>,
) -> Result<AgentRow> {
    Ok(sqlx::query_as(
        "insert into agents as a (tenant_id, name, spec, api_key_enc, created_at, updated_at)
         values ($1, $2, $3, $4, $5, $5)
             on conflict on constraint agents_pkey do update
            set spec = excluded.spec, api_key_enc = excluded.api_key_enc, updated_at = excluded.updated_at
          where a.tenant_id = $1
      returning name, spec, api_key_enc, created_at, updated_at",
    )
    .bind(tx.tenant_id())
    .bind(name)
    .bind(Json(spec))
    .bind(api_key_enc)
    .bind(now)
    .fetch_one(tx.connection())
    .await?)
}

pub async fn count(tx: &mut TenantTx) -> Result<i64> {
    Ok(sqlx::query_scalar(
        "select count(*)
           from agents
          where tenant_id = $1",
    )
    .bind(tx.tenant_id())
    .fetch_one(tx.connection())
    .await?)
}

pub async fn delete(tx: &mut TenantTx, name: &str) -> Result<bool> {
    let done = sqlx::query(
        "delete from agents
          where tenant_id = $1
            and name = $2",
    )
    .bind(tx.tenant_id())
    .bind(name)
    .execute(tx.connection())
    .await?;
    Ok(done.rows_affected() == 1)
}
