//! Retention in tests: tenants that keep conversations for some days, and sweeps run by hand.

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde_json::{Value, json};
use throughline::dev::service_caller;
use throughline::sessions::retention::{self, Progress};
use throughline::store::TenantTx;

use crate::support::conversations::user_message;
use crate::support::{Fields, Tenant, World, eventually};

pub const DAY: Duration = Duration::from_secs(24 * 3600);

pub async fn keep_for(world: &World, tenant: &Tenant, days: Value) {
    let body = json!({"retention": {"conversations_days": days}});
    world
        .patch(&tenant.key, "/v1/tenant", body)
        .await
        .expect(200);
}

pub async fn retention_of(world: &World, tenant: &Tenant) -> Value {
    world.get(&tenant.key, "/v1/retention").await.expect(200)
}

pub async fn sweep_entries(world: &World, tenant: &Tenant) -> Vec<Value> {
    world
        .walk(&tenant.key, "/v1/audit?action=retention.sweep")
        .await
}

pub async fn status(world: &World, tenant: &Tenant, id: &str) -> u16 {
    world
        .get(&tenant.key, &format!("/v1/sessions/{id}"))
        .await
        .status
}

/// A conversation with one message.
pub async fn conversation(world: &World, tenant: &Tenant) -> String {
    world
        .session(&tenant.key, json!({"messages": [user_message("x")]}))
        .await
        .id()
}

pub async fn conversations(world: &World, tenant: &Tenant, count: usize) -> Vec<String> {
    let mut made = Vec::new();
    for _ in 0..count {
        made.push(conversation(world, tenant).await);
    }
    made
}

/// Takes the sweep's job into the test's own hands, as a node would that then stands still.
pub async fn hold_job(world: &World, tenant: &Tenant) {
    let held = async || {
        let done = sqlx::query(
            "update jobs set lease_until = '2200-01-01'
              where tenant_id = $1 and kind = $2 and lease_until is null",
        )
        .bind(tenant.uuid())
        .bind(retention::SWEEP_JOB)
        .execute(&mut world.superuser().await)
        .await;
        done.unwrap().rows_affected() == 1
    };
    eventually("no node has the job", Duration::from_secs(10), held).await;
}

/// What happens when the lease of a node that died runs out.
pub async fn release_job(world: &World, tenant: &Tenant) {
    sqlx::query(
        "update jobs set run_at = $3, lease_until = null where tenant_id = $1 and kind = $2",
    )
    .bind(tenant.uuid())
    .bind(retention::SWEEP_JOB)
    .bind(world.clock.now())
    .execute(&mut world.superuser().await)
    .await
    .unwrap();
}

/// A tenant that keeps conversations for 30 days, whose sweeps only the test runs.
pub async fn tenant_by_hand(world: &World) -> Tenant {
    let tenant = world.tenant("Acme").await;
    keep_for(world, &tenant, json!(30)).await;
    hold_job(world, &tenant).await;
    tenant
}

pub async fn transaction(world: &World, node: usize, tenant: &Tenant) -> TenantTx {
    let caller = service_caller(tenant.id.parse().unwrap());
    caller.begin(&world.nodes[node].app.db).await.unwrap()
}

pub async fn begin(world: &World, node: usize, tenant: &Tenant) -> Option<DateTime<Utc>> {
    let mut tx = transaction(world, node, tenant).await;
    let begun = retention::begin(&world.nodes[node].app, &mut tx)
        .await
        .unwrap();
    tx.commit().await.unwrap();
    begun
}

pub async fn step(
    world: &World,
    node: usize,
    tenant: &Tenant,
    started_at: DateTime<Utc>,
    batch: i64,
) -> Progress {
    let mut tx = transaction(world, node, tenant).await;
    let progress = retention::step(&world.nodes[node].app, &mut tx, started_at, batch)
        .await
        .unwrap();
    tx.commit().await.unwrap();
    progress
}

/// Lets due jobs run until a sweep that started after `after` has finished, and answers it.
pub async fn finished_sweep(world: &World, tenant: &Tenant, after: DateTime<Utc>) -> Value {
    let done = async || {
        for node in &world.nodes {
            throughline::jobs::tick(&node.app).await.unwrap();
        }
        let sweep = retention_of(world, tenant).await["sweep"].clone();
        let started: Option<DateTime<Utc>> =
            serde_json::from_value(sweep["started_at"].clone()).unwrap();
        started.is_some_and(|started| started >= after) && !sweep["finished_at"].is_null()
    };
    eventually("a sweep has finished", Duration::from_secs(20), done).await;
    retention_of(world, tenant).await["sweep"].clone()
}
