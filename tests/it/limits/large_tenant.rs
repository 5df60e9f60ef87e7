//! A tenant with many rows of each kind, beside small ones: Postgres logs the plan of every statement that the
//! service runs there, those inside functions and foreign keys too, and none reads more than it changes.

use std::collections::BTreeMap;
use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};
use sqlx::AssertSqlSafe;

use crate::support::data::bulk::{MANY, fill};
use crate::support::servers::cluster::cluster;
use crate::support::servers::model::Step;
use crate::support::world::OPERATOR_KEY;
use crate::support::{Fields, Reply, Scene, eventually};

/// Buffers of one statement. A scan of the smallest of the tables has more.
const MOST: i64 = 150;

/// A step of a sweep looks at 500 conversations and their tips.
const SWEEP: &str = "select c.id, s.last_active_at < $3 from conversations c";
const MOST_OF_A_SWEEP: i64 = 5000;

const FUNCTIONS: [&str; 5] = [
    "erase_tenant($1",
    "erase_lost_answers($1",
    "due_turns($1",
    "due_replies($1",
    "from find_api_key(",
];

const LOG_PLANS: &str = "
  alter database {database} set session_preload_libraries = 'auto_explain';
  alter database {database} set auto_explain.log_min_duration = 0;
  alter database {database} set auto_explain.log_analyze = on;
  alter database {database} set auto_explain.log_buffers = on;
  alter database {database} set auto_explain.log_timing = off;
  alter database {database} set auto_explain.log_nested_statements = on;
  alter database {database} set auto_explain.log_format = 'json'";

/// Once the settings are committed: connections have those of when they were opened.
const END_CONNECTIONS: &str = "
  select pg_terminate_backend(pid, 5000) from pg_stat_activity
   where datname = current_database() and usename = 'throughline'";

async fn execute(b: &Scene, sql: &str) {
    let mut superuser = b.world.superuser().await;
    let sql = AssertSqlSafe(sql.to_owned());
    sqlx::raw_sql(sql).execute(&mut superuser).await.unwrap();
}

/// Many copies of one row of a table, with other ids.
async fn copy(b: &Scene, table: &str, which: &str, changes: &str) {
    let tenant = b.tenant.uuid();
    let columns: String = sqlx::query_scalar(
        "select string_agg(quote_ident(attname), ', ' order by attnum)
           from pg_attribute
          where attrelid = to_regclass($1) and attnum > 0 and not attisdropped and attgenerated = ''",
    )
    .bind(table)
    .fetch_one(&mut b.world.superuser().await)
    .await
    .unwrap();
    let sql = format!(
        "set session_replication_role = replica;
         insert into {table} ({columns})
         select {columns}
           from (select t as one from {table} t where tenant_id = '{tenant}' and {which} limit 1) o
          cross join generate_series(1, {MANY}) n
          cross join lateral jsonb_populate_record(o.one, jsonb_build_object({changes})) r"
    );
    execute(b, &sql).await;
}

/// The most buffers that each statement of the service has touched.
fn touched(b: &Scene) -> BTreeMap<String, i64> {
    let mut most = BTreeMap::new();
    for entry in cluster().log_of(&b.world.database) {
        let Some((_, plan)) = entry.split_once("plan:\n") else {
            continue;
        };
        let plan: Value = serde_json::from_str(plan).unwrap();
        let count = |name: &str| plan["Plan"][name].as_i64().unwrap_or_default();
        let buffers = count("Shared Hit Blocks") + count("Shared Read Blocks");
        let words: Vec<&str> = plan.text("Query Text").split_whitespace().collect();
        let text = words.join(" ");
        // The first call of a function also reads catalogs. What it runs is logged by itself.
        if FUNCTIONS.iter().any(|name| text.contains(name)) {
            continue;
        }
        let known = most.entry(text).or_insert(buffers);
        *known = buffers.max(*known);
    }
    most
}

/// Lets all jobs of the tenant run, and waits for their end.
async fn run_jobs(b: &Scene) {
    let tenant = b.tenant.uuid();
    let due = format!(
        "update jobs set run_at = now() where tenant_id = '{tenant}' and lease_until is null"
    );
    execute(b, &due).await;
    eventually("the jobs have run", Duration::from_secs(20), async || {
        let left: i64 = sqlx::query_scalar(
            "select count(*) from jobs where tenant_id = $1 and (run_at <= now() or lease_until is not null)",
        )
        .bind(tenant)
        .fetch_one(&mut b.world.superuser().await)
        .await
        .unwrap();
        left == 0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_is_done_in_a_large_tenant_reads_what_it_changes() {
    let b = Scene::bridge([]).await;
    b.model.otherwise(Step::echo());
    let mut said = Vec::new();
    for number in 1..=5 {
        let identity = format!("telegram:90000{number}");
        let body = json!({"identity": identity, "text": "hi", "wait": true});
        said.push(b.send(body).await.expect(200));
    }
    let small = b.world.tenant("Small").await;
    for number in 0..5 {
        b.world.tenant(&format!("Other {number}")).await;
    }
    copy(
        &b,
        "conversations",
        "true",
        "'id', md5('c' || n)::uuid, 'tip_session_id', md5('c' || n)::uuid,
         'user_id', md5('u' || n)::uuid, 'slot_id', md5('k' || n)::uuid",
    )
    .await;
    copy(
        &b,
        "sessions",
        "true",
        "'id', md5('c' || n)::uuid, 'conversation_id', md5('c' || n)::uuid",
    )
    .await;
    copy(
        &b,
        "slots",
        "true",
        "'id', md5('k' || n)::uuid, 'user_id', md5('u' || n)::uuid, 'key', 'k' || n,
         'identity_id', md5('i' || n)::uuid, 'conversation_id', md5('c' || n)::uuid",
    )
    .await;
    copy(
        &b,
        "slot_names",
        "true",
        "'slot_id', md5('k' || n)::uuid, 'home_slot_id', md5('k' || n)::uuid,
         'key', 'k' || n",
    )
    .await;
    copy(
        &b,
        "slot_conversations",
        "true",
        "'slot_id', md5('k' || n)::uuid,
         'conversation_id', md5('c' || n)::uuid",
    )
    .await;
    copy(
        &b,
        "messages",
        "identity_id is not null",
        "'session_id', md5('c' || n)::uuid, 'id', gen_random_uuid(),
         'identity_id', md5('i' || n)::uuid, 'turn_id', gen_random_uuid()",
    )
    .await;
    copy(
        &b,
        "turns",
        "ended_at is not null",
        "'id', gen_random_uuid(), 'turn_no', n,
         'conversation_id', md5('c' || n)::uuid, 'identity_id', md5('i' || n)::uuid",
    )
    .await;
    copy(
        &b,
        "identity_presence",
        "true",
        "'identity_id', md5('i' || n)::uuid, 'slot_id', md5('k' || n)::uuid",
    )
    .await;
    fill(&b.world, &b.tenant, 5).await;
    execute(&b, &LOG_PLANS.replace("{database}", &b.world.database)).await;
    execute(&b, END_CONNECTIONS).await;

    let at = |place: usize, member: &str| said[place].text(member).to_owned();
    // Link, unlink, delete a conversation, erase a user, each with a turn that has not ended.
    b.world
        .link(&b.bridge_key, "telegram:900001", "discord:900001")
        .await;
    let user = b.world.dm(&b.bridge_key, "discord:900001").await["user_id"].clone();
    let id = b
        .world
        .identity_id(&b.tenant.key, &user, "discord:900001")
        .await;
    let path = format!("/v1/identities/{id}");
    b.world.delete(&b.tenant.key, &path).await.expect(200);
    let path = format!("/v1/sessions/{}", at(1, "session_id"));
    b.world.delete(&b.tenant.key, &path).await.expect(204);
    let user = b.world.dm(&b.bridge_key, "telegram:900003").await["user_id"].clone();
    let path = format!("/v1/users/{}", user.as_str().unwrap());
    b.world.delete(&b.tenant.key, &path).await.expect(202);
    // Messages and deliveries.
    let body = json!({"identity": "telegram:900004", "text": "hi", "wait": false});
    b.send(body).await.expect_success();
    let leased = b
        .world
        .get(&b.bridge_key, "/v1/deliveries?limit=2")
        .await
        .expect(200);
    assert_eq!(leased.list().len(), 2);
    let body = json!({"retention": {"conversations_days": 30}});
    let path = b.world.request(Method::PATCH, "/v1/tenant", &b.tenant.key);
    Reply::of(path.json(&body)).await.expect(200);
    run_jobs(&b).await;
    // Operators.
    for what in ["suspend", "resume"] {
        let path = format!("/v1/tenants/{}/{what}", b.tenant.id);
        b.world
            .post(OPERATOR_KEY, &path, json!({}))
            .await
            .expect(200);
    }
    let path = format!("/v1/tenants/{}", small.id);
    b.world.delete(OPERATOR_KEY, &path).await.expect(202);
    eventually(
        "the small tenant is gone",
        Duration::from_secs(20),
        async || b.world.delete(OPERATOR_KEY, &path).await.status == 404,
    )
    .await;

    let touched = touched(&b);
    let seen = |part: &str| assert!(touched.keys().any(|sql| sql.contains(part)), "{part}");
    for part in [
        "t.state in ('running', 'waiting_client') and t.lease_until <= clock_timestamp()",
        "t.reply_via = 'waiting' and t.ended_at is not null",
        "update jobs j",
        "delete from events",
        "update turns set state",
        "insert into usage_hourly",
        "delete from idempotency",
        "delete from users",
        SWEEP,
    ] {
        seen(part);
    }
    let allowed = |sql: &str| {
        if sql.contains(SWEEP) {
            MOST_OF_A_SWEEP
        } else {
            MOST
        }
    };
    let over: Vec<_> = touched
        .iter()
        .filter(|(sql, most)| **most > allowed(sql))
        .collect();
    assert!(over.is_empty(), "{over:#?}");
}
