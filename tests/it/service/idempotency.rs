//! `Idempotency-Key`: a retry gives the first answer, from any node.

use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};
use throughline::dev::service_caller;
use throughline::store::db::idempotency::{RequestName, claim};

use crate::support::world::OPERATOR_KEY;
use crate::support::{Fields, Reply, Tenant, World, eventually};

async fn create(
    world: &World,
    node: usize,
    key: &str,
    idempotency_key: &str,
    body: &Value,
) -> Reply {
    let request = reqwest::Client::new()
        .post(world.url_on(node, "/v1/api-keys"))
        .bearer_auth(key)
        .header("idempotency-key", idempotency_key)
        .json(body);
    Reply::of(request).await
}

async fn count_keys(world: &World, tenant: &Tenant) -> usize {
    let keys = world.get(&tenant.key, "/v1/api-keys").await.expect(200);
    keys.list().len()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_request_gives_the_first_answer_from_any_node() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    let body = json!({"name": "bot", "scopes": ["chat"]});
    let first = create(&world, 0, &tenant.key, "k1", &body).await;
    let again = create(&world, 1, &tenant.key, "k1", &body).await;
    assert_eq!(first.expect(201), again.expect(201));
    assert!(first.headers.get("idempotency-replayed").is_none());
    assert_eq!(again.header("idempotency-replayed"), "true");
    assert_eq!(count_keys(&world, &tenant).await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_at_once_on_two_nodes_make_one() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    let body = json!({"name": "bot", "scopes": ["chat"]});
    let requests = (0..20).map(|n| create(&world, n % 2, &tenant.key, "race", &body));
    let replies = futures_util::future::join_all(requests).await;
    let answers: Vec<Value> = replies.iter().map(|reply| reply.expect(201)).collect();
    assert!(answers.iter().all(|answer| *answer == answers[0]));
    let fresh = |reply: &&Reply| reply.headers.get("idempotency-replayed").is_none();
    assert_eq!(replies.iter().filter(fresh).count(), 1);
    assert_eq!(count_keys(&world, &tenant).await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_body_is_a_conflict_and_another_credential_is_another_request() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let (_, second_admin) = world.api_key(&tenant, "admin").await;
    let body = json!({"name": "bot", "scopes": ["chat"]});
    create(&world, 0, &tenant.key, "k", &body).await.expect(201);
    let other = json!({"name": "cat", "scopes": ["chat"]});
    let conflict = create(&world, 0, &tenant.key, "k", &other).await;
    conflict.expect_problem(409, "idempotency_conflict");
    assert_eq!(conflict.header("x-should-retry"), "false");
    let separate = create(&world, 0, &second_admin, "k", &body).await;
    separate.expect(201);
    assert!(separate.headers.get("idempotency-replayed").is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_request_does_not_use_its_key_up() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let wrong = json!({"name": "bot", "scopes": ["bridge"]});
    create(&world, 0, &tenant.key, "k", &wrong)
        .await
        .expect_problem(422, "invalid_value");
    let right = json!({"name": "bot", "scopes": ["bridge"], "platforms": ["irc"]});
    create(&world, 0, &tenant.key, "k", &right)
        .await
        .expect(201);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_is_replayed_for_ten_minutes_and_an_answer_for_a_day() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let body = json!({"name": "bot", "scopes": ["chat"]});
    let first = create(&world, 0, &tenant.key, "k", &body).await.expect(201);
    world.clock.advance(Duration::from_secs(601));
    let later = create(&world, 0, &tenant.key, "k", &body).await.expect(201);
    assert_eq!(later["id"], first["id"]);
    assert!(first["key"].is_string() && later["key"].is_null());
    world.clock.advance(Duration::from_secs(24 * 3600));
    let next_day = create(&world, 0, &tenant.key, "k", &body).await.expect(201);
    assert_ne!(
        next_day["id"], first["id"],
        "a day later the key is free again"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn stored_answers_are_encrypted() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let body = json!({"name": "canary-name", "scopes": ["chat"]});
    create(&world, 0, &tenant.key, "k", &body).await.expect(201);
    let mut superuser = world.superuser().await;
    let stored: Vec<u8> = sqlx::query_scalar("select answer_enc || secrets_enc from idempotency")
        .fetch_one(&mut superuser)
        .await
        .unwrap();
    let text = String::from_utf8_lossy(&stored);
    assert!(!text.contains("canary-name") && !text.contains("tl_"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operators_retry_makes_one_tenant() {
    let world = World::new().await;
    let make = async || {
        let request = world
            .request(Method::POST, "/v1/tenants", OPERATOR_KEY)
            .header("idempotency-key", "first-customer")
            .json(&json!({"name": "Acme"}));
        Reply::of(request).await.expect(201)
    };
    assert_eq!(make().await, make().await);
    let tenants = world.get(OPERATOR_KEY, "/v1/tenants").await.expect(200);
    assert_eq!(tenants.list().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_is_empty_too_long_or_not_visible_is_refused() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let body = json!({"name": "bot", "scopes": ["chat"]});
    for wrong in ["", "a b", &"x".repeat(256)] {
        let reply = create(&world, 0, &tenant.key, wrong, &body).await;
        reply.expect_problem(400, "invalid_idempotency_key");
    }
    assert_eq!(count_keys(&world, &tenant).await, 1);
}

/// Old nodes store neither; whoever uses the key again says both.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_is_used_again_is_stored_with_who_used_it() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let name = RequestName {
        principal: "key_1/telegram:5".to_owned(),
        route: "r".to_owned(),
        key: "k".to_owned(),
    };
    let now = world.clock.now();
    for again in [false, true] {
        let caller = service_caller(tenant.id.parse().unwrap());
        let mut tx = caller.begin(&world.app().db).await.unwrap();
        assert!(claim(&mut tx, &name, &[], [0; 32], now, now).await.unwrap());
        tx.commit().await.unwrap();
        let mut superuser = world.superuser().await;
        let stored: (Option<String>, Option<String>) =
            sqlx::query_as("select caller, acted_for from idempotency where key = 'k'")
                .fetch_one(&mut superuser)
                .await
                .unwrap();
        let expected = (Some("key_1".to_owned()), Some("telegram:5".to_owned()));
        assert_eq!(stored, expected, "again: {again}");
        sqlx::query("update idempotency set caller = null, acted_for = null")
            .execute(&mut superuser)
            .await
            .unwrap();
    }
}

/// The stored keys, each as text.
async fn stored_keys(world: &World) -> Vec<String> {
    sqlx::query_scalar("select key from idempotency order by created_at")
        .fetch_all(&mut world.superuser().await)
        .await
        .unwrap()
}

/// Waits until the nodes know that none of them is an older one.
async fn all_are_new(world: &World) {
    let all = async || {
        let knows = |node: &throughline::server::Node| {
            node.app
                .hashes_names
                .load(std::sync::atomic::Ordering::Relaxed)
        };
        world.nodes.iter().all(knows)
    };
    eventually(
        "the nodes have seen each other",
        Duration::from_secs(5),
        all,
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_client_chose_as_its_key_is_not_stored() {
    let world = World::with_nodes(2).await;
    all_are_new(&world).await;
    let tenant = world.tenant("Acme").await;
    let body = json!({"name": "bot", "scopes": ["chat"]});
    let first = create(&world, 0, &tenant.key, "order-of-jane-doe", &body).await;
    let again = create(&world, 1, &tenant.key, "order-of-jane-doe", &body).await;
    assert_eq!(first.expect(201), again.expect(201));
    let dump: String = sqlx::query_scalar("select string_agg(i::text, ' ') from idempotency i")
        .fetch_one(&mut world.superuser().await)
        .await
        .unwrap();
    assert!(!dump.contains("jane"), "{dump}");
    let other = json!({"name": "another", "scopes": ["chat"]});
    let conflict = create(&world, 1, &tenant.key, "order-of-jane-doe", &other).await;
    conflict.expect_problem(409, "idempotency_conflict");
}

#[tokio::test(flavor = "multi_thread")]
async fn while_an_older_node_lives_names_are_stored_as_it_looks_for_them_and_found_afterwards() {
    let world = World::with_nodes(2).await;
    all_are_new(&world).await;
    let tenant = world.tenant("Acme").await;
    let body = json!({"name": "bot", "scopes": ["chat"]});
    let hashed = create(&world, 0, &tenant.key, "before", &body).await;
    let old = "insert into nodes (boot_id, seen_at) values (gen_random_uuid(), now() + interval '1 hour')";
    let mut superuser = world.superuser().await;
    sqlx::query(old).execute(&mut superuser).await.unwrap();
    for node in &world.nodes {
        throughline::jobs::heartbeat::tick(&node.app).await;
    }
    let plain = create(&world, 0, &tenant.key, "during", &body).await;
    assert_eq!(stored_keys(&world).await[1..], ["during"]);
    let again = create(&world, 1, &tenant.key, "before", &body).await;
    assert_eq!(hashed.expect(201), again.expect(201));
    sqlx::query("delete from nodes where version is null")
        .execute(&mut superuser)
        .await
        .unwrap();
    throughline::jobs::heartbeat::tick(&world.nodes[1].app).await;
    // One node knows that the older is gone, the other does not: both find both.
    for node in [0, 1] {
        for (key, first) in [("before", &hashed), ("during", &plain)] {
            let again = create(&world, node, &tenant.key, key, &body).await;
            assert_eq!(first.expect(201), again.expect(201));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_at_once_that_would_be_stored_in_two_forms_are_one_effect() {
    let world = World::with_nodes(2).await;
    all_are_new(&world).await;
    let tenant = world.tenant("Acme").await;
    let body = json!({"name": "bot", "scopes": ["chat"]});
    let plain = &world.nodes[0].app.hashes_names;
    plain.store(false, std::sync::atomic::Ordering::Relaxed);
    let mut holder = world.superuser().await;
    for sql in ["begin", "select 1 from tenants for update"] {
        sqlx::query(sql).execute(&mut holder).await.unwrap();
    }
    let let_go = async {
        world.waiting(2).await;
        sqlx::query("commit").execute(&mut holder).await.unwrap();
    };
    let (one, two, ()) = tokio::join!(
        create(&world, 0, &tenant.key, "twins", &body),
        create(&world, 1, &tenant.key, "twins", &body),
        let_go
    );
    assert_eq!(one.expect(201), two.expect(201));
    assert_eq!(count_keys(&world, &tenant).await, 2);
}
