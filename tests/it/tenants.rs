//! `/v1/tenants` and `/v1/tenant`.

use std::time::Duration;

use serde_json::json;

use crate::support::world::OPERATOR_KEY;
use crate::support::{Reply, World, eventually};

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_makes_a_tenant_whose_first_key_is_an_admin_key() {
    let world = World::new().await;
    let made = world
        .post(OPERATOR_KEY, "/v1/tenants", json!({"name": "Acme"}))
        .await
        .expect(201);
    assert_eq!(made["name"], "Acme");
    assert_eq!(made["state"], "active");
    let key = made["api_key"].as_str().unwrap();
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
        let rows = page["data"].as_array().unwrap().iter();
        rows.map(|row| row["name"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(names(&first), ["three", "two"]);
    let cursor = first["next_cursor"].as_str().unwrap();
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
