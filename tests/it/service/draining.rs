//! How a node ends: it drains, and serves all the while; then nobody can connect any more, and what runs ends.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use metrics_exporter_prometheus::PrometheusBuilder;
use reqwest::Method;
use serde_json::json;
use throughline::app::App;
use throughline::clock::Clock;
use throughline::config::PrivateUpstreams;
use throughline::server::Node;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::support::chat::{agent_on, answer};
use crate::support::conversations::user_message;
use crate::support::servers::cluster::cluster;
use crate::support::servers::model::{Model, Step};
use crate::support::sse::{self, Sse};
use crate::support::world::{OPERATOR_KEY, WorldOptions, node_config};
use crate::support::{Fields, Reply, Scene, eventually};

const DRAIN: Duration = Duration::from_secs(2);

fn draining() -> WorldOptions {
    WorldOptions {
        drain: DRAIN,
        ..WorldOptions::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_drains_serves_everything_and_keeps_no_connection() {
    let chat = Scene::builder()
        .options(draining())
        .nodes(2)
        .model([])
        .build()
        .await;
    chat.model.otherwise(Step::say("hello there"));
    let kept = chat.say(0, "before", "hi").await;
    assert_eq!(kept.headers.get("connection"), None);
    chat.world.app().shutdown.begin_draining();
    let world = &chat.world;
    let get = |path: &str| Reply::of(world.request(Method::GET, path, &chat.key));
    let closes = |reply: &Reply| assert_eq!(reply.header("connection"), "close", "{reply:?}");
    for (path, status) in [
        ("/readyz", 503),
        ("/healthz", 200),
        ("/docs/", 200),
        ("/v1/models", 200),
        ("/v1/turns/nothing", 404),
        ("/v1/tenant", 403),
        ("/nowhere", 404),
        (format!("/{}", "x".repeat(9000)).as_str(), 414),
    ] {
        let reply = get(path).await;
        assert_eq!(reply.status, status, "{path}: {}", reply.body);
        closes(&reply);
    }
    let preflight = world.request(Method::OPTIONS, "/v1/models", "");
    let preflight = preflight
        .header("origin", "https://app.example")
        .header("access-control-request-method", "GET");
    closes(&Reply::of(preflight).await);
    let wrong = Reply::of(world.request(Method::GET, "/v1/models", "nobody")).await;
    assert_eq!(wrong.status, 401);
    closes(&wrong);
    let whole = chat.say(0, "whole", "hi").await;
    assert_eq!(answer(&whole), "hello there");
    closes(&whole);
    let mut stream = chat.open(0, "streamed", "hi").await;
    assert_eq!(stream.header("connection"), "close");
    assert_eq!(sse::text_of(&stream.rest().await), "hello there");
    let inbound = json!({"identity": "telegram:1", "text": "hi"});
    let inbound = world.post(&chat.tenant.key, "/v1/inbound", inbound).await;
    assert_eq!(inbound.expect(200)["reply"]["text"], "hello there");
    closes(&inbound);
}

#[tokio::test(flavor = "multi_thread")]
async fn open_streams_and_polls_send_their_clients_away_one_after_the_other() {
    let chat = Scene::builder()
        .options(draining())
        .nodes(2)
        .model([Step::say("hello")])
        .build()
        .await;
    chat.say(0, "talk", "hi").await.expect(200);
    let admin = &chat.tenant.key;
    let world = &chat.world;
    let open = |path: &str| {
        let request = world.request(Method::GET, path, admin);
        Sse::open(request.header("last-event-id", "0"))
    };
    let mut streams = Vec::new();
    for _ in 0..10 {
        let mut stream = open("/v1/sessions/talk/events").await;
        stream.until("turn.completed").await;
        streams.push(stream);
    }
    streams.push(open("/v1/deliveries/stream").await);
    let began = Instant::now();
    world.app().shutdown.begin_draining();
    let ends = streams.iter_mut().map(async |stream| {
        let rest = stream.rest().await;
        let names: Vec<&str> = rest.iter().map(|event| event.name.as_str()).collect();
        assert_eq!(names, ["reconnect"]);
        began.elapsed()
    });
    let poll = async {
        let path = "/v1/deliveries?wait=50";
        let polled = Reply::of(world.request(Method::GET, path, admin)).await;
        assert_eq!(polled.expect(200)["data"], json!([]));
        assert_eq!(polled.header("connection"), "close");
        began.elapsed()
    };
    let (mut ends, polled) = tokio::join!(join_all(ends), poll);
    ends.push(polled);
    ends.sort();
    assert!(ends[0] > DRAIN / 2 - Duration::from_millis(50), "{ends:?}");
    let last = ends[ends.len() - 1];
    assert!(last < DRAIN + Duration::from_secs(1), "{ends:?}");
    assert!(last - ends[0] > Duration::from_millis(200), "{ends:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_stops_refuses_connections_and_finishes_what_runs() {
    let database = cluster().new_database().await;
    let mut config = node_config(&database, cluster().redis_url());
    config.allow_private_upstreams = PrivateUpstreams::Allowed;
    config.drain = Duration::from_millis(100);
    let app = App::build(config, Clock::system()).await.unwrap();
    let metrics = PrometheusBuilder::new().build_recorder().handle();
    let node = Node::start(app, Some(metrics)).await.unwrap();
    let address = node.address;
    let metrics = node.metrics_address.unwrap();
    let client = reqwest::Client::new();
    let url = |path: &str| format!("http://{address}{path}");
    let made = client.post(url("/v1/tenants")).bearer_auth(OPERATOR_KEY);
    let made = Reply::of(made.json(&json!({"name": "Acme"}))).await;
    let key = made.expect(201).text("api_key").to_owned();
    let model = Model::start([Step::held("one ", "two")]).await;
    let put = client.put(url("/v1/agents/main")).bearer_auth(&key);
    Reply::of(put.json(&agent_on(&model, json!({}))))
        .await
        .expect(200);
    let chat = |client: &reqwest::Client, stream: bool| {
        let body = json!({"model": "main", "messages": [user_message("hi")], "stream": stream});
        let request = client.post(url("/v1/chat/completions")).bearer_auth(&key);
        let session = format!("session-{stream}");
        request.header("x-hermes-session-id", session).json(&body)
    };
    // Two connections that are kept alive, and one with an answer under way.
    let mut stream = Sse::open(chat(&client, true)).await;
    stream.reads("one ").await;
    let kept = reqwest::Client::new();
    let quiet = reqwest::Client::new();
    for client in [&kept, &quiet] {
        Reply::of(client.get(url("/healthz"))).await.expect(200);
    }

    let ending = tokio::spawn(async move {
        node.drain(std::future::pending()).await;
        node.stop().await;
    });
    let refused = async || {
        let connected = timeout(Duration::from_secs(1), TcpStream::connect(address)).await;
        let failed = connected.expect("a connection hangs").err();
        failed.is_some_and(|error| error.kind() == ErrorKind::ConnectionRefused)
    };
    eventually("connections are refused", Duration::from_secs(5), refused).await;
    // On a connection that was there before: new turns, too.
    model.push(Step::say("hello"));
    let late = Reply::of(chat(&kept, false)).await;
    assert_eq!(answer(&late), "hello");
    assert_eq!(late.header("connection"), "close");
    let ready = Reply::of(quiet.get(url("/readyz"))).await;
    assert_eq!(ready.status, 503);
    let scraped = client.get(format!("http://{metrics}/metrics"));
    assert_eq!(Reply::of(scraped).await.status, 200);
    assert!(!ending.is_finished());
    model.release();
    stream.reads("two").await;
    assert_eq!(stream.rest().await.last().unwrap().data, "[DONE]");
    timeout(Duration::from_secs(8), ending)
        .await
        .unwrap()
        .unwrap();
}
