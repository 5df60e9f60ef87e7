//! What one tenant does to a node leaves the others what they need of it: connections, memory, sockets.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use reqwest::Method;
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection};
use throughline::fair_queue::Holder;
use throughline::ids::TenantId;
use throughline::store::conversation::messages::LIST_NEWEST;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::support::conversations::user_message;
use crate::support::servers::model::Step;
use crate::support::servers::pair::{LEASE, Pair};
use crate::support::sse::{self, Sse};
use crate::support::world::{OPERATOR_KEY, WorldOptions};
use crate::support::{Fields, Reply, Scene, World, eventually, real_time, stays};

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
    // Of the six connections of a test's node requests of a tenant have four.
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

/// So many clients append to one session of `pair`'s first node, again and again.
fn append_without_end(pair: &Pair, session: &str, clients: usize) -> JoinSet<()> {
    let url = pair
        .nodes
        .url_on(0, &format!("/v1/sessions/{session}/messages"));
    let request = pair.nodes.client.post(url).bearer_auth(&pair.key);
    let request = request.json(&json!({"messages": [user_message("x")]}));
    let mut appending = JoinSet::new();
    for _ in 0..clients {
        let request = request.try_clone().unwrap();
        appending.spawn(async move {
            loop {
                let reply = Reply::try_of(request.try_clone().unwrap()).await;
                assert!(reply.is_ok_and(|reply| [201, 409, 429].contains(&reply.status)));
            }
        });
    }
    appending
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_wait_for_one_row_cost_no_turn_its_node() {
    let pair = Pair::new([Step::held("one two ", "three")]).await;
    let mut stream = Sse::open(pair.message_request(0, "hi", true)).await;
    stream.reads("one two ").await;
    let turn = stream.header("x-throughline-turn-id");
    let new = pair.nodes.client.post(pair.nodes.url_on(0, "/v1/sessions"));
    let new = Reply::of(new.bearer_auth(&pair.key).json(&json!({}))).await;
    let session = new.expect(201).id();
    let id: throughline::ids::SessionId = session.parse().unwrap();
    let mut superuser = pair.nodes.superuser().await;
    let mut holder = superuser.begin().await.unwrap();
    sqlx::query("select id from sessions where id = $1 for update")
        .bind(id.as_uuid())
        .execute(&mut *holder)
        .await
        .unwrap();
    let mut appending = append_without_end(&pair, &session, 100);
    stays("all wait", LEASE * 6, async || {
        appending.try_join_next().is_none()
    })
    .await;
    pair.model.release();
    let ended = pair.completes(1, &turn).await;
    assert_eq!(ended["attempt"], 1);
    assert_eq!(pair.lost().await, 0);
    assert_eq!(ended["message"]["content"], "one two three");
    assert_eq!(sse::text_of(&stream.rest().await), "three");
    assert_eq!(pair.model.requests().len(), 1);
    appending.shutdown().await;
    holder.rollback().await.unwrap();
}

/// 249,000 objects of eight bytes, which come to some 200 MB as values.
fn many_objects() -> String {
    let objects = r#"{"a":0},"#.repeat(249_000);
    format!(
        r#"{{"model":"main","messages":[{{"role":"user","content":"hi"}}],"metadata":[{objects}0]}}"#
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_costs_what_it_comes_to_in_memory() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let ask = |body: String| {
        let request = world.request(Method::POST, "/v1/chat/completions", &tenant.key);
        Reply::of(
            request
                .header("content-type", "application/json")
                .body(body),
        )
    };
    let refused = ask(many_objects()).await;
    refused.expect_openai_error(413, "payload_too_large");
    let long = "x".repeat(2_000_000);
    let said = json!([{"role": "user", "content": "hi"}]);
    let taken = ask(json!({"model": "main", "messages": said, "metadata": long}).to_string()).await;
    taken.expect(200);
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_that_do_not_arrive_hold_the_share_of_their_tenant_alone() {
    let world = World::new().await;
    let noisy = world.tenant("Noisy").await;
    let quiet = world.tenant("Quiet").await;
    let session = world.session(&quiet.key, json!({})).await;
    let session = session.id();
    let large = json!([{"role": "user", "content": "x".repeat(1_000_000)}]);
    let mut open = Vec::new();
    for _ in 0..8 {
        let mut stream = TcpStream::connect(world.address()).await.unwrap();
        let head = format!(
            "POST /v1/sessions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\ncontent-type: \
             application/json\r\ncontent-length: 16777216\r\n\r\n",
            noisy.key
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        open.push(stream);
    }
    // What is only announced holds nothing.
    let taken = world.post(&noisy.key, "/v1/sessions", json!({"messages": large}));
    taken.await.expect(201);
    // With most of it, each has room for all: eight are all that one tenant may have.
    let trickling = open.into_iter().map(|mut stream| {
        tokio::spawn(async move {
            stream
                .write_all(&vec![b' '; 12 * 1024 * 1024])
                .await
                .unwrap();
            loop {
                real_time("a client that trickles", Duration::from_secs(1)).await;
                if stream.write_all(b" ").await.is_err() {
                    return;
                }
            }
        })
    });
    let trickling: Vec<_> = trickling.collect();
    let shares = &world.app().shares;
    let full = async || shares.bodies_in_use() > 127 * 1024 * 1024;
    eventually("eight bodies are read", Duration::from_secs(20), full).await;
    let taken = world.append(&quiet.key, &session, large.clone());
    let taken = tokio::time::timeout(Duration::from_secs(5), taken).await;
    taken.expect("another tenant waits").expect(201);
    let refused = world.post(&noisy.key, "/v1/sessions", json!({"messages": large}));
    refused.await.expect_problem(429, "busy");
    // What is small needs no share.
    world.session(&noisy.key, json!({})).await;
    trickling.iter().for_each(tokio::task::JoinHandle::abort);
    let taken = world.post(&noisy.key, "/v1/sessions", json!({"messages": large}));
    taken.await.expect(201);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_of_large_messages_ends_early_and_the_next_goes_on() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let session = world.session(&tenant.key, json!({})).await;
    let id = session.id();
    let text = |n: usize| format!("{n:02}{}", "x".repeat(900_000));
    for half in [0..10, 10..20] {
        let messages: Vec<Value> = half.map(|n| user_message(&text(n))).collect();
        let appended = world.append(&tenant.key, &id, json!(messages)).await;
        appended.expect(201);
    }
    for (query, newest_first) in [
        ("", false),
        ("&order=desc", true),
        ("&scope=conversation", false),
    ] {
        let mut cursor = String::new();
        let mut pages = 0;
        let mut found = Vec::new();
        loop {
            let path = format!("/v1/sessions/{id}/messages?limit=200{query}{cursor}");
            let page = world.get(&tenant.key, &path).await;
            assert!(page.body.len() < 6_000_000, "{} bytes", page.body.len());
            let page = page.expect(200);
            let contents = page.list().iter();
            found.extend(contents.map(|message| message.text("content")[..2].to_owned()));
            pages += 1;
            match page["next_cursor"].as_str() {
                Some(next) => cursor = format!("&cursor={next}"),
                None => break,
            }
        }
        let mut expected: Vec<String> = (0..20).map(|n| format!("{n:02}")).collect();
        if newest_first {
            expected.reverse();
        }
        assert_eq!(found, expected, "{query}");
        assert!(pages >= 4, "{pages} pages");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres_stops_reading_where_a_page_ends() {
    let world = World::new().await;
    let mut superuser = world.superuser().await;
    let prepare = format!("prepare page (uuid, uuid, bigint, bigint, bigint) as {LIST_NEWEST}");
    sqlx::raw_sql(AssertSqlSafe(prepare))
        .execute(&mut superuser)
        .await
        .unwrap();
    let explain = "explain execute page (gen_random_uuid(), gen_random_uuid(), 0, 9, 201)";
    let plan: Vec<String> = sqlx::query_scalar(explain)
        .fetch_all(&mut superuser)
        .await
        .unwrap();
    let stops = plan.iter().any(|line| line.contains("Run Condition"));
    assert!(stops, "{plan:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn events_of_large_messages_are_all_there() {
    let chat = Scene::chat([]).await;
    chat.model.otherwise(Step::say("noted"));
    let large = "x".repeat(1_000_000);
    for n in 0..7 {
        chat.say(0, "long", &format!("{n} {large}"))
            .await
            .expect(200);
    }
    let mut events = chat.events(1, "/v1/sessions/long/events", Some(0)).await;
    let mut said = Vec::new();
    while said.len() < 7 {
        let event = events.next().await.unwrap().json();
        if event["message"]["role"] == "user" {
            let text = event.text("/message/content");
            said.push(text[..1].to_owned());
        }
    }
    assert_eq!(said.concat(), "0123456");
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_in_parts_have_the_room_of_a_text() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let session = world.session(&tenant.key, json!({})).await;
    let part = json!({"type": "text", "text": "x".repeat(60_000)});
    let message = |parts: usize| json!([{"role": "user", "content": vec![part.clone(); parts]}]);
    let append = |parts| world.append(&tenant.key, session.text("id"), message(parts));
    append(17).await.expect(201);
    let refused = append(256).await;
    refused.expect_problem(400, "invalid_request");
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_outside_of_sessions_have_a_limit_of_their_own() {
    let chat = Scene::with_prompt([Step::Hold, Step::Hold]).await;
    chat.model.otherwise(Step::say("at last"));
    let world = &chat.world;
    let tenant = &chat.tenant;
    let path = format!("/v1/operator/tenants/{}/limits", tenant.id);
    let set = world.put(OPERATOR_KEY, &path, json!({"concurrent_calls": 2}));
    set.await.expect(200);
    let other = world.tenant("Other").await;
    let ask = |stream: bool| {
        let body = json!({"model": "main", "messages": [user_message("hi")], "stream": stream});
        let request = world.request(Method::POST, "/v1/chat/completions", &chat.key);
        tokio::spawn(Reply::of(request.json(&body)))
    };
    let held = [ask(false), ask(true)];
    chat.model.called(2).await;
    let refused = ask(false).await.unwrap();
    refused.expect_openai_error(429, "too_many_calls");
    let body = json!({"model": "main", "messages": [user_message("hi")]});
    let taken = world.post(&other.key, "/v1/chat/completions", body).await;
    taken.expect(200);
    chat.model.release();
    chat.model.release();
    for call in held {
        assert_eq!(call.await.unwrap().status, 200);
    }
    assert_eq!(ask(false).await.unwrap().status, 200);
}

/// Passes connections on, as a balancer does; answers its address and how many came.
async fn forwarder(to: SocketAddr) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    tokio::spawn(async move {
        while let Ok((mut from, _)) = listener.accept().await {
            if counted.fetch_add(1, Ordering::SeqCst) > 20 {
                return;
            }
            tokio::spawn(async move {
                let mut there = TcpStream::connect(to).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut from, &mut there).await;
            });
        }
    });
    (address, count)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_is_its_own_model_is_asked_once() {
    let world = World::with(WorldOptions {
        private_upstreams: true,
        ..WorldOptions::default()
    })
    .await;
    let tenant = world.tenant("Ouroboros").await;
    let (balancer, count) = forwarder(world.address()).await;
    let upstream = json!({"kind": "openai", "model": "main", "api_key": tenant.key,
                          "base_url": format!("http://{balancer}/v1")});
    let put = world.put(
        &tenant.key,
        "/v1/agents/main",
        json!({"upstream": upstream}),
    );
    put.await.expect(200);
    for session in [None, Some("s1")] {
        let request = world.request(Method::POST, "/v1/chat/completions", &tenant.key);
        let mut request = request.json(&json!({"model": "main", "messages": [user_message("hi")]}));
        if let Some(session) = session {
            request = request.header("x-hermes-session-id", session);
        }
        let reply = Reply::of(request).await;
        reply.expect_openai_error(400, "upstream_refused");
        assert!(reply.body.contains("leads back"), "{}", reply.body);
    }
    assert!(count.load(Ordering::SeqCst) <= 2);
    // Another deployment's mark is no hindrance.
    let request = world.request(Method::GET, "/v1/tenant", &tenant.key);
    let other = "00112233445566778899aabbccddeeff";
    let reply = Reply::of(request.header("x-throughline-hop", other)).await;
    reply.expect(200);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_wait_for_a_turn_share_the_connections_of_a_node() {
    let chat = Scene::chat([]).await;
    chat.model.otherwise(Step::say("noted"));
    let world = &chat.world;
    let tenant = &chat.tenant;
    let bridge = world.bridge_key(tenant, &["telegram"]).await;
    let id: TenantId = tenant.id.parse().unwrap();
    let shares = &world.app().shares;
    let held: Vec<_> = std::iter::from_fn(|| shares.connections(id, 1).ok()).collect();
    let send = async |waits: bool| {
        let body = json!({"identity": "telegram:5", "text": "hi", "wait": waits});
        world.post(&bridge, "/v1/inbound", body).await
    };
    send(true).await.expect_problem(429, "busy");
    let refused = chat.say(0, "s1", "hi").await;
    refused.expect_openai_error(429, "busy");
    let turns: i64 = sqlx::query_scalar("select count(*) from turns")
        .fetch_one(&mut world.superuser().await)
        .await
        .unwrap();
    assert_eq!(turns, 0);
    // Nobody waits for a delivery.
    send(false).await.expect(202);
    drop(held);
    send(true).await.expect(200);
    chat.say(0, "s1", "hi").await.expect(200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_large_answer_has_the_headers_of_every_other() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let session = world.session(&tenant.key, json!({})).await.id();
    let large = json!([user_message(&"x".repeat(200_000))]);
    world.append(&tenant.key, &session, large).await.expect(201);
    let origins = json!({"allowed_origins": ["https://app.example"]});
    let patch = world.request(Method::PATCH, "/v1/tenant", &tenant.key);
    Reply::of(patch.json(&origins)).await.expect(200);
    let holder = Holder::Tenant(tenant.id.parse().unwrap());
    let held = world.app().shares.answer(holder, 128 * 1024 * 1024);
    assert!(held.is_some());
    let path = format!("/v1/sessions/{session}/messages");
    let ask = || {
        let request = world.request(Method::GET, &path, &tenant.key);
        Reply::of(request.header("origin", "https://app.example"))
    };
    // Nodes hear of the origin within a second.
    let is_allowed = async || ask().await.status != 403;
    eventually("the page is allowed", Duration::from_secs(5), is_allowed).await;
    let refused = ask().await;
    refused.expect_problem(429, "busy");
    let allowed = refused.header("access-control-allow-origin");
    assert_eq!(allowed, "https://app.example");
    assert!(!refused.header("ratelimit").is_empty());
    drop(held);
    world.get(&tenant.key, &path).await.expect(200);
}
