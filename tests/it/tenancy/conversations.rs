//! Two tenants whose conversations have equal ids, names and keys never meet: with row-level security,
//! and with the predicates of the statements alone.

use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};
use sqlx::AssertSqlSafe;
use throughline::domain::conversation::summary_sources::SummarySources;

use crate::support::conversations::user_message;
use crate::support::data::catalog::{copy_rows, disable_row_level_security, dump_people};
use crate::support::data::summaries::compress_with_sources;
use crate::support::{Fields, Reply, Tenant, World, eventually};

#[tokio::test(flavor = "multi_thread")]
async fn conversations_with_equal_ids_never_meet() {
    let world = World::new().await;
    equal_conversations(&world).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn conversations_with_equal_ids_never_meet_even_without_row_level_security() {
    let world = World::new().await;
    disable_row_level_security(&mut world.superuser().await).await;
    equal_conversations(&world).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_sources_of_a_summary_are_its_own_tenants_even_without_row_level_security() {
    let world = World::new().await;
    disable_row_level_security(&mut world.superuser().await).await;
    let [a, b] = [world.tenant("a").await, world.tenant("b").await];
    let session = world.write_dm(&a.key, "telegram:1", "one").await["session_id"].clone();
    for text in ["two", "three"] {
        world.write_in(&a.key, "telegram:1", &session, text).await;
    }
    let session = session.as_str().unwrap();
    let (child, sources) = compress_with_sources(&world, &a, session, "of one").await;
    copy_rows(&mut world.superuser().await, a.uuid(), b.uuid()).await;
    let change = format!(
        "update messages set identity_id = gen_random_uuid() where tenant_id = '{b}' and kind = 'normal';
         update messages set source_identities = null where tenant_id = '{b}' and kind = 'summary'",
        b = b.uuid()
    );
    sqlx::raw_sql(AssertSqlSafe(change))
        .execute(&mut world.superuser().await)
        .await
        .unwrap();
    let of_b = dump_people(&mut world.superuser().await, b.uuid()).await;
    let (_, again) = compress_with_sources(&world, &a, &child, "of one again").await;
    assert!(matches!(&again, SummarySources::Complete(one) if one.len() == 1));
    assert_eq!(again, sources);
    let now = dump_people(&mut world.superuser().await, b.uuid()).await;
    assert_eq!(now, of_b);
}

/// Every row of one tenant's conversations, once more in the other, with another text.
async fn copy_conversations(world: &World, from: &Tenant, to: &Tenant) {
    let mut superuser = world.superuser().await;
    copy_rows(&mut superuser, from.uuid(), to.uuid()).await;
    let sql = format!(
        "update conversations set title = replace(title, 'canary-a', 'canary-b') where tenant_id = '{to}';
         update messages set content = replace(content::text, 'canary-a', 'canary-b')::json where tenant_id = '{to}'",
        to = to.uuid()
    );
    sqlx::raw_sql(AssertSqlSafe(sql))
        .execute(&mut superuser)
        .await
        .unwrap();
}

/// Everything the API shows of a tenant's conversations, and every row of them.
async fn everything(world: &World, tenant: &Tenant) -> String {
    let mut all = String::new();
    for session in world.walk(&tenant.key, "/v1/sessions").await {
        let path = format!("/v1/sessions/{}", session.id());
        all += &session.to_string();
        for part in [
            "",
            "/tip",
            "/lineage",
            "/messages",
            "/messages?scope=conversation",
            "/messages?order=desc",
        ] {
            all += &world.get(&tenant.key, &format!("{path}{part}")).await.body;
        }
    }
    all += &format!("{:?}", world.walk(&tenant.key, "/v1/session-keys").await);
    all += &dump_people(&mut world.superuser().await, tenant.uuid()).await;
    all
}

async fn equal_conversations(world: &World) {
    let a = world.tenant("a").await;
    let b = world.tenant("b").await;
    let (_, bridge) = world.api_key(&a, "bridge").await;
    let (_, chat) = world.api_key(&a, "chat").await;
    let text = |n: i32| user_message(&format!("canary-a {n}"));
    // Of a person, so that their accounts are looked up too.
    let body = json!({"user": "telegram:1", "session_key": "bridged", "messages": [text(0)]});
    let bridged = world.session(&bridge, body).await;
    let body = json!({"id": "same", "session_key": "same", "title": "canary-a", "messages": [text(1), text(2)]});
    world.session(&chat, body).await;
    let child = world
        .compress(&chat, "same", json!({"summary": "canary-a s"}))
        .await
        .expect(201);
    let child = child.text("session_id").to_owned();
    let other = world
        .session(&chat, json!({"session_key": "same", "messages": [text(3)]}))
        .await
        .id();
    let owner = bridged.text("user_id");
    crate::support::conversations::grant(world, &a, &bridged.id(), owner).await;
    copy_conversations(world, &a, &b).await;
    let of_b = everything(world, &b).await;
    assert!(
        of_b.contains("canary-b") && !of_b.contains("canary-a"),
        "{of_b}"
    );
    let shown = everything(world, &a).await;
    assert!(
        shown.contains("canary-a") && !shown.contains("canary-b"),
        "{shown}"
    );

    let unmoved = async |what: &str| assert_eq!(everything(world, &b).await, of_b, "{what}");
    let post = async |path: &str, body: Value| world.post(&chat, path, body).await;
    world
        .append(&chat, "same", json!([text(4)]))
        .await
        .expect(201);
    world
        .append(&chat, &child, json!([text(5)]))
        .await
        .expect(201);
    unmoved("append").await;
    let on_behalf = world
        .request(
            Method::POST,
            &format!("/v1/sessions/{}/messages", bridged.id()),
            &bridge,
        )
        .header("x-throughline-identity", "telegram:1")
        .json(&json!({"messages": [text(6)]}));
    Reply::of(on_behalf).await.expect(201);
    let user = bridged.text("user_id");
    world
        .session(&bridge, json!({"user": user, "session_key": "bridged"}))
        .await;
    unmoved("append for a person").await;
    post(
        "/v1/session-keys/same/messages",
        json!({"messages": [text(7)]}),
    )
    .await
    .expect(201);
    unmoved("append by key").await;
    let again = post(
        &format!("/v1/sessions/{child}/compress"),
        json!({"summary": "canary-a t"}),
    )
    .await
    .expect(201);
    unmoved("compress").await;
    let undone = format!("/v1/sessions/{}/uncompress", again.text("session_id"));
    post(&undone, json!({})).await.expect(200);
    unmoved("uncompress").await;
    post("/v1/sessions/same/branch", json!({}))
        .await
        .expect(201);
    unmoved("branch").await;
    world
        .patch(
            &chat,
            "/v1/sessions/same",
            json!({"title": "canary-a too", "archived": true}),
        )
        .await
        .expect(200);
    unmoved("update").await;
    post(
        "/v1/session-keys/same/switch",
        json!({ "session_id": other }),
    )
    .await
    .expect(200);
    unmoved("switch").await;
    post("/v1/session-keys/same/reset", json!({}))
        .await
        .expect(200);
    unmoved("reset").await;
    let exported = world.get(&chat, "/v1/sessions/same/export").await;
    assert!(exported.body.contains("canary-a") && !exported.body.contains("canary-b"));
    post("/v1/sessions/import", exported.expect(200))
        .await
        .expect(201);
    unmoved("export and import").await;
    let grants = format!("/v1/sessions/{}/grants", bridged.id());
    assert_eq!(world.walk(&a.key, &grants).await.len(), 1);
    world.delete(&a.key, &grants).await.expect(204);
    unmoved("grants").await;
    for query in [
        "?session_key=same",
        "?agent=main",
        &format!("?user_id={user}"),
    ] {
        let listed = world.get(&a.key, &format!("/v1/sessions{query}")).await;
        assert!(!listed.body.contains("canary-b"), "{}", listed.body);
        listed.expect(200);
    }
    world.delete(&chat, "/v1/sessions/same").await.expect(204);
    world
        .delete(&a.key, &format!("/v1/sessions/{other}"))
        .await
        .expect(204);
    let left = async || -> i64 {
        sqlx::query_scalar(
            "select count(*) from conversations where tenant_id = $1 and deleted_at is not null",
        )
        .bind(a.uuid())
        .fetch_one(&mut world.superuser().await)
        .await
        .unwrap()
    };
    eventually("a's rows are gone", Duration::from_secs(10), async || {
        throughline::jobs::tick(world.app()).await.unwrap();
        left().await == 0
    })
    .await;
    unmoved("delete").await;
    sweep_all(world, &a).await;
    unmoved("sweep").await;
    // The id is spent in one tenant and still good in the other.
    post("/v1/sessions", json!({"id": "same"}))
        .await
        .expect_problem(409, "session_id_taken");
    world
        .append(&b.key, "same", json!([user_message("still here")]))
        .await
        .expect(201);
}

/// Lets a tenant's conversations grow old, counts and sweeps them.
async fn sweep_all(world: &World, tenant: &Tenant) {
    let there = world.walk(&tenant.key, "/v1/sessions").await.len();
    assert!(there > 0);
    world.clock.advance(Duration::from_secs(2 * 24 * 3600));
    let dry = json!({"dry_run": true, "conversations_days": 1});
    let told = world
        .post(&tenant.key, "/v1/retention/sweeps", dry)
        .await
        .expect(200);
    assert_eq!(told["conversations"], there);
    let retention = json!({"retention": {"conversations_days": 1}});
    world
        .patch(&tenant.key, "/v1/tenant", retention)
        .await
        .expect(200);
    eventually("the sweep is over", Duration::from_secs(10), async || {
        throughline::jobs::tick(world.app()).await.unwrap();
        let shown = world.get(&tenant.key, "/v1/retention").await.expect(200);
        let sweep = &shown["sweep"];
        sweep["finished_at"].is_string() && sweep["examined"] == there && sweep["deleted"] == there
    })
    .await;
    assert_eq!(
        world.walk(&tenant.key, "/v1/sessions").await,
        Vec::<Value>::new()
    );
}
