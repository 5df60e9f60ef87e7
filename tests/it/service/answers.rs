//! What every answer has, whatever was asked: health, request ids, and no secrets in the logs.

use serde_json::json;
use throughline::dev::servers::RedisServer;

use crate::support::servers::cluster::{scratch_dir, setup};
use crate::support::{Reply, World};

#[tokio::test(flavor = "multi_thread")]
async fn health_and_readiness_are_public_and_show_names_only() {
    let redis = RedisServer::start(&setup(scratch_dir("own-redis")), "pw")
        .await
        .unwrap();
    let world = World::with_redis(1, &redis.url).await;
    let get = async |path: &str| Reply::of(reqwest::Client::new().get(world.url(path))).await;
    assert_eq!(get("/healthz").await.expect(200), json!({"status": "ok"}));
    let ready = get("/readyz").await.expect(200);
    assert_eq!(
        ready,
        json!({"status": "ok", "dependencies": {"postgres": "ok", "redis": "ok"}})
    );
    redis.child.stop();
    let degraded = get("/readyz").await.expect(200);
    assert_eq!(
        degraded,
        json!({"status": "ok", "dependencies": {"postgres": "ok", "redis": "failed"}})
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_shutting_down_is_not_ready() {
    let world = World::new().await;
    world.app().shutdown.begin_draining();
    let reply = Reply::of(reqwest::Client::new().get(world.url("/readyz"))).await;
    assert_eq!(reply.expect(503)["status"], "failed");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_answer_has_a_request_id_and_a_sensible_one_is_kept() {
    let world = World::new().await;
    let ask = async |id: Option<&str>| {
        let mut request = reqwest::Client::new().get(world.url("/v1/nothing"));
        if let Some(id) = id {
            request = request.header("x-request-id", id);
        }
        Reply::of(request).await
    };
    let made = ask(None).await;
    assert!(made.header("x-request-id").starts_with("req_"));
    assert_eq!(
        ask(Some("my-own-id")).await.header("x-request-id"),
        "my-own-id"
    );
    for foolish in ["has space", &"x".repeat(65)] {
        assert!(
            ask(Some(foolish))
                .await
                .header("x-request-id")
                .starts_with("req_")
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn head_is_answered_like_get_without_a_body() {
    let world = World::new().await;
    for path in ["/healthz", "/readyz", "/openapi.json", "/docs/"] {
        let reply = Reply::of(reqwest::Client::new().head(world.url(path))).await;
        assert_eq!((reply.status, reply.body.as_str()), (200, ""), "{path}");
    }
}
