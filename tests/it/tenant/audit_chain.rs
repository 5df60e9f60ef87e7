//! The chain of a tenant's audit: whatever is changed, removed or forked in it is found.

use serde_json::json;
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use throughline::app::App;
use throughline::audit;
use throughline::domain::tenant::audit::{Action, Detail, Entry};
use throughline::ids::{ApiKeyId, TenantId};

use crate::support::data::audit::{execute, key_id, operator_tx, verify_command};
use crate::support::servers::cluster::cluster;
use crate::support::servers::process::throughline;
use crate::support::world::{SECRET_KEY, node_config, node_environment};
use crate::support::{Fields, World};

const NEW_KEY: &str = "another-secret-key-of-the-tests-0123";

#[tokio::test(flavor = "multi_thread")]
async fn a_chain_longer_than_what_is_read_at_once_is_walked_to_its_end() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let app = world.app();
    let mut tx = operator_tx(app, &tenant).await;
    for _ in 0..1001 {
        let entry = Entry {
            actor: "operator:test".to_owned(),
            action: Action::ApiKeyRevoke,
            target: None,
            detail: Detail::default().id("key_id", ApiKeyId::generate()),
        };
        audit::append(&app.keyring, &mut tx, entry, app.clock.now())
            .await
            .unwrap();
    }
    tx.commit().await.unwrap();
    let (whole, lines) = verify_command(&world, &["--tenant", &tenant.id], SECRET_KEY);
    assert!(whole);
    assert_eq!(lines, format!("{} 1003 entries, ok\n", tenant.id));
    let sql = "delete from audit where seq = 1003";
    execute(&mut world.superuser().await, sql).await.unwrap();
    let (whole, lines) = verify_command(&world, &["--tenant", &tenant.id], SECRET_KEY);
    assert!(!whole);
    assert_eq!(
        lines,
        format!("{} BROKEN at entry 1003: missing\n", tenant.id)
    );
}

/// What somebody past every policy does to a chain of four entries, and what is said.
const TAMPERING: [(&str, &str); 27] = [
    // A column of an entry.
    (
        "update audit set at = at + interval '1 microsecond' where seq = 2",
        "entry 2: changed",
    ),
    (
        "update audit set at = 'infinity' where seq = 2",
        "entry 2: changed",
    ),
    (
        "update audit set actor = 'operator:local' where seq = 2",
        "entry 2: changed",
    ),
    (
        "update audit set action = 'api_key.revoke' where seq = 2",
        "entry 2: changed",
    ),
    (
        "update audit set target = 'key_x' where seq = 2",
        "entry 2: changed",
    ),
    (
        "update audit set target = null where seq = 2",
        "entry 2: changed",
    ),
    (
        "update audit set detail = '{\"scopes\": [\"read\"]}' where seq = 2",
        "entry 2: changed",
    ),
    (
        "update audit set detail = '{\"x\": 1e999}' where seq = 2",
        "entry 2: changed",
    ),
    (
        "update audit set key_id = '\\x01020304' where seq = 2",
        "entry 2: made with the key 01020304, not in THROUGHLINE_SECRET_KEY",
    ),
    (
        "update audit set prev_hash = sha256('x') where seq = 2",
        "entry 2: changed",
    ),
    (
        "update audit set hash = sha256('x') where seq = 2",
        "entry 2: changed",
    ),
    (
        "update audit set seq = 20 where seq = 2",
        "entry 2: missing",
    ),
    ("update audit set seq = 5 where seq = 4", "entry 4: missing"),
    (
        "update audit set tenant_id = '00000000-0000-0000-0000-000000000000', seq = 100000 where seq = 4",
        "entry 4: missing",
    ),
    // WholeUser entries.
    ("delete from audit where seq = 1", "entry 1: missing"),
    ("delete from audit where seq = 3", "entry 3: missing"),
    ("delete from audit where seq = 4", "entry 4: missing"),
    ("delete from audit where seq > 1", "entry 2: missing"),
    (
        "update audit set seq = case seq when 2 then 103 else 102 end where seq in (2, 3);
      update audit set seq = seq - 100 where seq > 100",
        "entry 2: changed",
    ),
    // The head.
    ("update audit_heads set seq = 3", "the head: changed"),
    (
        "update audit_heads set hash = sha256('x')",
        "the head: changed",
    ),
    (
        "update audit_heads set at = 'infinity'",
        "the head: changed",
    ),
    (
        "update audit_heads set key_id = '\\x01020304'",
        "the head: made with the key 01020304, not in THROUGHLINE_SECRET_KEY",
    ),
    (
        "update audit_heads set mac = sha256('x')",
        "the head: changed",
    ),
    ("delete from audit_heads", "the head: missing"),
    // The last entry, and the head moved back as well as one can without the key.
    (
        "delete from audit where seq = 4;
      update audit_heads h set seq = a.seq, hash = a.hash, at = a.at from audit a
       where a.tenant_id = h.tenant_id and a.seq = 3",
        "the head: changed",
    ),
    (
        "delete from audit; delete from audit_heads",
        "the head: missing",
    ),
];

#[tokio::test(flavor = "multi_thread")]
async fn whatever_is_changed_or_removed_is_found_and_named() {
    let world = World::new().await;
    let mut superuser = world.superuser().await;
    let untouched = world.tenant("untouched").await;
    let mut expected = vec![String::new(), format!("{} 2 entries, ok", untouched.id)];
    let mut moved = 0;
    for (sql, said) in TAMPERING {
        let tenant = world.tenant("tampered").await;
        world.api_key(&tenant, "chat").await;
        world.api_key(&tenant, "read").await;
        // The statements name no tenant: a view of one tenant's rows stands in for each table.
        let uuid = tenant.uuid();
        let views = format!(
            "create schema tampered;
             create view tampered.audit as select * from public.audit where tenant_id = '{uuid}';
             create view tampered.audit_heads as
               select * from public.audit_heads where tenant_id = '{uuid}';
             set search_path = tampered, public"
        );
        execute(&mut superuser, &views).await.unwrap();
        let changed = execute(&mut superuser, sql).await.unwrap();
        assert!(changed > 0, "{sql}");
        execute(
            &mut superuser,
            "reset search_path; drop schema tampered cascade",
        )
        .await
        .unwrap();
        moved += usize::from(sql.contains("set tenant_id"));
        let (whole, line) = verify_command(&world, &["--tenant", &tenant.id], SECRET_KEY);
        assert!(!whole, "unnoticed: {sql}");
        assert_eq!(line, format!("{} BROKEN at {said}\n", tenant.id), "{sql}");
        expected.push(line.trim().to_owned());
    }
    assert_eq!(moved, 1);
    // The operator's own chain has the making of each tenant, and far behind them the entry that was moved there.
    let made = TAMPERING.len() + 1;
    expected[0] = format!(
        "{} BROKEN at entry {}: missing",
        TenantId::OPERATOR,
        made + 1
    );
    let (whole, lines) = verify_command(&world, &[], SECRET_KEY);
    assert!(!whole);
    let mut lines: Vec<_> = lines.lines().map(str::to_owned).collect();
    lines.sort();
    expected.sort();
    assert_eq!(lines, expected);

    let columns: Vec<String> = sqlx::query_scalar(
        "select column_name::text from information_schema.columns
          where table_schema = 'public' and table_name in ('audit', 'audit_heads')",
    )
    .fetch_all(&mut superuser)
    .await
    .unwrap();
    for column in columns {
        let set = format!("set {column} = ");
        let tried = TAMPERING.iter().any(|(sql, _)| sql.contains(&set));
        assert!(tried, "nobody tampered with {column}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restored_head_and_a_restarted_chain_are_found() {
    let world = World::new().await;
    let mut superuser = world.superuser().await;
    let put_back = world.tenant("put back").await;
    let emptied = world.tenant("emptied").await;
    execute(
        &mut superuser,
        "create table kept as select * from audit_heads",
    )
    .await
    .unwrap();
    world.api_key(&put_back, "chat").await;
    execute(
        &mut superuser,
        "update audit_heads h set seq = k.seq, hash = k.hash, at = k.at, key_id = k.key_id, mac = k.mac
           from kept k where k.tenant_id = h.tenant_id",
    )
    .await
    .unwrap();
    let uuid = emptied.uuid();
    for table in ["audit", "audit_heads"] {
        let sql = format!("delete from {table} where tenant_id = '{uuid}'");
        execute(&mut superuser, &sql).await.unwrap();
    }
    world.api_key(&emptied, "chat").await;
    let (whole, lines) = verify_command(&world, &[], SECRET_KEY);
    assert!(!whole);
    for (tenant, said) in [
        (
            &put_back,
            "the head: mismatch, it is at entry 2 and the last is 3",
        ),
        (
            &emptied,
            "entry 1: not the making of the tenant, with which it began",
        ),
    ] {
        assert!(
            lines.contains(&format!("{} BROKEN at {said}\n", tenant.id)),
            "{lines}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_head_is_never_built_upon() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let mut superuser = world.superuser().await;
    execute(
        &mut superuser,
        "delete from audit where seq = 2;
         update audit_heads h set seq = a.seq, hash = a.hash from audit a where a.tenant_id = h.tenant_id",
    )
    .await
    .unwrap();
    let body = json!({"name": "x", "scopes": ["chat"]});
    let reply = world.post(&tenant.key, "/v1/api-keys", body).await;
    reply.expect_problem(500, "internal");
    let keys = world.get(&tenant.key, "/v1/api-keys").await.expect(200);
    assert_eq!(keys.list().len(), 1, "no effect without its entry");
    let (whole, lines) = verify_command(&world, &["--tenant", &tenant.id], SECRET_KEY);
    assert!(!whole);
    assert_eq!(
        lines,
        format!("{} BROKEN at the head: changed\n", tenant.id)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_service_adds_and_reads_entries_of_its_tenant_and_can_do_nothing_else() {
    let world = World::new().await;
    let own = world.tenant("own").await;
    let other = world.tenant("other").await;
    let url = cluster().service_url(&world.database);
    let mut service = PgConnection::connect(&url).await.unwrap();
    let enter = format!("set app.tenant_id = '{}'", own.uuid());
    execute(&mut service, &enter).await.unwrap();
    for sql in [
        "update audit set actor = actor",
        "update audit set seq = seq + 100",
        "delete from audit",
        "truncate audit",
        "delete from audit_heads",
        "truncate audit_heads",
        "update audit_heads set tenant_id = tenant_id",
        "alter table audit disable row level security",
    ] {
        let refused = execute(&mut service, sql).await.unwrap_err();
        let code = refused
            .as_database_error()
            .unwrap()
            .code()
            .unwrap()
            .into_owned();
        assert_eq!(code, "42501", "{sql}");
    }
    for table in ["audit", "audit_heads"] {
        let sql = AssertSqlSafe(format!("select distinct tenant_id::text from {table}"));
        let seen: Vec<String> = sqlx::query_scalar(sql)
            .fetch_all(&mut service)
            .await
            .unwrap();
        assert_eq!(seen, [own.uuid().to_string()]);
    }
    let listed = world.get(&own.key, "/v1/audit").await;
    assert!(listed.body.contains(&own.id));
    assert!(!listed.body.contains(&other.id) && !listed.body.contains(&key_id(&other)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chain_outlives_the_rotation_of_its_key() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let mut config = node_config(&world.database, cluster().redis_url());
    config.secret_keys = vec![NEW_KEY.into(), SECRET_KEY.into()];
    let rotated = App::build(config, world.clock.clone()).await.unwrap();
    let mut tx = operator_tx(&rotated, &tenant).await;
    let entry = Entry {
        actor: "operator:test".to_owned(),
        action: Action::TenantSuspend,
        target: Some(tenant.id.clone()),
        detail: Detail::default(),
    };
    audit::append(&rotated.keyring, &mut tx, entry, world.clock.now())
        .await
        .unwrap();
    tx.commit().await.unwrap();
    let both = format!("{NEW_KEY},{SECRET_KEY}");
    let said = |keys: &str| verify_command(&world, &["--tenant", &tenant.id], keys);
    assert_eq!(
        said(&both),
        (true, format!("{} 3 entries, ok\n", tenant.id))
    );
    for (keys, entry) in [(NEW_KEY, 1), (SECRET_KEY, 3)] {
        let (whole, line) = said(keys);
        let expected = format!("{} BROKEN at entry {entry}: made with the key ", tenant.id);
        assert!(!whole && line.starts_with(&expected), "{line}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn verifying_a_tenant_that_is_not_there_fails_with_one_line() {
    let world = World::new().await;
    let output = throughline(&[
        "audit",
        "verify",
        "--tenant",
        "ten_01a1e2373db47013a539524902c63338",
    ])
    .envs(node_environment(&world.database, cluster().redis_url()))
    .output()
    .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let line = String::from_utf8(output.stderr).unwrap();
    assert_eq!(
        line,
        "throughline: there is no tenant ten_01a1e2373db47013a539524902c63338\n"
    );
}
