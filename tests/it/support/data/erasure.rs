//! What is left of an erased user, and the jobs that take it away.

use std::collections::BTreeMap;
use std::time::Duration;

use sqlx::AssertSqlSafe;
use sqlx::types::Uuid;
use throughline::ids::IdentityId;
use throughline::jobs;

use crate::support::data::catalog::tenant_tables;
use crate::support::{Tenant, World, eventually};

/// In which tables of a tenant, and how often, there is any of `words`.
pub async fn mentions(world: &World, tenant: &Tenant, words: &[String]) -> BTreeMap<String, i64> {
    let mut superuser = world.superuser().await;
    let mut found = BTreeMap::new();
    for table in tenant_tables(&mut superuser).await {
        let sql = format!(
            "select count(*)
               from {table} t
              where tenant_id = $1
                and exists (select 1 from unnest($2::text[]) word where strpos(t::text, word) > 0)"
        );
        let count: i64 = sqlx::query_scalar(AssertSqlSafe(sql))
            .bind(tenant.uuid())
            .bind(words)
            .fetch_one(&mut superuser)
            .await
            .unwrap();
        if count > 0 {
            found.insert(table, count);
        }
    }
    found
}

pub async fn count(world: &World, sql: &str) -> i64 {
    sqlx::query_scalar(AssertSqlSafe(sql.to_owned()))
        .fetch_one(&mut world.superuser().await)
        .await
        .unwrap()
}

/// Runs jobs until nothing of deleted conversations is left, and no message of these accounts.
pub async fn first_pass(world: &World, identities: &[String]) {
    let ids: Vec<Uuid> = identities
        .iter()
        .map(|id| id.parse::<IdentityId>().unwrap().as_uuid())
        .collect();
    eventually("the rows are gone", Duration::from_secs(20), async || {
        jobs::tick(world.app()).await.unwrap();
        let messages: i64 =
            sqlx::query_scalar("select count(*) from messages where identity_id = any ($1)")
                .bind(&ids)
                .fetch_one(&mut world.superuser().await)
                .await
                .unwrap();
        let deleted = "select count(*) from conversations where deleted_at is not null";
        messages == 0 && count(world, deleted).await == 0
    })
    .await;
}

/// Lets everything end that could be under way, and the job look again.
pub async fn settle(world: &World) {
    world.clock.advance(Duration::from_secs(6 * 60));
    eventually("they are forgotten", Duration::from_secs(20), async || {
        jobs::tick(world.app()).await.unwrap();
        count(world, "select count(*) from erased_people").await == 0
    })
    .await;
}
