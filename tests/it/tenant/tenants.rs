//! `/v1/tenants` and `/v1/tenant`.

use std::time::Duration;

use serde_json::json;

use crate::support::world::OPERATOR_KEY;
use crate::support::{Fields, Reply, World, eventually};

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_makes_a_tenant_whose_first_key_is_an_admin_key() {
    let world = World::new().await;
    let made = world
        .post(OPERATOR_KEY, "/v1/tenants", json!({"name": "Acme"}))
        .await
        .expect(201);
    assert_eq!(made["name"], "Acme");
    assert_eq!(made["state"], "active");
    let key = made.text("api_key");
    let own = world.get(key, "/v1/tenant").await.expect(200);
    assert_eq!(own["id"], made["id"]);
    assert!(own.get("api_key").is_none());
    let keys = world.get(key, "/v1/api-keys").await.expect(200);
    assert_eq!(keys["data"][0]["scopes"], json!(["admin"]));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_list_of_tenants_is_paged_newest_first_without_the_operators_own_plane() {
    let world = World::new().await;
    for name in ["one", "two", "three"] {
        world.tenant(name).await;
    }
    let first = world
        .get(OPERATOR_KEY, "/v1/tenants?limit=2")
        .await
        .expect(200);
    let names = |page: &serde_json::Value| -> Vec<String> {
        let rows = page.list().iter();
        rows.map(|row| row.text("name").to_owned()).collect()
    };
    assert_eq!(names(&first), ["three", "two"]);
    let cursor = first.text("next_cursor");
    let path = format!("/v1/tenants?limit=2&cursor={cursor}");
    let second = world.get(OPERATOR_KEY, &path).await.expect(200);
    assert_eq!(names(&second), ["one"]);
    assert!(second["next_cursor"].is_null());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_suspended_tenants_keys_are_refused_on_every_node_until_it_is_resumed() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    world.get_on(1, &tenant.key, "/v1/tenant").await.expect(200);
    let path = format!("/v1/tenants/{}/suspend", tenant.id);
    let suspended = world.post(OPERATOR_KEY, &path, json!({})).await.expect(200);
    assert_eq!(suspended["state"], "suspended");
    eventually(
        "the other node refuses",
        Duration::from_secs(1),
        async || world.get_on(1, &tenant.key, "/v1/tenant").await.status == 403,
    )
    .await;
    let refused = world.get_on(1, &tenant.key, "/v1/tenant").await;
    refused.expect_problem(403, "tenant_suspended");
    let path = format!("/v1/tenants/{}/resume", tenant.id);
    world.post(OPERATOR_KEY, &path, json!({})).await.expect(200);
    eventually(
        "the other node takes it again",
        Duration::from_secs(1),
        async || world.get_on(1, &tenant.key, "/v1/tenant").await.status == 200,
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_that_is_not_there_and_the_operators_plane_are_404() {
    let world = World::new().await;
    for id in [
        "ten_00000000000000000000000000000000",
        "ten_01a1e2373db47013a539524902c63338",
        "nonsense",
    ] {
        let path = format!("/v1/tenants/{id}/suspend");
        let reply = world.post(OPERATOR_KEY, &path, json!({})).await;
        reply.expect_problem(404, "not_found");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_configured_operator_key_is_good() {
    let world = World::new().await;
    let reply: Reply = world
        .get("another-operator-key-0123456789abcdef", "/v1/tenants")
        .await;
    reply.expect_problem(401, "unauthorized");
    world.get(OPERATOR_KEY, "/v1/tenants").await.expect(200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_tenant_is_gone_with_everything_of_it_and_nothing_else() {
    let world = World::with_nodes(2).await;
    let gone = world.tenant("gone").await;
    let kept = world.tenant("kept").await;
    for tenant in [&gone, &kept] {
        crate::support::data::every_table::fill_every_table(&world, tenant).await;
    }
    let kept_before = rows_of(&world, &kept).await;
    assert!(
        kept_before.iter().all(|(_, rows)| *rows > 0),
        "{kept_before:?}"
    );
    let path = format!("/v1/tenants/{}", gone.id);
    for _ in 0..2 {
        let deleting = world.delete(OPERATOR_KEY, &path).await;
        assert!(
            deleting.status == 202 || deleting.status == 404,
            "{}",
            deleting.body
        );
    }
    eventually(
        "its key is refused on the other node",
        Duration::from_secs(1),
        async || world.get_on(1, &gone.key, "/v1/tenant").await.status == 401,
    )
    .await;
    eventually(
        "nothing of it is left",
        Duration::from_secs(10),
        async || {
            rows_of(&world, &gone)
                .await
                .iter()
                .all(|(_, rows)| *rows == 0)
                && world.delete(OPERATOR_KEY, &path).await.status == 404
        },
    )
    .await;
    assert_eq!(rows_of(&world, &kept).await, kept_before);
    world.get(&kept.key, "/v1/tenant").await.expect(200);
    for steer in ["suspend", "resume"] {
        let path = format!("/v1/tenants/{}/{steer}", gone.id);
        world
            .post(OPERATOR_KEY, &path, json!({}))
            .await
            .expect_problem(404, "not_found");
    }
}

/// How many rows each table with tenant rows has of `tenant`.
async fn rows_of(world: &World, tenant: &crate::support::Tenant) -> Vec<(String, i64)> {
    let mut superuser = world.superuser().await;
    let mut counts = Vec::new();
    for table in crate::support::data::catalog::tenant_tables(&mut superuser).await {
        let sql = format!("select count(*) from {table} where tenant_id = $1");
        let rows = sqlx::query_scalar(sqlx::AssertSqlSafe(sql))
            .bind(tenant.uuid())
            .fetch_one(&mut superuser)
            .await
            .unwrap();
        counts.push((table, rows));
    }
    counts
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_tenant_goes_in_batches_and_the_service_cannot_erase_a_living_one() {
    let world = World::new().await;
    let tenant = world.tenant("large").await;
    let uuid = tenant.uuid();
    sqlx::query(
        "insert into users (tenant_id, id, created_at)
         select $1, gen_random_uuid(), now() from generate_series(1, 5000)",
    )
    .bind(uuid)
    .execute(&mut world.superuser().await)
    .await
    .unwrap();
    let id = tenant.id.parse().unwrap();
    assert_eq!(
        throughline::store::tenant::tenants::erase(&world.app().db, id, 1000)
            .await
            .unwrap(),
        0
    );
    world.get(&tenant.key, "/v1/tenant").await.expect(200);
    sqlx::query("update tenants set state = 'deleting' where id = $1")
        .bind(uuid)
        .execute(&mut world.superuser().await)
        .await
        .unwrap();
    let mut batches = Vec::new();
    loop {
        match throughline::store::tenant::tenants::erase(&world.app().db, id, 1000)
            .await
            .unwrap()
        {
            0 => break,
            rows => batches.push(rows),
        }
    }
    assert!(
        batches.len() >= 5 && batches.iter().all(|rows| *rows <= 1000),
        "{batches:?}"
    );
    let left: i64 = sqlx::query_scalar("select count(*) from tenants where id = $1")
        .bind(uuid)
        .fetch_one(&mut world.superuser().await)
        .await
        .unwrap();
    assert_eq!(left, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_changes_its_own_settings_and_nothing_it_left_out() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let before = world.get(&tenant.key, "/v1/tenant").await.expect(200);
    assert_eq!(before["dm_scope"], "per-channel-peer");
    assert_eq!(before["allowed_origins"], json!([]));
    assert_eq!(before["retention"], json!({"conversations_days": null}));
    let patch = async |body: serde_json::Value| {
        let request = world.request(reqwest::Method::PATCH, "/v1/tenant", &tenant.key);
        Reply::of(request.json(&body)).await
    };
    patch(json!({"dm_scope": "per-peer", "retention": {"conversations_days": 30}}))
        .await
        .expect(200);
    let after = patch(json!({"name": "Acme Inc", "allowed_origins": ["https://app.example"]}))
        .await
        .expect(200);
    assert_eq!(after["name"], "Acme Inc");
    assert_eq!(after["dm_scope"], "per-peer");
    assert_eq!(after["retention"], json!({"conversations_days": 30}));
    assert_eq!(after["allowed_origins"], json!(["https://app.example"]));
    for (body, status, pointer) in [
        (json!({"dm_scope": "x"}), 400, "/dm_scope"),
        (json!({"limits": {}}), 400, "/limits"),
        (json!({"state": "active"}), 400, "/state"),
        (json!({"allowed_origins": ["*"]}), 400, "/allowed_origins/0"),
        (
            json!({"allowed_origins": vec!["https://a.example"; 51]}),
            422,
            "/allowed_origins",
        ),
        (
            json!({"retention": {"conversations_days": 0}}),
            422,
            "/retention/conversations_days",
        ),
    ] {
        let reply = patch(body).await;
        assert_eq!(
            reply.expect(status)["errors"][0]["pointer"],
            pointer,
            "{}",
            reply.body
        );
    }
    assert_eq!(
        world.get(&tenant.key, "/v1/tenant").await.expect(200),
        after
    );
}
