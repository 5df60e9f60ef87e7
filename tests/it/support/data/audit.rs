//! The audit in tests: its entries, and its verification.

use serde_json::Value;
use sqlx::{AssertSqlSafe, PgConnection};
use throughline::app::App;
use throughline::store::TenantTx;

use crate::support::servers::cluster::cluster;
use crate::support::servers::process::throughline;
use crate::support::world::node_environment;
use crate::support::{Fields, Tenant, World};

/// A tenant's entries, oldest first.
pub async fn entries(world: &World, tenant: &Tenant) -> Vec<Value> {
    let page = world.get(&tenant.key, "/v1/audit?limit=200").await;
    let mut rows = page.list();
    rows.reverse();
    rows
}

/// Actor, action and target of each entry.
pub fn summaries(entries: &[Value]) -> Vec<(&str, &str, &str)> {
    entries
        .iter()
        .map(|row| {
            let member = |name: &str| row.text(name);
            (member("actor"), member("action"), member("target"))
        })
        .collect()
}

pub fn key_id(tenant: &Tenant) -> String {
    let parsed = throughline::domain::tenant::api_key::PresentedKey::parse(&tenant.key).unwrap();
    parsed.id.to_string()
}

pub async fn execute(connection: &mut PgConnection, sql: &str) -> Result<u64, sqlx::Error> {
    let done = sqlx::raw_sql(AssertSqlSafe(sql.to_owned()))
        .execute(connection)
        .await?;
    Ok(done.rows_affected())
}

/// `throughline audit verify` with these keys: whether it was content, and what it printed.
pub fn verify_command(world: &World, args: &[&str], secret_keys: &str) -> (bool, String) {
    let output = throughline(&[&["audit", "verify"], args].concat())
        .envs(node_environment(&world.database, cluster().redis_url()))
        .env("THROUGHLINE_SECRET_KEY", secret_keys)
        .output()
        .unwrap();
    let code = output.status.code();
    assert!(matches!(code, Some(0 | 1)), "{output:?}");
    (code == Some(0), String::from_utf8(output.stdout).unwrap())
}

pub async fn operator_tx(app: &App, tenant: &Tenant) -> TenantTx {
    let mut tx = throughline::auth::OperatorCaller::local()
        .begin(&app.db)
        .await
        .unwrap();
    tx.operator_enter(tenant.id.parse().unwrap()).await.unwrap();
    tx
}
