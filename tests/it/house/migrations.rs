//! Migrating a database that has data, as its owner, who is subject to row-level security.

use std::path::Path;

use sqlx::migrate::Migrator;
use sqlx::{Connection, PgConnection};
use throughline::dev::service_caller;
use throughline::ids::TenantId;
use throughline::store::Db;
use throughline::store::bridge::deliveries::CoveredPlatforms;
use throughline::store::bridge::delivery_leases::lease;
use throughline::store::db::migrate;

use crate::support::servers::cluster::{cluster, project};
use crate::support::world::WorldOptions;
use crate::support::{Fields, World};

const TENANT: &str = "01890000-0000-7000-8000-000000000001";

/// Applies what is older than `version`, as the owner.
async fn migrate_before(database: &str, version: i64) {
    let mut owner = PgConnection::connect(&cluster().owner_url(database))
        .await
        .unwrap();
    let mut migrator = Migrator::new(Path::new(&project().join("migrations")))
        .await
        .unwrap();
    migrator
        .migrations
        .to_mut()
        .retain(|migration| migration.version < version);
    migrator.set_locking(false);
    migrator.run(&mut owner).await.unwrap();
    owner.close().await.unwrap();
}

async fn run(database: &str, sql: &str) {
    sqlx::raw_sql(sqlx::AssertSqlSafe(sql.replace("TENANT", TENANT)))
        .execute(&mut cluster().superuser(database).await)
        .await
        .unwrap();
}

/// What is leased, by chat.
async fn leased(db: &Db) -> Vec<String> {
    let tenant_id = TenantId::from_uuid(TENANT.parse().unwrap());
    let caller = service_caller(tenant_id);
    let mut tx = caller.begin(db).await.unwrap();
    let leased = lease(&mut tx, &CoveredPlatforms::all(), 10).await.unwrap();
    tx.commit().await.unwrap();
    leased.into_iter().map(|one| one.chat_ref).collect()
}

/// As a node writes that does not know `chats.due_at` yet.
const OLD_DELIVERY: &str =
    "insert into chats (tenant_id, platform, scope, chat_ref, chat, next_seq)
     values ('TENANT', 'telegram', '', 'CHAT', '{\"type\": \"dm\"}', 2);
     insert into deliveries (tenant_id, id, platform, scope, chat_ref, seq, kind, payload, state, visible_at,
                             created_at)
     values ('TENANT', gen_random_uuid(), 'telegram', '', 'CHAT', 1, 'notice', '{\"text\": \"hi\"}', 'STATE',
             now(), now())";

fn old_delivery(chat: &str, state: &str) -> String {
    OLD_DELIVERY.replace("CHAT", chat).replace("STATE", state)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_there_before_a_migration_is_found_after_it() {
    let database = cluster().new_empty_database().await;
    migrate_before(&database, 20_261_118_150_201).await;
    run(
        &database,
        "insert into tenants (id, name, state, created_at, updated_at)
         values ('TENANT', 'Acme', 'active', now(), now());
         insert into idempotency (tenant_id, principal, route, key, request_hash, created_at)
         values ('TENANT', 'key_1/telegram:5', 'r', 'k', sha256(''), now())",
    )
    .await;
    run(&database, &old_delivery("dm:pending", "pending")).await;
    run(&database, &old_delivery("dm:delivered", "delivered")).await;
    migrate::run(&cluster().migrate_config(&database))
        .await
        .unwrap();
    let mut superuser = cluster().superuser(&database).await;
    let answer: (Option<String>, Option<String>) =
        sqlx::query_as("select caller, acted_for from idempotency")
            .fetch_one(&mut superuser)
            .await
            .unwrap();
    let ended: i64 = sqlx::query_scalar(
        "select count(*) from deliveries where state = 'delivered' and ended_at is not null",
    )
    .fetch_one(&mut superuser)
    .await
    .unwrap();
    let unforced: Vec<String> = sqlx::query_scalar(
        "select relname::text from pg_class
          where relname in ('chats', 'deliveries', 'idempotency', 'identities') and not relforcerowsecurity",
    )
    .fetch_all(&mut superuser)
    .await
    .unwrap();
    let url = cluster().service_url(&database);
    let db = Db::connect(&url.into(), 2).await.unwrap();
    let first = leased(&db).await;
    // Old nodes are still there while new ones start.
    run(&database, &old_delivery("dm:later", "pending")).await;
    run(&database, &old_delivery("dm:replayed", "dead")).await;
    let replay = "update deliveries set state = 'pending', attempt = 0 where state = 'dead'";
    run(&database, replay).await;
    let mut second = leased(&db).await;
    second.sort();
    assert_eq!(
        (first, second, answer, ended, unforced),
        (
            vec!["dm:pending".to_owned()],
            vec!["dm:later".to_owned(), "dm:replayed".to_owned()],
            (Some("key_1".to_owned()), Some("telegram:5".to_owned())),
            1,
            Vec::new()
        )
    );
}

/// A row or more in every table, as the commit before the migration of names had them; with the tenant and its key.
const BEFORE_NAMES: &str = include_str!("before_names.sql");

fn comment(name: &str) -> &'static str {
    let prefix = format!("-- {name} ");
    let found = BEFORE_NAMES
        .lines()
        .find_map(|line| line.strip_prefix(&prefix));
    found.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_from_before_the_renamed_columns_serves_after_their_migration() {
    let database = cluster().new_empty_database().await;
    migrate_before(&database, 20_261_119_100_100).await;
    run(&database, BEFORE_NAMES).await;
    let tables: Vec<String> = sqlx::query_scalar(
        "select table_name::text from information_schema.columns
          where table_schema = 'public' and column_name = 'tenant_id' and table_name <> 'jobs'",
    )
    .fetch_all(&mut cluster().superuser(&database).await)
    .await
    .unwrap();
    for table in &tables {
        let inserts = format!("insert into {table} ");
        assert!(BEFORE_NAMES.contains(&inserts), "{table} has no row");
    }
    migrate::run(&cluster().migrate_config(&database))
        .await
        .unwrap();
    let reply_via: Option<String> = sqlx::query_scalar("select reply_via from turns")
        .fetch_one(&mut cluster().superuser(&database).await)
        .await
        .unwrap();
    assert_eq!(reply_via.as_deref(), Some("returned"));

    let world = World::with(WorldOptions {
        database: Some(database),
        ..WorldOptions::default()
    })
    .await;
    let key = comment("key");
    let get = async |path: &str| world.get(key, path).await.expect(200);
    assert_eq!(get("/v1/whoami").await.text("tenant_id"), comment("tenant"));
    let users = get("/v1/users").await;
    assert_eq!(users["data"].as_array().unwrap().len(), 3);
    let session = get("/v1/session-keys?limit=200").await["data"][0]["session_id"].clone();
    let session = session.as_str().unwrap();
    let turns = get(&format!("/v1/sessions/{session}/turns")).await;
    let messages = get(&format!("/v1/sessions/{session}/messages")).await;
    assert!(turns["data"].is_array() && messages["data"].is_array());
    let turn: String = sqlx::query_scalar("select replace(id::text, '-', '') from turns")
        .fetch_one(&mut world.superuser().await)
        .await
        .unwrap();
    let turn = get(&format!("/v1/turns/trn_{turn}")).await;
    assert_eq!(turn.text("state"), "completed");
    let message = serde_json::json!({"identity": "telegram:1", "text": "still there?"});
    let answer = world.post(key, "/v1/inbound", message).await.expect(200);
    assert!(answer["reply"]["text"].is_string(), "{answer}");
}
