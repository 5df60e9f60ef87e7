//! No node dials another node for a tenant, also where private addresses are allowed.

use std::time::Duration;

use metrics_exporter_prometheus::PrometheusBuilder;
use serde_json::json;
use throughline::app::App;
use throughline::config::PrivateUpstreams;
use throughline::jobs::heartbeat;
use throughline::server::Node;
use tokio::net::TcpListener;
use tokio::time::timeout;

use crate::support::chat::with_model;
use crate::support::conversations::user_message;
use crate::support::servers::cluster::cluster;
use crate::support::servers::model::{Model, Step};
use crate::support::world::{World, WorldOptions, node_config};
use crate::support::{Reply, Tenant};

async fn put_agent(world: &World, tenant: &Tenant, name: &str, base_url: &str) -> Reply {
    let upstream = json!({"kind": "openai", "base_url": base_url, "model": "m"});
    let path = format!("/v1/agents/{name}");
    world
        .put(&tenant.key, &path, json!({ "upstream": upstream }))
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_dials_no_port_of_another_node() {
    let world = World::with(WorldOptions {
        private_upstreams: true,
        ..WorldOptions::default()
    })
    .await;
    let tenant = world.tenant("Acme").await;
    let internal = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let mut config = node_config(&world.database, cluster().redis_url());
    config.allow_private_upstreams = PrivateUpstreams::Allowed;
    config.internal_listen = Some(internal.local_addr().unwrap());
    let app = App::build(config, world.clock.clone()).await.unwrap();
    let metrics = PrometheusBuilder::new().build_recorder().handle();
    let other = Node::start(app, Some(metrics)).await.unwrap();
    let ports = [
        other.address.port(),
        other.metrics_address.unwrap().port(),
        internal.local_addr().unwrap().port(),
    ];
    let urls = ports.map(|port| format!("http://127.0.0.1:{port}/v1"));
    // Registered while the first node does not know the other yet.
    for (number, url) in urls.iter().enumerate() {
        let put = put_agent(&world, &tenant, &format!("agent-{number}"), url).await;
        put.expect_success();
    }
    heartbeat::tick(&other.app).await;
    heartbeat::tick(world.app()).await;
    for (number, url) in urls.iter().enumerate() {
        let mut body = with_model(json!({"messages": [user_message("hi")]}));
        body["model"] = json!(format!("agent-{number}"));
        let reply = world.post(&tenant.key, "/v1/chat/completions", body).await;
        assert_eq!(reply.status, 502, "{}", reply.body);
        assert!(
            reply.body.contains("a port of this service"),
            "{}",
            reply.body
        );
        let put = put_agent(&world, &tenant, "late", url).await;
        put.expect_problem(422, "invalid_value");
    }
    let dialled = timeout(Duration::from_millis(50), internal.accept()).await;
    assert!(dialled.is_err(), "the internal port was dialled");
    // A model's server beside them is called as ever.
    let model = Model::start([Step::say("hello")]).await;
    put_agent(&world, &tenant, "main", &model.base_url)
        .await
        .expect_success();
    let body = with_model(json!({"messages": [user_message("hi")]}));
    let reply = world.post(&tenant.key, "/v1/chat/completions", body).await;
    assert_eq!(
        reply.expect(200)["choices"][0]["message"]["content"],
        "hello"
    );
    other.stop().await;
}
