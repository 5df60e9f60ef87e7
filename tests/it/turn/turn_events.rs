//! Streams of events: resumed at any place, on any node, without a gap and without a repeat; live from
//! every device, with Redis and without; and closed when their reader has lost the right to read.

use std::time::{Duration, Instant};

use reqwest::Method;
use serde_json::{Value, json};
use throughline::dev::servers::RedisServer;

use crate::support::chat::with_model;
use crate::support::conversations::user_message;
use crate::support::servers::cluster::{scratch_dir, setup};
use crate::support::servers::model::{Step, echo_of};
use crate::support::sse::{Sse, SseEvent};
use crate::support::world::{OPERATOR_KEY, WorldOptions};
use crate::support::{Fields, Reply, Scene, eventually};

const NONE: Duration = Duration::ZERO;

/// What the pieces of an attempt say together.
fn pieces(events: &[SseEvent], attempt: i64) -> String {
    let deltas = events.iter().filter(|event| event.name == "message.delta");
    let bodies = deltas.map(SseEvent::json);
    bodies
        .filter(|body| body["attempt"] == attempt)
        .map(|body| body.text("/data/text").to_owned())
        .collect()
}

fn ids(events: &[SseEvent]) -> Vec<i64> {
    events.iter().map(|event| event.id.unwrap()).collect()
}

fn long_text() -> String {
    let words: Vec<String> = (0..40).map(|number| format!("word-{number}")).collect();
    words.join(" ")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_is_replayed_from_every_place_on_every_node() {
    let chat = Scene::chat([Step::Echo(Duration::from_millis(15))]).await;
    let mut stream = chat.open(0, "s-1", &long_text()).await;
    let turn = stream.header("x-throughline-turn-id");
    let path = format!("/v1/turns/{turn}/events");
    let following = chat.events(1, &path, None);
    // Comes back after every few events, now to this node and now to the other.
    let resuming = async {
        let (mut read, mut node): (Vec<SseEvent>, usize) = (Vec::new(), 0);
        loop {
            let last = read.last().and_then(|event| event.id);
            let mut stream = chat.events(node, &path, last).await;
            for _ in 0..3 {
                match stream.next().await {
                    Some(event) => read.push(event),
                    None => return read,
                }
            }
            node = 1 - node;
        }
    };
    let following = async { following.await.rest().await };
    let (chunks, all, resumed) = tokio::join!(stream.rest(), following, resuming);
    assert_eq!(crate::support::sse::text_of(&chunks), echo_of(&long_text()));
    assert!(all.len() > 8, "{all:?}");
    assert_eq!(resumed, all);
    let names: Vec<&str> = all.iter().map(|event| event.name.as_str()).collect();
    assert_eq!(names[..2], ["turn.started", "message.created"]);
    assert_eq!(
        names[names.len() - 2..],
        ["message.created", "turn.completed"]
    );
    assert!(
        names[2..names.len() - 2]
            .iter()
            .all(|name| *name == "message.delta")
    );
    assert!(ids(&all).windows(2).all(|two| two[0] < two[1]));
    for (place, event) in all.iter().enumerate() {
        let mut stream = chat.events(place % 2, &path, event.id).await;
        assert_eq!(stream.rest().await, all[place + 1..]);
    }
    let stored = chat.turn(&turn).await["message"]["content"].clone();
    assert_eq!(stored, pieces(&all, 1));
    let created = all[all.len() - 2].json();
    assert_eq!(created["message"]["content"], stored);
    for event in &all {
        let body = event.json();
        assert_eq!(body["turn_id"], turn);
        assert!(body["session_id"].is_string() && body["conversation_id"].is_string());
    }
    let wrong = chat.world.request(Method::GET, &path, &chat.key);
    Reply::of(wrong.header("last-event-id", "x"))
        .await
        .expect_problem(400, "invalid_request");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_stopped_turn_said_is_in_its_events() {
    let chat = Scene::chat([Step::held("one two ", "three")]).await;
    let mut stream = chat.open(0, "s-1", "hi").await;
    let turn = stream.header("x-throughline-turn-id");
    stream.reads("one two ").await;
    chat.cancel(1, &turn).await.expect(202);
    let all = chat
        .events(1, &format!("/v1/turns/{turn}/events"), None)
        .await
        .rest()
        .await;
    assert_eq!(pieces(&all, 1), "one two ");
    let last = &all[all.len() - 1];
    assert_eq!(last.name, "turn.cancelled");
    assert_eq!(last.json()["data"]["reason"], "cancelled");
}

/// Says something by key on the first node, and answers what streams on the second have told by then, and
/// how long after the first word they heard of it.
async fn watched(chat: &Scene, streams: &mut [Sse], text: &str) -> Duration {
    let url = chat.world.url("/v1/chat/completions");
    let request = chat.world.client.post(url).bearer_auth(&chat.key);
    let body = with_model(json!({"messages": [user_message(text)], "stream": true}));
    let request = request.header("x-hermes-session-key", "k-1").json(&body);
    let mut speaking = Sse::open(request).await;
    speaking.reads("one ").await;
    let began = Instant::now();
    for stream in &mut *streams {
        let told = stream.until("message.delta").await;
        assert_eq!(told[told.len() - 1].json()["data"]["text"], "one ");
        let said = told.iter().find(|event| event.name == "message.created");
        assert_eq!(said.unwrap().json()["message"]["content"], text);
    }
    let heard = began.elapsed();
    chat.model.release();
    speaking.rest().await;
    for stream in streams {
        let told = stream.until("turn.completed").await;
        let said = told.iter().find(|event| event.name == "message.created");
        assert_eq!(said.unwrap().json()["message"]["content"], "one two");
    }
    heard
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_is_watched_live_from_another_node_with_redis_and_without() {
    let redis = RedisServer::start(&setup(scratch_dir("own-redis")), "pw")
        .await
        .unwrap();
    let options = WorldOptions {
        redis_url: redis.url.clone(),
        ..WorldOptions::default()
    };
    let held = || Step::held("one ", "two");
    let chat = Scene::builder()
        .options(options)
        .nodes(2)
        .model([Step::Echo(NONE), held(), held()])
        .build()
        .await;
    let first = chat
        .world
        .request(Method::POST, "/v1/chat/completions", &chat.key);
    let first = first.header("x-hermes-session-key", "k-1");
    let first = Reply::of(first.json(&with_model(json!({"messages": [user_message("hi")]})))).await;
    let session = first.header("x-hermes-session-id").to_owned();
    let mut streams = [
        chat.events(1, &format!("/v1/sessions/{session}/events"), None)
            .await,
        chat.events(1, "/v1/session-keys/k-1/events", None).await,
    ];
    let heard = watched(&chat, &mut streams, "with Redis").await;
    assert!(heard < Duration::from_secs(1), "{heard:?}");
    redis.child.stop();
    eventually("it is noticed", Duration::from_secs(5), async || {
        !chat.world.nodes[1].app.notifications.is_connected()
    })
    .await;
    let heard = watched(&chat, &mut streams, "without Redis").await;
    assert!(heard < Duration::from_secs(2), "{heard:?}");
}

/// The last event of a stream, which must come within five seconds.
async fn closed(stream: &mut Sse) -> SseEvent {
    let asked = Instant::now();
    let rest = stream.rest().await;
    assert!(
        asked.elapsed() < Duration::from_secs(5),
        "{:?}",
        asked.elapsed()
    );
    rest[rest.len() - 1].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_closes_when_its_key_is_revoked_or_led_elsewhere() {
    let chat = Scene::chat([]).await;
    chat.model.otherwise(Step::Echo(NONE));
    let (id, key) = chat.world.api_key(&chat.tenant, "read").await;
    let first = chat
        .world
        .request(Method::POST, "/v1/chat/completions", &chat.key);
    let first = first.header("x-hermes-session-key", "k-1");
    let first = Reply::of(first.json(&with_model(json!({"messages": [user_message("hi")]})))).await;
    first.expect(200);
    let events = "/v1/session-keys/k-1/events";
    let request = chat.world.client.get(chat.world.url_on(1, events));
    let mut revoked = Sse::open(request.bearer_auth(&key)).await;
    let mut moved = chat.events(1, events, None).await;
    let path = format!(
        "/v1/sessions/{}/events",
        first.header("x-hermes-session-id")
    );
    let stays = chat.events(1, &path, None).await;
    chat.world
        .delete(&chat.tenant.key, &format!("/v1/api-keys/{id}"))
        .await
        .expect_success();
    let last = closed(&mut revoked).await;
    assert_eq!(
        (last.name.as_str(), last.json()),
        ("closed", json!({"code": "key_revoked"}))
    );
    let reset = chat
        .world
        .post(&chat.tenant.key, "/v1/session-keys/k-1/reset", json!({}))
        .await;
    reset.expect(200);
    let last = closed(&mut moved).await;
    assert_eq!(
        (last.name.as_str(), last.json()),
        ("closed", json!({"code": "session_moved"}))
    );
    drop(stays);
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_are_limited_and_one_that_is_closed_makes_room() {
    let world = crate::support::World::new().await;
    let tenant = world.tenant("Acme").await;
    let path = format!("/v1/operator/tenants/{}/limits", tenant.id);
    world
        .put(OPERATOR_KEY, &path, json!({"open_streams": 2}))
        .await
        .expect(200);
    let session = world.session(&tenant.key, json!({})).await;
    let path = format!("/v1/sessions/{}/events", session.text("id"));
    let open = async || {
        world
            .request(Method::GET, &path, &tenant.key)
            .send()
            .await
            .unwrap()
    };
    let first = open().await;
    let _second = open().await;
    assert_eq!(first.status(), 200);
    let third = Reply::of(world.request(Method::GET, &path, &tenant.key)).await;
    third.expect_problem(429, "too_many_streams");
    assert!(!third.header("retry-after").is_empty());
    drop(first);
    eventually("there is room", Duration::from_secs(20), async || {
        open().await.status() == 200
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_ends_sends_its_watchers_elsewhere() {
    let mut chat = Scene::chat([Step::held("one ", "two")]).await;
    let mut stream = chat.open(0, "s-1", "hi").await;
    stream.reads("one ").await;
    let turn = stream.header("x-throughline-turn-id");
    let path = format!("/v1/turns/{turn}/events");
    let mut watching = chat.events(1, &path, None).await;
    let mut seen = watching.until("message.delta").await;
    let node = chat.world.nodes.pop().unwrap();
    let ending = tokio::spawn(node.stop());
    let last = watching.rest().await;
    assert_eq!(last.len(), 1);
    assert_eq!(last[0].name, "reconnect");
    let last_id = seen[seen.len() - 1].id;
    let mut watching = chat.events(0, &path, last_id).await;
    chat.model.release();
    seen.extend(watching.rest().await);
    assert_eq!(pieces(&seen, 1), "one two");
    assert_eq!(seen, chat.events(0, &path, None).await.rest().await);
    let stored: Value = chat.turn(&turn).await;
    assert_eq!(stored["message"]["content"], "one two");
    stream.rest().await;
    ending.await.unwrap();
}
