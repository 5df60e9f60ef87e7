//! Rights end when they end: every open answer is bound to its credential, its tenant and its user. And looking
//! whether they still hold makes nobody.

use std::time::{Duration, Instant};

use reqwest::Method;
use serde_json::{Value, json};
use throughline::dev::service_caller;
use throughline::error::Code;
use throughline::ids::TenantId;

use crate::support::people::{User, sign_in};
use crate::support::servers::model::Step;
use crate::support::sse::{Sse, SseEvent};
use crate::support::world::OPERATOR_KEY;
use crate::support::{Fields, Reply, Scene, eventually, real_time};

/// Longer than a token of the tests' people is good, leeway included.
const LIFE: Duration = Duration::from_secs(20 * 3600 + 40);
const FIVE_SECONDS: Duration = Duration::from_secs(5);
const TEN_SECONDS: Duration = Duration::from_secs(10);
const IDENTITY: &str = "x-throughline-identity";

fn completion_request(chat: &Scene, key: &str, members: Value) -> reqwest::RequestBuilder {
    let mut body = json!({"model": "main", "messages": [{"role": "user", "content": "hi"}]});
    for (member, value) in members.as_object().unwrap() {
        body[member] = value.clone();
    }
    let request = chat
        .world
        .request(Method::POST, "/v1/chat/completions", key);
    request.json(&body)
}

/// A stream without a session that has said its first words.
async fn stateless(chat: &Scene, key: &str) -> Sse {
    chat.model.push(Step::held("one ", "two"));
    let stream = completion_request(chat, key, json!({"store": false, "stream": true}));
    let mut stream = Sse::open(stream).await;
    assert_eq!(stream.header("x-throughline-stateless"), "true");
    stream.reads("one ").await;
    stream
}

/// What a stream ends with, which it must within this time.
async fn last(stream: &mut Sse, since: Instant, limit: Duration) -> SseEvent {
    let rest = stream.rest().await;
    assert!(since.elapsed() < limit, "{:?}", since.elapsed());
    rest.last().expect("an end with its reason").clone()
}

/// An error in a chat's stream, as clients of OpenAI read it.
fn expect_told(last: &SseEvent, code: &str) {
    assert_eq!(last.name, "");
    assert_eq!(last.json()["error"]["code"], code, "{last:?}");
}

fn expect_closed(last: &SseEvent, code: &str) {
    assert_eq!(
        (last.name.as_str(), last.json()),
        ("closed", json!({"code": code}))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_that_is_open_ends_when_its_token_expires() {
    let chat = Scene::with_prompt([]).await;
    let ada = chat.sign_in("ada").await;
    let mut free = stateless(&chat, &ada.token).await;
    chat.model.push(Step::held("one ", "two"));
    let mut told = Sse::open(completion_request(
        &chat,
        &ada.token,
        json!({"stream": true}),
    ))
    .await;
    told.reads("one ").await;
    let session = told.header("x-hermes-session-id");
    let open = |path: String| Sse::open(chat.world.request(Method::GET, &path, &ada.token));
    let mut streams = [
        open(format!("/v1/sessions/{session}/events")).await,
        open("/v1/session-keys/agent%3Amain%3Aweb%3Adm%3Aada/events".to_owned()).await,
        open(format!(
            "/v1/turns/{}/events",
            told.header("x-throughline-turn-id")
        ))
        .await,
    ];
    chat.model.push(Step::Hold);
    let whole = tokio::spawn(Reply::of(completion_request(
        &chat,
        &ada.token,
        json!({"store": false}),
    )));
    let inbound = chat.world.request(Method::POST, "/v1/inbound", &ada.token);
    let inbound = tokio::spawn(Reply::of(inbound.json(&json!({"text": "more"}))));
    chat.model.called(3).await;
    let turns = format!("/v1/sessions/{session}/turns");
    let queued = async || {
        let turns = chat.world.get(&ada.token, &turns).await.expect(200);
        turns.list().len() == 2
    };
    eventually("it waits", TEN_SECONDS, queued).await;

    chat.world.clock.advance(LIFE);
    let since = Instant::now();
    for stream in &mut streams {
        expect_closed(&last(stream, since, FIVE_SECONDS).await, "token_expired");
    }
    for stream in [&mut free, &mut told] {
        expect_told(&last(stream, since, FIVE_SECONDS).await, "token_expired");
    }
    whole
        .await
        .unwrap()
        .expect_openai_error(401, "token_expired");
    inbound.await.unwrap().expect_problem(401, "token_expired");
    assert!(since.elapsed() < FIVE_SECONDS, "{:?}", since.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn chats_without_a_session_end_with_their_key_issuer_and_tenant() {
    let chat = Scene::with_prompt([]).await;
    let world = &chat.world;
    let admin = &chat.tenant.key;
    let (id, key) = world.api_key(&chat.tenant, "chat").await;
    let ada = sign_in(world, &chat.tenant, "ada").await;

    let mut stream = stateless(&chat, &key).await;
    chat.model.push(Step::Hold);
    let whole = tokio::spawn(Reply::of(completion_request(&chat, &key, json!({}))));
    chat.model.called(2).await;
    let revoked = world.delete(admin, &format!("/v1/api-keys/{id}")).await;
    revoked.expect_success();
    let since = Instant::now();
    expect_told(&last(&mut stream, since, FIVE_SECONDS).await, "key_revoked");
    whole.await.unwrap().expect_openai_error(401, "key_revoked");
    assert!(since.elapsed() < FIVE_SECONDS, "{:?}", since.elapsed());

    let mut stream = stateless(&chat, &ada.token).await;
    world
        .delete(admin, "/v1/issuers/people")
        .await
        .expect_success();
    let since = Instant::now();
    expect_told(
        &last(&mut stream, since, FIVE_SECONDS).await,
        "invalid_token",
    );

    let mut stream = stateless(&chat, admin).await;
    let path = format!("/v1/tenants/{}/suspend", chat.tenant.id);
    world
        .post(OPERATOR_KEY, &path, json!({}))
        .await
        .expect_success();
    let since = Instant::now();
    expect_told(
        &last(&mut stream, since, TEN_SECONDS).await,
        "tenant_suspended",
    );
    let path = format!("/v1/tenants/{}/resume", chat.tenant.id);
    world
        .post(OPERATOR_KEY, &path, json!({}))
        .await
        .expect_success();
    let back = async || world.get(admin, "/v1/tenant").await.status == 200;
    eventually("the tenant is back", TEN_SECONDS, back).await;

    let mut stream = stateless(&chat, admin).await;
    let path = format!("/v1/tenants/{}", chat.tenant.id);
    world.delete(OPERATOR_KEY, &path).await.expect_success();
    let since = Instant::now();
    let ended = last(&mut stream, since, TEN_SECONDS).await;
    assert!(ended.json()["error"]["code"].is_string(), "{ended:?}");
}

/// How many users and identities of these names there are.
async fn known_by(chat: &Scene, name: &str) -> i64 {
    sqlx::query_scalar("select count(*) from identities where external_id = $1")
        .bind(name)
        .fetch_one(&mut chat.world.superuser().await)
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn open_requests_restore_no_erased_user() {
    let chat = Scene::with_prompt([]).await;
    let User { token, user_id } = chat.sign_in("goner").await;
    let mut free = stateless(&chat, &token).await;
    chat.model.push(Step::held("one ", "two"));
    let mut told = Sse::open(completion_request(&chat, &token, json!({"stream": true}))).await;
    told.reads("one ").await;
    let path = format!("/v1/sessions/{}/events", told.header("x-hermes-session-id"));
    let mut events = Sse::open(chat.world.request(Method::GET, &path, &token)).await;
    let inbound = chat.world.request(Method::POST, "/v1/inbound", &token);
    let inbound = tokio::spawn(Reply::of(inbound.json(&json!({"text": "more"}))));
    let waits = async || {
        let path = format!("/v1/sessions/{}/turns", told.header("x-hermes-session-id"));
        let turns = chat.world.get(&chat.tenant.key, &path).await.expect(200);
        turns.list().len() == 2
    };
    eventually("it waits", TEN_SECONDS, waits).await;
    assert_eq!(known_by(&chat, "goner").await, 1);
    let path = format!("/v1/users/{user_id}");
    chat.world.delete(&chat.tenant.key, &path).await.expect(202);
    let since = Instant::now();
    assert_eq!(last(&mut events, since, FIVE_SECONDS).await.name, "closed");
    for stream in [&mut free, &mut told] {
        let ended = last(stream, since, FIVE_SECONDS).await;
        assert!(ended.json()["error"]["code"].is_string(), "{ended:?}");
    }
    assert_eq!(inbound.await.unwrap().status, 404);
    assert_eq!(known_by(&chat, "goner").await, 0);
}

const STAYS: &str = "telegram:5";
const LEAVES: &str = "discord:5";

#[tokio::test(flavor = "multi_thread")]
async fn a_chats_stream_shows_nothing_that_was_said_after_its_sender_was_unlinked() {
    let b: Scene = Scene::bridge([]).await;
    b.model.otherwise(Step::Echo(Duration::ZERO));
    b.world.link(&b.bridge_key, STAYS, LEAVES).await;
    b.send(json!({"identity": STAYS, "text": "hello"}))
        .await
        .expect(200);
    for other in [0, 1] {
        b.model.push(Step::held("before ", "after"));
        let open = |node: usize| {
            let url = b.world.url_on(node, "/v1/chat/completions");
            let body = json!({"model": "main", "user": LEAVES, "stream": true,
                              "messages": [{"role": "user", "content": "go on"}]});
            let request = b
                .world
                .client
                .post(url)
                .bearer_auth(&b.bridge_key)
                .json(&body);
            let key = format!("round-{other}");
            Sse::open(
                request
                    .header(IDENTITY, LEAVES)
                    .header("idempotency-key", key),
            )
        };
        // The turn runs on the first node; the second stream is attached to it.
        let mut direct = open(0).await;
        direct.reads("before ").await;
        let mut attached = open(other).await;
        attached.reads("before ").await;
        // The verdicts are as fresh as they can be.
        b.reply_to(LEAVES, "/unlink").await;
        b.model.release();
        for stream in [&mut direct, &mut attached] {
            let rest = stream.rest().await;
            assert_eq!(crate::support::sse::text_of(&rest), "", "{rest:?}");
            assert!(rest.last().unwrap().json()["error"]["code"].is_string());
        }
        b.world.link(&b.bridge_key, STAYS, LEAVES).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_tenant_shows_no_words_to_a_sender_who_was_unlinked() {
    let b: Scene = Scene::bridge([]).await;
    b.world.link(&b.bridge_key, STAYS, LEAVES).await;
    b.send(json!({"identity": STAYS, "text": "hello"}))
        .await
        .expect_success();
    b.model.push(Step::held("before ", "after"));
    let body = json!({"model": "main", "user": LEAVES, "stream": true,
                      "messages": [{"role": "user", "content": "go on"}]});
    let request = b
        .world
        .request(Method::POST, "/v1/chat/completions", &b.bridge_key);
    let mut stream = Sse::open(request.json(&body).header(IDENTITY, LEAVES)).await;
    stream.reads("before ").await;
    // Four of the node's five connections are all that a tenant has; the queue behind them is full.
    let caller = service_caller(b.tenant.id.parse::<TenantId>().unwrap());
    let db = b.world.app().db.clone();
    let mut held = Vec::new();
    for _ in 0..4 {
        held.push(caller.begin(&db).await.unwrap());
    }
    let mut crowd = tokio::task::JoinSet::new();
    for _ in 0..300 {
        let db = db.clone();
        let caller = caller.clone();
        crowd.spawn(async move {
            loop {
                drop(caller.begin(&db).await);
                real_time("a crowd that comes again", Duration::from_millis(5)).await;
            }
        });
    }
    let full = async || {
        caller
            .begin(&db)
            .await
            .is_err_and(|error| error.code == Code::Busy)
    };
    eventually("the queue is full", TEN_SECONDS, full).await;
    let unlink = json!({"identity": LEAVES, "text": "/unlink"});
    b.send_on(1, unlink).await.expect(200);
    b.model.release();
    let shown = tokio::time::timeout(Duration::from_secs(3), stream.next()).await;
    if let Ok(Some(event)) = &shown {
        assert_eq!(event.text(), "", "{event:?}");
    }
    crowd.abort_all();
    drop(held);
    let rest = stream.rest().await;
    assert_eq!(crate::support::sse::text_of(&rest), "", "{rest:?}");
    let last = rest.last().cloned().or(shown.ok().flatten()).unwrap();
    assert!(last.json()["error"]["code"].is_string());
}
