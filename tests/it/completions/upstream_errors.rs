//! What goes wrong at a model's server, as clients are told it: whose fault it is, and whether to ask again. And
//! models that are silent for long.

use std::time::{Duration, Instant};

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::chat::answer;
use crate::support::servers::model::{Failure, Step};
use crate::support::sse::{Sse, text_of};
use crate::support::{Reply, Scene, Tenant, World};

impl Scene {
    fn stateless(&self, members: Value) -> reqwest::RequestBuilder {
        let mut body = json!({"model": "main", "messages": [{"role": "user", "content": "hi"}]});
        for (member, value) in members.as_object().unwrap() {
            body[member] = value.clone();
        }
        let path = "/v1/chat/completions";
        let request = self.world.request(Method::POST, path, &self.key);
        request.json(&body)
    }

    async fn ask_stateless(&self, members: Value) -> Reply {
        Reply::of(self.stateless(members)).await
    }
}

fn failing(status: u16, error: Value) -> Step {
    let body = json!({ "error": error });
    Step::Fail { status, body }
}

fn too_long() -> Value {
    json!({"message": "This model's maximum context length is 8 tokens.",
           "type": "invalid_request_error", "param": "messages", "code": "context_length_exceeded"})
}

#[tokio::test(flavor = "multi_thread")]
async fn a_context_that_is_too_long_keeps_its_code() {
    let inside = format!("data: {}\n\n", json!({ "error": too_long() }));
    let chat = Scene::chat([
        failing(400, too_long()),
        failing(400, too_long()),
        Step::Raw(inside),
    ])
    .await;
    let stateless = chat.ask_stateless(json!({})).await;
    let error = stateless.expect_openai_error(400, "context_length_exceeded");
    assert_eq!(error["type"], "invalid_request_error");
    assert_eq!(error["param"], "messages");
    assert_eq!(stateless.header("x-should-retry"), "false");
    for _ in ["refused", "in the stream"] {
        let reply = chat.say(0, "mine", "hi").await;
        reply.expect_openai_error(400, "context_length_exceeded");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_not_available_is_no_rate_limit() {
    let chat = Scene::chat([]).await;
    chat.model.otherwise(Step::FailWith(Failure {
        status: 503,
        retry_after: Some(30),
        body: json!({}),
    }));
    let reply = chat.ask_stateless(json!({})).await;
    reply.expect_openai_error(502, "upstream_failed");
    assert_eq!(reply.header("retry-after"), "30");
    let reply = chat.say(0, "mine", "hi").await;
    reply.expect_openai_error(502, "upstream_failed");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_inside_a_stream_is_reported_as_what_it_is() {
    let error = json!({"error": {"message": "the engine is on fire", "type": "server_error"}});
    let inside = format!("data: {error}\n\n");
    let chat = Scene::chat([
        Step::Raw(inside.clone()),
        Step::Raw(inside),
        Step::Raw(error.to_string()),
    ])
    .await;
    let in_session = chat.say(0, "mine", "hi").await;
    let streamed = chat.ask_stateless(json!({"stream": true})).await;
    let whole = chat.ask_stateless(json!({})).await;
    whole.expect_openai_error(502, "upstream_failed");
    for reply in [in_session, streamed, whole] {
        assert!(
            reply.body.contains("the engine is on fire"),
            "{}",
            reply.body
        );
        assert!(!reply.body.contains("200"), "{}", reply.body);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_without_a_choice_is_a_failure_of_the_server() {
    let chat = Scene::chat([Step::Raw(json!({"choices": []}).to_string())]).await;
    let reply = chat.ask_stateless(json!({})).await;
    reply.expect_openai_error(502, "upstream_failed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_the_server_refuses_is_not_retried() {
    let chat = Scene::chat([Step::fail(401), Step::fail(403)]).await;
    for _ in [401, 403] {
        let reply = chat.ask_stateless(json!({})).await;
        reply.expect_openai_error(502, "upstream_failed");
        assert_eq!(reply.header("x-should-retry"), "false");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_is_named_as_openai_names_it() {
    let chat = Scene::chat([]).await;
    let reply = chat.ask_stateless(json!({"model": "nobody"})).await;
    assert_eq!(
        reply.expect_openai_error(404, "model_not_found")["param"],
        "model"
    );
    let odd = json!({"messages": [{"role": "user", "content": 5}]});
    let reply = Reply::of(chat.completion_request(0, "mine", odd)).await;
    let error = reply.expect_openai_error(400, "invalid_request");
    assert_eq!(error["param"], "messages[0]");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_failed_names_its_session_and_a_replay_says_that_it_is_one() {
    let chat = Scene::chat([failing(400, json!({"message": "no"}))]).await;
    let ask = || {
        let request = chat.message_request(0, "mine", "hi");
        Reply::of(request.header("idempotency-key", "k1"))
    };
    let first = ask().await;
    first.expect_openai_error(400, "upstream_refused");
    let again = ask().await;
    again.expect_openai_error(400, "upstream_refused");
    for reply in [&first, &again] {
        assert_eq!(reply.header("x-hermes-session-id"), "mine");
        assert_eq!(reply.header("x-throughline-conversation-id"), "mine");
        assert!(reply.header("x-throughline-turn-id").starts_with("trn_"));
    }
    assert!(!first.headers.contains_key("idempotency-replayed"));
    assert_eq!(again.header("idempotency-replayed"), "true");
    assert_eq!(chat.model.requests().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_session_an_idempotency_key_has_no_effect() {
    let chat = Scene::chat([Step::say("one"), Step::say("two")]).await;
    for told in ["one", "two"] {
        let request = chat.stateless(json!({}));
        let reply = Reply::of(request.header("idempotency-key", "k1")).await;
        assert_eq!(answer(&reply), told);
        assert_eq!(reply.header("x-throughline-stateless"), "true");
        assert!(!reply.headers.contains_key("idempotency-replayed"));
    }
}

/// An agent whose model may be silent for a second.
async fn hasty(steps: impl IntoIterator<Item = Step>) -> Scene {
    let chat = Scene::chat(steps).await;
    set_timeout(&chat.world, &chat.tenant, &chat.model.base_url, 1).await;
    chat
}

async fn set_timeout(world: &World, tenant: &Tenant, base_url: &str, seconds: u32) {
    let upstream = json!({
        "kind": "openai", "base_url": base_url, "model": "m-1", "api_key": "k",
        "timeout_seconds": seconds,
    });
    let spec = json!({ "upstream": upstream });
    let put = world.put(&tenant.key, "/v1/agents/main", spec).await;
    assert_eq!(put.expect(200)["upstream"]["timeout_seconds"], seconds);
    world.expire_caches();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_says_how_long_its_model_may_be_silent() {
    let chat = hasty([Step::Hold, Step::Hold, Step::held("first ", "rest")]).await;
    let began = Instant::now();
    let stateless = chat.ask_stateless(json!({})).await;
    stateless.expect_openai_error(504, "upstream_timeout");
    assert_eq!(stateless.header("x-should-retry"), "false");
    let in_session = chat.say(0, "mine", "hi").await;
    in_session.expect_openai_error(504, "upstream_timeout");
    assert_eq!(in_session.header("x-should-retry"), "false");
    // Also once it has begun.
    let begun = chat.say(0, "mine", "hi").await;
    begun.expect_openai_error(504, "upstream_timeout");
    assert!(began.elapsed() < Duration::from_secs(10));
    assert_eq!(chat.model.requests().len(), 3);
    for wrong in [0, 3601] {
        let upstream = json!({"kind": "demo", "timeout_seconds": wrong});
        let spec = json!({ "upstream": upstream });
        let put = chat
            .world
            .put(&chat.tenant.key, "/v1/agents/main", spec)
            .await;
        put.expect_problem(422, "invalid_value");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stateless_stream_is_kept_alive_while_the_model_is_silent() {
    let chat = Scene::chat([
        Step::Hold,
        Step::say("at last"),
        Step::Hold,
        Step::fail(400),
    ])
    .await;
    for told in ["at last", "upstream_refused"] {
        let mut stream = Sse::open(chat.stateless(json!({"stream": true}))).await;
        stream.comment().await;
        chat.model.release();
        let rest = stream.rest().await;
        let texts: Vec<String> = rest.iter().map(|event| event.data.clone()).collect();
        let rest = text_of(&rest) + &texts.concat();
        assert!(rest.contains(told), "{rest}");
    }
    assert_eq!(chat.model.requests().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_in_a_session_is_kept_alive_while_the_model_is_silent() {
    let chat = Scene::chat([Step::Hold, Step::say("at last")]).await;
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "stream": true});
    let mut stream = Sse::open(chat.completion_request(0, "mine", body)).await;
    // Who speaks.
    stream.next().await;
    stream.comment().await;
    chat.model.release();
    assert_eq!(text_of(&stream.rest().await), "at last");
    assert_eq!(chat.model.requests().len(), 1);
}
