//! What one tenant does to a node leaves the others what they need of it: connections, memory, sockets.

use std::time::Duration;

use futures_util::future::join_all;
use reqwest::Method;
use serde_json::json;
use sqlx::Connection;

use crate::support::{Reply, World};

#[tokio::test(flavor = "multi_thread")]
async fn requests_of_a_tenant_that_wait_for_one_row_leave_connections_to_others() {
    let world = World::new().await;
    let noisy = world.tenant("Noisy").await;
    let quiet = world.tenant("Quiet").await;
    let mut superuser = world.superuser().await;
    let mut holder = superuser.begin().await.unwrap();
    let id: throughline::ids::TenantId = noisy.id.parse().unwrap();
    sqlx::query("select id from tenants where id = $1 for update")
        .bind(id.as_uuid())
        .execute(&mut *holder)
        .await
        .unwrap();
    let asks = (0..33).map(|n| {
        let body =
            json!({"name": format!("k{n}"), "scopes": ["bridge"], "platforms": ["telegram"]});
        let request = world.request(Method::POST, "/v1/api-keys", &noisy.key);
        tokio::spawn(Reply::of(request.json(&body)))
    });
    let asks: Vec<_> = asks.collect();
    // Of the five connections of a test's node a tenant has four.
    world.waiting(4).await;
    for _ in 0..5 {
        let asking = world.get(&quiet.key, "/v1/agents");
        let reply = tokio::time::timeout(Duration::from_millis(900), asking).await;
        reply.expect("another tenant waits").expect(200);
    }
    for reply in join_all(asks).await {
        let reply = reply.unwrap();
        reply.expect_problem(429, "busy");
        assert_eq!(reply.header("retry-after"), "1");
    }
    holder.rollback().await.unwrap();
    let body = json!({"name": "k", "scopes": ["bridge"], "platforms": ["telegram"]});
    let made = world.post(&noisy.key, "/v1/api-keys", body).await;
    made.expect(201);
}
