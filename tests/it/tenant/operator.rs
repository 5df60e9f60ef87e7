//! What an operator sees and does: `/v1/tenants/{id}` and `/v1/operator/…`.

use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::world::OPERATOR_KEY;
use crate::support::{Fields, Reply, Tenant, World, eventually};

const NOBODY: &str = "ten_01a1e2373db47013a539524902c63338";

async fn patch(world: &World, tenant: &str, body: Value) -> Reply {
    let path = format!("/v1/tenants/{tenant}");
    Reply::of(
        world
            .request(Method::PATCH, &path, OPERATOR_KEY)
            .json(&body),
    )
    .await
}

async fn view(world: &World, tenant: &Tenant) -> Value {
    let path = format!("/v1/tenants/{}", tenant.id);
    world.get(OPERATOR_KEY, &path).await.expect(200)
}

/// The actions of an audit, oldest first.
async fn actions(world: &World, key: &str, path: &str) -> Vec<String> {
    let page = world.get(key, path).await.expect(200);
    let rows = page.list().iter().rev();
    rows.map(|row| row.text("action").to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_sees_a_tenants_limits_and_sums_of_its_use() {
    let world = World::new().await;
    let (tenant, other) = (world.tenant("Acme").await, world.tenant("Other").await);
    for (tenant, tokens) in [(&tenant, 40), (&other, 7)] {
        sqlx::query(
            "insert into usage_hourly (tenant_id, hour, agent, user_id, model, source, requests, turns,
                                       input_tokens, output_tokens)
             select $1, date_trunc('hour', now()) - make_interval(days => d), 'main',
                    '00000000-0000-0000-0000-000000000000', 'demo', 'chat', 1, 2, $2, 3
               from unnest(array[1, 5, 40]) d",
        )
        .bind(tenant.uuid())
        .bind(tokens)
        .execute(&mut world.superuser().await)
        .await
        .unwrap();
    }
    let shown = view(&world, &tenant).await;
    assert_eq!(
        (&shown["name"], &shown["state"]),
        (&json!("Acme"), &json!("active"))
    );
    assert_eq!(shown["limits"]["requests_per_minute"], 1_200_000);
    let usage = &shown["usage"];
    assert_eq!(usage["turns"], 4, "of the last 30 days: {usage}");
    assert_eq!(
        (&usage["input_tokens"], &usage["output_tokens"]),
        (&json!(80), &json!(6))
    );
    let from = (world.clock.now() - chrono::TimeDelta::days(2)).to_rfc3339();
    let path = format!(
        "/v1/tenants/{}?from={}",
        tenant.id,
        from.replace('+', "%2B")
    );
    let shown = world.get(OPERATOR_KEY, &path).await.expect(200);
    assert_eq!(shown["usage"]["input_tokens"], 40);
    for id in [NOBODY, "ten_00000000000000000000000000000000"] {
        let path = format!("/v1/tenants/{id}");
        world
            .get(OPERATOR_KEY, &path)
            .await
            .expect_problem(404, "not_found");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_patch_changes_what_it_names_and_gives_single_limits_their_default_again() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let changed = patch(
        &world,
        &tenant.id,
        json!({"name": "Acme 2", "limits": {"open_streams": 7, "concurrent_turns": 3}}),
    )
    .await
    .expect(200);
    assert_eq!(
        (&changed["name"], &changed["state"]),
        (&json!("Acme 2"), &json!("active"))
    );
    assert_eq!(changed["limits"]["open_streams"], 7);
    let body = json!({"limits": {"open_streams": null, "agents": 9}});
    let changed = patch(&world, &tenant.id, body).await.expect(200);
    let limits = &changed["limits"];
    assert_eq!(limits["open_streams"], 10_000);
    assert_eq!(
        (&limits["concurrent_turns"], &limits["agents"]),
        (&json!(3), &json!(9))
    );
    let changed = patch(&world, &tenant.id, json!({"limits": null}))
        .await
        .expect(200);
    assert_eq!(changed["limits"]["concurrent_turns"], 1_000);
    assert_eq!(changed["name"], "Acme 2");
    let wrong = json!({"name": "never", "limits": {"open_streams": 0}});
    let problem = patch(&world, &tenant.id, wrong)
        .await
        .expect_problem(422, "invalid_value");
    assert_eq!(problem["errors"][0]["pointer"], "/limits/open_streams");
    for wrong in [
        json!({"state": "deleting"}),
        json!({"nam": "x"}),
        json!({"limits": {"x": 1}}),
    ] {
        patch(&world, &tenant.id, wrong)
            .await
            .expect_problem(400, "invalid_request");
    }
    patch(&world, NOBODY, json!({}))
        .await
        .expect_problem(404, "not_found");
    assert_eq!(view(&world, &tenant).await["name"], "Acme 2");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_state_that_is_patched_suspends_and_resumes_on_every_node() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    world.get_on(1, &tenant.key, "/v1/tenant").await.expect(200);
    for (state, status) in [("suspended", 403), ("active", 200)] {
        let changed = patch(&world, &tenant.id, json!({ "state": state }))
            .await
            .expect(200);
        assert_eq!(changed["state"], state);
        eventually(
            "the other node follows",
            Duration::from_secs(1),
            async || world.get_on(1, &tenant.key, "/v1/tenant").await.status == status,
        )
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_operator_does_stands_in_its_own_audit_and_in_the_tenants() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    patch(
        &world,
        &tenant.id,
        json!({"name": "B", "state": "suspended", "limits": {"agents": 9}}),
    )
    .await
    .expect(200);
    patch(&world, &tenant.id, json!({"state": "active"}))
        .await
        .expect(200);
    let path = format!("/v1/operator/tenants/{}/api-keys", tenant.id);
    world.post(OPERATOR_KEY, &path, json!({})).await.expect(201);
    let own = actions(&world, OPERATOR_KEY, "/v1/operator/audit").await;
    let expected = [
        "tenant.create",
        "tenant.update",
        "tenant.limits",
        "tenant.suspend",
        "tenant.resume",
        "api_key.create",
    ];
    assert_eq!(own, expected);
    eventually(
        "the key is taken again",
        Duration::from_secs(2),
        async || world.get(&tenant.key, "/v1/tenant").await.status == 200,
    )
    .await;
    let mut theirs = actions(&world, &tenant.key, "/v1/audit").await;
    assert_eq!(theirs.remove(1), "api_key.create", "the first key");
    assert_eq!(theirs, expected);
    let first = world
        .get(OPERATOR_KEY, "/v1/operator/audit?limit=2")
        .await
        .expect(200);
    let cursor = first.text("next_cursor");
    let path = format!("/v1/operator/audit?limit=2&cursor={cursor}");
    assert_eq!(actions(&world, OPERATOR_KEY, &path).await, expected[2..4]);
    let filtered = "/v1/operator/audit?action=tenant.suspend";
    assert_eq!(
        actions(&world, OPERATOR_KEY, filtered).await,
        ["tenant.suspend"]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operators_new_admin_key_works_and_its_retry_shows_it_for_ten_minutes() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let path = format!("/v1/operator/tenants/{}/api-keys", tenant.id);
    let make = async || {
        let request = world
            .request(Method::POST, &path, OPERATOR_KEY)
            .header("idempotency-key", "lost");
        Reply::of(request).await
    };
    let made = make().await.expect(201);
    assert_eq!(
        (&made["scopes"], &made["expires_at"]),
        (&json!(["admin"]), &Value::Null)
    );
    let key = made.text("key").to_owned();
    world.get(&key, "/v1/audit").await.expect(200);
    let again = make().await;
    assert_eq!(again.header("idempotency-replayed"), "true");
    assert_eq!(again.expect(201)["key"], key.as_str());
    world.clock.advance(Duration::from_secs(601));
    assert_eq!(make().await.expect(201)["key"], Value::Null);
    let keys = world.get(&key, "/v1/api-keys").await.expect(200);
    assert_eq!(keys.list().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_that_is_being_deleted_is_seen_and_not_changed() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    // As it is until the job has run.
    sqlx::query("update tenants set state = 'deleting' where id = $1")
        .bind(tenant.uuid())
        .execute(&mut world.superuser().await)
        .await
        .unwrap();
    assert_eq!(view(&world, &tenant).await["state"], "deleting");
    let path = format!("/v1/operator/tenants/{}/api-keys", tenant.id);
    world
        .post(OPERATOR_KEY, &path, json!({}))
        .await
        .expect_problem(404, "not_found");
    patch(&world, &tenant.id, json!({"state": "active"}))
        .await
        .expect_problem(404, "not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_nodes_that_run_are_listed_with_their_version() {
    let world = World::with_nodes(2).await;
    sqlx::query(
        "insert into nodes (boot_id, addr, seen_at)
         values ('ffffffff-0000-7000-8000-000000000000', null, now() - interval '30 seconds')",
    )
    .execute(&mut world.superuser().await)
    .await
    .unwrap();
    let nodes = async || {
        let page = world
            .get(OPERATOR_KEY, "/v1/operator/nodes")
            .await
            .expect(200);
        page.list().clone()
    };
    eventually(
        "both have said that they live",
        Duration::from_secs(5),
        async || nodes().await.len() == 3,
    )
    .await;
    let nodes = nodes().await;
    assert_eq!(nodes.iter().filter(|node| node["live"] == true).count(), 2);
    assert_eq!(nodes[0]["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(
        (&nodes[2]["live"], &nodes[2]["version"]),
        (&json!(false), &Value::Null)
    );
}
