//! The audit: an entry for each change, in one chain a tenant that cannot be forked, changed or shortened
//! unnoticed.

use crate::support::Fields;
use futures_util::future::join_all;
use reqwest::Method;
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use throughline::app::App;
use throughline::audit;
use throughline::audit::verify::{Verdict, verify};
use throughline::domain::tenant::audit::{Action, Detail, Entry};
use throughline::ids::{ApiKeyId, TenantId};
use throughline::store::TenantTx;

use crate::support::servers::cluster::cluster;
use crate::support::servers::process::throughline;
use crate::support::world::{OPERATOR_KEY, SECRET_KEY, node_config, node_environment};
use crate::support::{Reply, Tenant, World};

const NEW_KEY: &str = "another-secret-key-of-the-tests-0123";

/// A tenant's entries, oldest first.
async fn entries(world: &World, tenant: &Tenant) -> Vec<Value> {
    let page = world.get(&tenant.key, "/v1/audit?limit=200").await;
    let mut rows = page.list();
    rows.reverse();
    rows
}

/// Actor, action and target of each entry.
fn told(entries: &[Value]) -> Vec<(&str, &str, &str)> {
    entries
        .iter()
        .map(|row| {
            let member = |name: &str| row.text(name);
            (member("actor"), member("action"), member("target"))
        })
        .collect()
}

fn key_id(tenant: &Tenant) -> String {
    let parsed = throughline::domain::tenant::api_key::PresentedKey::parse(&tenant.key).unwrap();
    parsed.id.to_string()
}

async fn execute(connection: &mut PgConnection, sql: &str) -> Result<u64, sqlx::Error> {
    let done = sqlx::raw_sql(AssertSqlSafe(sql.to_owned()))
        .execute(connection)
        .await?;
    Ok(done.rows_affected())
}

/// `throughline audit verify` with these keys: whether it was content, and what it printed.
fn verify_command(world: &World, args: &[&str], secret_keys: &str) -> (bool, String) {
    let output = throughline(&[&["audit", "verify"], args].concat())
        .envs(node_environment(&world.database, cluster().redis_url()))
        .env("THROUGHLINE_SECRET_KEY", secret_keys)
        .output()
        .unwrap();
    let code = output.status.code();
    assert!(matches!(code, Some(0 | 1)), "{output:?}");
    (code == Some(0), String::from_utf8(output.stdout).unwrap())
}

async fn enter(app: &App, tenant: &Tenant) -> TenantTx {
    let mut tx = throughline::auth::OperatorCaller::local()
        .begin(&app.db)
        .await
        .unwrap();
    tx.operator_enter(tenant.id.parse().unwrap()).await.unwrap();
    tx
}

#[tokio::test(flavor = "multi_thread")]
async fn every_change_is_an_entry_with_ids_and_no_text() {
    let world = World::new().await;
    let tenant = world.tenant("canary-tenant").await;
    let body =
        json!({"name": "canary-key", "scopes": ["bridge", "read"], "platforms": ["canaryirc"]});
    let made = world
        .post(&tenant.key, "/v1/api-keys", body)
        .await
        .expect(201);
    let made = made.text("id");
    let path = format!("/v1/api-keys/{made}");
    world.delete(&tenant.key, &path).await.expect(204);
    for change in ["suspend", "resume"] {
        let path = format!("/v1/tenants/{}/{change}", tenant.id);
        world.post(OPERATOR_KEY, &path, json!({})).await.expect(200);
    }
    crate::support::eventually("resumed", std::time::Duration::from_secs(2), async || {
        world.get(&tenant.key, "/v1/tenant").await.status == 200
    })
    .await;
    let entries = entries(&world, &tenant).await;
    let first_key = key_id(&tenant);
    let operator = entries[0].text("actor");
    assert!(operator.starts_with("operator:"), "{operator}");
    assert_eq!(
        told(&entries),
        [
            (operator, "tenant.create", tenant.id.as_str()),
            (operator, "api_key.create", first_key.as_str()),
            (first_key.as_str(), "api_key.create", made),
            (first_key.as_str(), "api_key.revoke", made),
            (operator, "tenant.suspend", tenant.id.as_str()),
            (operator, "tenant.resume", tenant.id.as_str()),
        ]
    );
    assert_eq!(entries[2]["detail"], json!({"scopes": ["bridge", "read"]}));
    for (place, entry) in entries.iter().enumerate() {
        assert_eq!(entry["seq"], place + 1);
        assert_eq!(entry.text("hash").len(), 64);
    }
    let last = entries.last().unwrap();
    let head = world.get(&tenant.key, "/v1/audit/head").await.expect(200);
    let expected = json!({"seq": last["seq"], "hash": last["hash"], "at": last["at"]});
    assert_eq!(head, expected);
    let dump: String = sqlx::query_scalar("select string_agg(a::text, ' ') from audit a")
        .fetch_one(&mut world.superuser().await)
        .await
        .unwrap();
    assert!(!dump.contains("canary"), "{dump}");
    let (whole, lines) = verify_command(&world, &[], SECRET_KEY);
    assert!(whole, "{lines}");
    assert!(
        lines.contains(&format!("{} 6 entries, ok\n", tenant.id)),
        "{lines}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_changes_nothing_adds_no_entry() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    let (id, _) = world.api_key(&tenant, "read").await;
    for _ in 0..3 {
        let path = format!("/v1/api-keys/{id}");
        world.delete(&tenant.key, &path).await.expect(204);
        let request = world
            .request(Method::POST, "/v1/api-keys", &tenant.key)
            .header("idempotency-key", "once")
            .json(&json!({"name": "once", "scopes": ["read"]}));
        Reply::of(request).await.expect(201);
        let refused = json!({"name": "refused", "scopes": []});
        world
            .post(&tenant.key, "/v1/api-keys", refused)
            .await
            .expect(422);
        let path = format!("/v1/tenants/{}/resume", tenant.id);
        world.post(OPERATOR_KEY, &path, json!({})).await.expect(200);
    }
    let entries = entries(&world, &tenant).await;
    let actions: Vec<&str> = told(&entries)
        .into_iter()
        .map(|(_, action, _)| action)
        .collect();
    let [create, key] = ["tenant.create", "api_key.create"];
    assert_eq!(actions, [create, key, key, "api_key.revoke", key]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_made_on_the_command_line_is_the_local_operators_doing() {
    let world = World::new().await;
    let output = throughline(&["tenant", "create", "Acme"])
        .envs(node_environment(&world.database, cluster().redis_url()))
        .output()
        .unwrap();
    let made: Value = serde_json::from_slice(&output.stdout).unwrap();
    let tenant = Tenant {
        id: made.id(),
        key: made.text("api_key").to_owned(),
    };
    let entries = entries(&world, &tenant).await;
    let expected = [
        ("operator:local", "tenant.create", tenant.id.clone()),
        ("operator:local", "api_key.create", key_id(&tenant)),
    ];
    let expected: Vec<_> = expected
        .iter()
        .map(|(a, b, c)| (*a, *b, c.as_str()))
        .collect();
    assert_eq!(told(&entries), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_list_is_paged_newest_first_and_filtered() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    for _ in 0..3 {
        world.api_key(&tenant, "chat").await;
    }
    let seqs = |page: &Value| -> Vec<i64> {
        let rows = page.list().iter();
        rows.map(|row| row.number("seq")).collect()
    };
    let get = async |path: &str| world.get(&tenant.key, path).await;
    let first = get("/v1/audit?limit=3").await.expect(200);
    assert_eq!(seqs(&first), [5, 4, 3]);
    let cursor = first.text("next_cursor");
    let second = get(&format!("/v1/audit?limit=3&cursor={cursor}"))
        .await
        .expect(200);
    assert_eq!(seqs(&second), [2, 1]);
    assert!(second["next_cursor"].is_null());

    let made = get("/v1/audit?action=api_key.create&limit=2")
        .await
        .expect(200);
    assert_eq!(seqs(&made), [5, 4]);
    let own = get(&format!("/v1/audit?actor={}", key_id(&tenant)))
        .await
        .expect(200);
    assert_eq!(seqs(&own), [5, 4, 3]);
    let both = "/v1/audit?action=tenant.create&actor=nobody";
    assert_eq!(seqs(&get(both).await.expect(200)), Vec::<i64>::new());

    let other_filter = format!("/v1/audit?action=api_key.create&cursor={cursor}");
    get(&other_filter)
        .await
        .expect_problem(400, "invalid_cursor");
    let problem = get("/v1/audit?action=nonsense")
        .await
        .expect_problem(400, "invalid_request");
    assert_eq!(problem["errors"][0]["pointer"], "/query/action");
}

#[tokio::test(flavor = "multi_thread")]
async fn thirty_two_writers_on_two_nodes_make_one_chain_that_is_whole_at_any_time() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    let body = json!({"name": "racer", "scopes": ["chat"]});
    let client = reqwest::Client::new();
    let writers = (0..32).map(|n| {
        let request = client
            .post(world.url_on(n % 2, "/v1/api-keys"))
            .bearer_auth(&tenant.key)
            .json(&body);
        Reply::of(request)
    });
    let watching = async {
        loop {
            let mut tx = enter(world.app(), &tenant).await;
            let verdict = verify(&world.app().keyring, &mut tx).await.unwrap();
            tx.commit().await.unwrap();
            match verdict {
                Verdict::Whole { entries: 34 } => return,
                Verdict::Whole { .. } => {}
                Verdict::Broken(flaw) => panic!("{flaw:?}"),
            }
        }
    };
    let (replies, ()) = tokio::join!(join_all(writers), watching);
    let mut made: Vec<String> = replies.iter().map(|reply| reply.expect(201).id()).collect();
    let entries = entries(&world, &tenant).await;
    let seqs: Vec<i64> = entries.iter().map(|row| row.number("seq")).collect();
    assert_eq!(seqs, (1..=34).collect::<Vec<_>>());
    let mut targets: Vec<_> = entries[2..]
        .iter()
        .map(|row| row["target"].clone())
        .collect();
    targets.sort_by_key(ToString::to_string);
    made.sort();
    assert_eq!(targets, made);
}

/// Bridge keys hold the tenant's row, revocations hold a key's; both then want the head.
#[tokio::test(flavor = "multi_thread")]
async fn changes_that_hold_other_locks_wait_for_the_head_without_a_deadlock() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    let mut doomed = Vec::new();
    for _ in 0..16 {
        doomed.push(world.api_key(&tenant, "chat").await.0);
    }
    let makes = (0..16).map(|_| world.api_key(&tenant, "bridge"));
    let revokes = doomed.iter().map(async |id| {
        let path = format!("/v1/api-keys/{id}");
        world.delete(&tenant.key, &path).await.expect(204)
    });
    let suspensions = (0..4).map(async |n| {
        let change = ["resume", "suspend"][n % 2];
        let path = format!("/v1/tenants/{}/{change}", world.tenant("other").await.id);
        world.post(OPERATOR_KEY, &path, json!({})).await.expect(200)
    });
    tokio::join!(join_all(makes), join_all(revokes), join_all(suspensions));
    assert_eq!(entries(&world, &tenant).await.len(), 2 + 16 + 16 + 16);
    let (whole, lines) = verify_command(&world, &[], SECRET_KEY);
    assert!(whole, "{lines}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chain_longer_than_what_is_read_at_once_is_walked_to_its_end() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let app = world.app();
    let mut tx = enter(app, &tenant).await;
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
    // Whole entries.
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
async fn a_head_put_back_alone_and_a_chain_begun_again_are_found() {
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
async fn a_head_that_somebody_else_made_is_never_built_upon() {
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
    let mut tx = enter(&rotated, &tenant).await;
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

/// Each entry is written after the one before: a client that polls must not make a queue of them.
#[tokio::test(flavor = "multi_thread")]
async fn reading_a_conversation_again_is_one_entry_a_minute() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let ada = crate::support::people::person(&world, &tenant, "ada").await;
    let session = world.session(&ada.token, json!({})).await;
    let path = format!("/v1/sessions/{}/messages", session.text("id"));
    let entries = async || {
        let read = world.walk(&tenant.key, "/v1/audit?action=conversation.read");
        read.await.len()
    };
    for _ in 0..5 {
        world.get(&tenant.key, &path).await.expect(200);
    }
    assert_eq!(entries().await, 1);
    let (_, other) = world.api_key(&tenant, "admin").await;
    world.get(&other, &path).await.expect(200);
    assert_eq!(entries().await, 2);
    world.clock.advance(std::time::Duration::from_secs(60));
    world.get(&tenant.key, &path).await.expect(200);
    assert_eq!(entries().await, 3);
}
