//! Scene in sessions: where a message belongs, what the model is shown, and what the client is told of the
//! effective session.

use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::people::sign_in;
use crate::support::servers::model::Step;
use crate::support::sse::events;
use crate::support::{Fields, Reply, Scene, World};

fn say(text: &str) -> Step {
    Step::Say(text.to_owned())
}

impl Scene {
    /// Asks with these headers; the rest of the request is `body`.
    async fn ask_in(&self, headers: &[(&str, &str)], body: Value) -> Reply {
        ask(&self.world, &self.key, headers, body).await
    }
}

async fn ask(world: &World, key: &str, headers: &[(&str, &str)], body: Value) -> Reply {
    let mut asked = json!({"model": "main", "messages": [{"role": "user", "content": "hi"}]});
    for (member, value) in body.as_object().unwrap() {
        asked[member] = value.clone();
    }
    let mut request = world.request(Method::POST, "/v1/chat/completions", key);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    Reply::of(request.json(&asked)).await
}

fn user(text: &str) -> Value {
    json!({"messages": [{"role": "user", "content": text}]})
}

const ID: &str = "x-hermes-session-id";
const KEY: &str = "x-hermes-session-key";

#[tokio::test(flavor = "multi_thread")]
async fn history_comes_from_the_store_and_only_what_is_new_is_used() {
    let chat = Scene::with_prompt([say("one"), say("two")]).await;
    chat.ask_in(&[(ID, "mine")], user("first"))
        .await
        .expect(200);
    let whole = json!({"messages": [
        {"role": "system", "content": "In French."},
        {"role": "user", "content": "something else"},
        {"role": "assistant", "content": "never said"},
        {"role": "user", "content": "second"},
    ], "temperature": 0.25});
    let answer = chat.ask_in(&[(ID, "mine")], whole).await.expect(200);
    assert_eq!(answer["choices"][0]["message"]["content"], "two");
    let asked = &chat.model.requests()[1];
    let expected = json!([
        {"role": "system", "content": "Be brief.\n\nIn French."},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "second"},
    ]);
    assert_eq!(asked["messages"], expected);
    assert_eq!(
        (&asked["temperature"], &asked["model"]),
        (&json!(0.25), &json!("m-1"))
    );
    let listed = chat
        .world
        .get(&chat.key, "/v1/sessions/mine/messages")
        .await
        .expect(200);
    let said: Vec<&Value> = listed
        .list()
        .iter()
        .map(|message| &message["content"])
        .collect();
    assert_eq!(said, ["first", "one", "second", "two"]);
    let turn = &answer["hermes"]["turn_id"];
    assert_eq!(&listed["data"][3]["turn_id"], turn);
}

#[tokio::test(flavor = "multi_thread")]
async fn any_id_of_a_chain_leads_to_its_tip_and_the_answer_names_it() {
    let chat = Scene::with_prompt([say("one"), say("two"), say("three")]).await;
    for text in ["a long first message that is worth a summary", "second"] {
        chat.ask_in(&[(ID, "mine")], user(text)).await.expect(200);
    }
    let compress = json!({"summary": "they met", "keep_last": 1});
    let compressed = chat
        .world
        .post(&chat.key, "/v1/sessions/mine/compress", compress)
        .await
        .expect(201);
    let reply = chat.ask_in(&[(ID, "mine")], user("third")).await;
    let answer = reply.expect(200);
    assert_eq!(answer["hermes"]["session_id"], compressed["session_id"]);
    assert_eq!(reply.header(ID), compressed.text("session_id"));
    assert_eq!(answer["hermes"]["requested_session_id"], "mine");
    assert_eq!(answer["hermes"]["conversation_id"], "mine");
    let summary = &chat.model.requests()[2]["messages"][1];
    assert_eq!(summary["role"], "user");
    assert!(summary.text("content").contains("they met"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_has_one_current_session_and_an_id_never_moves_it() {
    let chat = Scene::with_prompt((0..4).map(|n| say(&n.to_string()))).await;
    let first = chat.ask_in(&[(KEY, "work")], user("a")).await.expect(200);
    let current = first["hermes"]["session_id"].clone();
    let with_both = [(KEY, "work"), (ID, "other")];
    let other = chat.ask_in(&with_both, user("b")).await.expect(200);
    assert_eq!(other["hermes"]["session_key"], "work");
    assert_ne!(
        other["hermes"]["conversation_id"],
        first["hermes"]["conversation_id"]
    );
    let again = chat.ask_in(&[(KEY, "work")], user("c")).await.expect(200);
    assert_eq!(again["hermes"]["session_id"], current);
    let reply = chat
        .ask_in(&[(KEY, "home"), (ID, "other")], user("d"))
        .await;
    reply.expect_openai_error(409, "session_key_mismatch");
    assert_eq!(reply.header("x-should-retry"), "false");
    let by_id = chat.ask_in(&[(ID, "other")], user("d")).await.expect(200);
    assert_eq!(by_id["hermes"]["memory_key"], "work");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sender_is_answered_in_their_own_chat() {
    let chat = Scene::with_prompt((0..5).map(|n| say(&n.to_string()))).await;
    let world = &chat.world;
    let admin = &chat.tenant.key;
    let named = |who: &str, text: &str| json!({"user": who, "messages": [{"role": "user", "content": text}]});
    let first = ask(world, admin, &[], named("telegram:5", "a"))
        .await
        .expect(200);
    let key = first.text("/hermes/session_key");
    assert_eq!(key, "agent:main:telegram:dm:5");
    let resolved = world.dm(admin, "telegram:5").await;
    assert_eq!(resolved["session_id"], first["hermes"]["session_id"]);
    let again = ask(world, admin, &[], named("telegram:5", "b"))
        .await
        .expect(200);
    assert_eq!(again["hermes"]["session_id"], first["hermes"]["session_id"]);
    let messages = format!("/v1/sessions/{}/messages", first.text("/hermes/session_id"));
    let listed = world.get(admin, &messages).await.expect(200);
    assert_eq!(listed["data"][2]["identity"], "telegram:5");
    assert_eq!(listed["data"][3]["identity"], Value::Null);
    // A label is no person: nothing is kept.
    for (key, label) in [(admin, "no person"), (&chat.key, "telegram:5")] {
        let answer = ask(world, key, &[], named(label, "c")).await;
        assert_eq!(answer.expect(200).get("hermes"), None, "{label}");
    }
    let ada = sign_in(world, &chat.tenant, "ada").await;
    let own = ask(world, &ada.token, &[], named("me", "d"))
        .await
        .expect(200);
    assert_eq!(own["hermes"]["session_key"], "agent:main:web:dm:ada");
    // Nobody else's session is there for her.
    let theirs = first.text("/hermes/session_id");
    let foreign = ask(world, &ada.token, &[(ID, theirs)], user("e")).await;
    foreign.expect_openai_error(404, "session_not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reset_by_policy_is_reported() {
    let chat = Scene::with_prompt([say("one"), say("two")]).await;
    let world = &chat.world;
    let admin = &chat.tenant.key;
    let mut spec = world.get(admin, "/v1/agents/main").await.expect(200);
    let upstream = json!({"kind": "openai", "base_url": chat.model.base_url, "model": "m-1", "api_key": "sk-secret-canary"});
    spec = json!({
        "upstream": upstream, "system_prompt": spec["system_prompt"],
        "reset": {"mode": "idle", "idle_minutes": 5},
    });
    world.put(admin, "/v1/agents/main", spec).await.expect(200);
    let first = chat.ask_in(&[(KEY, "work")], user("a")).await.expect(200);
    assert_eq!(first["hermes"]["reset"], Value::Null);
    world.clock.advance(Duration::from_secs(6 * 60));
    let second = chat.ask_in(&[(KEY, "work")], user("b")).await.expect(200);
    let reset = json!({"reason": "idle", "previous_session_id": first["hermes"]["session_id"]});
    assert_eq!(second["hermes"]["reset"], reset);
    assert_ne!(
        second["hermes"]["session_id"],
        first["hermes"]["session_id"]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_in_a_session_ends_with_the_effective_session() {
    let chat = Scene::with_prompt([say("one two three"), say("four")]).await;
    let reply = chat
        .ask_in(
            &[(KEY, "work")],
            json!({"stream": true, "stream_options": {"include_usage": true}}),
        )
        .await;
    assert_eq!(reply.header(KEY), "work");
    assert!(reply.body.ends_with("data: [DONE]\n\n"));
    let chunks = events(&reply);
    let said: String = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str())
        .collect();
    assert_eq!(said, "one two three");
    let usage = &chunks[chunks.len() - 1];
    let finish = &chunks[chunks.len() - 2];
    assert_eq!(finish["choices"][0]["finish_reason"], "stop");
    assert_eq!(finish["hermes"]["session_key"], "work");
    assert_eq!(
        finish["hermes"]["turn_id"],
        reply.header("x-throughline-turn-id")
    );
    assert_eq!(usage["choices"], json!([]));
    assert!(usage["usage"]["total_tokens"].is_number());
    let plain = chat.ask_in(&[(KEY, "work")], json!({"stream": true})).await;
    let all_have_choices = |chunk: &Value| !chunk.items("choices").is_empty();
    assert!(events(&plain).iter().all(all_have_choices));
}

#[tokio::test(flavor = "multi_thread")]
async fn one_idempotency_key_for_two_sessions_is_a_conflict() {
    let chat = Scene::with_prompt([say("one")]).await;
    let named = |session| [(ID, session), ("idempotency-key", "once")];
    let first = chat.ask_in(&named("a"), json!({})).await.expect(200);
    let again = chat.ask_in(&named("a"), json!({})).await;
    assert_eq!(again.header("idempotency-replayed"), "true");
    assert_eq!(again.expect(200)["hermes"], first["hermes"]);
    let other = chat.ask_in(&named("b"), json!({})).await;
    other.expect_openai_error(409, "idempotency_conflict");
}

#[tokio::test(flavor = "multi_thread")]
async fn other_events_come_only_to_clients_that_ask_for_them() {
    let chat = Scene::with_prompt([say("one"), say("two")]).await;
    let plain = chat.ask_in(&[(KEY, "work")], json!({"stream": true})).await;
    assert!(!plain.body.contains("event:"), "{}", plain.body);
    let options = json!({"stream": true, "stream_options": {"include_hermes_events": true}});
    let told = chat.ask_in(&[(KEY, "work")], options).await;
    let named: Vec<&str> = told
        .body
        .lines()
        .filter_map(|line| line.strip_prefix("event: "))
        .collect();
    assert_eq!(named, ["hermes.turn.started", "hermes.turn.completed"]);
    let asked = &chat.model.requests()[1];
    assert_eq!(asked["stream_options"], json!({"include_usage": true}));
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_that_a_session_cannot_store_are_refused_whole() {
    let chat = Scene::with_prompt([say("one")]).await;
    let assistant_last = json!({"messages": [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
    ]});
    let no_text = json!({"messages": [{"role": "user", "content": 5}]});
    let results = json!({"messages": [{"role": "tool", "tool_call_id": "c", "content": "x"}]});
    for (headers, body, status, code) in [
        ([(ID, "a/b")], json!({}), 400, "invalid_session_id"),
        ([(KEY, "a b")], json!({}), 400, "invalid_session_key"),
        ([(ID, "ses_unknown")], json!({}), 404, "session_not_found"),
        (
            [(KEY, "agent:main:main")],
            json!({}),
            404,
            "session_key_not_found",
        ),
        (
            [(ID, "mine")],
            json!({"model": "other"}),
            404,
            "model_not_found",
        ),
        ([(ID, "mine")], assistant_last, 400, "invalid_request"),
        ([(ID, "mine")], no_text, 400, "invalid_request"),
        ([(ID, "mine")], json!({"n": 2}), 400, "invalid_request"),
        ([(ID, "mine")], results, 400, "tool_call_unknown"),
    ] {
        let reply = chat.ask_in(&headers, body).await;
        reply.expect_openai_error(status, code);
        assert_eq!(reply.header("x-should-retry"), "false", "{code}");
    }
    let sessions = chat.world.get(&chat.key, "/v1/sessions").await.expect(200);
    assert_eq!(sessions["data"], json!([]));
    chat.ask_in(&[(ID, "mine")], json!({})).await.expect(200);
    let upstream = json!({"kind": "demo"});
    let spec = json!({ "upstream": upstream });
    let put = chat
        .world
        .put(&chat.tenant.key, "/v1/agents/second", spec)
        .await;
    put.expect_success();
    let reply = chat
        .ask_in(&[(ID, "mine")], json!({"model": "second"}))
        .await;
    reply.expect_openai_error(409, "agent_mismatch");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_model_s_server_gets_the_key_only_if_the_agent_forwards_it() {
    let chat = Scene::with_prompt([say("one"), say("two")]).await;
    chat.ask_in(&[(KEY, "work")], json!({})).await.expect(200);
    let upstream = json!({
        "kind": "openai", "base_url": chat.model.base_url, "model": "m-1", "api_key": "sk-secret-canary",
        "forward_session_key": true,
    });
    let spec = json!({ "upstream": upstream });
    let put = chat
        .world
        .put(&chat.tenant.key, "/v1/agents/main", spec)
        .await;
    put.expect(200);
    chat.world.expire_caches();
    chat.ask_in(&[(KEY, "work")], json!({})).await.expect(200);
    let keys: Vec<Option<String>> = chat.model.session_keys();
    assert_eq!(keys, [None, Some("work".to_owned())]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_turn_used_is_on_the_turn_and_in_the_usage() {
    let chat = Scene::with_prompt([say("one two")]).await;
    let answer = chat.ask_in(&[(KEY, "work")], json!({})).await.expect(200);
    let path = format!("/v1/turns/{}", answer.text("/hermes/turn_id"));
    let turn = chat.world.get(&chat.key, &path).await.expect(200);
    assert_eq!(turn["state"], "completed");
    assert_eq!(turn["message"]["content"], "one two");
    // The scripted stream tells no usage.
    assert_eq!(turn["usage"]["estimated"], true);
    assert!(turn.number("/usage/input_tokens") > 0);
    throughline::jobs::flush_usage::tick(chat.world.app()).await;
    let usage = chat
        .world
        .get(&chat.tenant.key, "/v1/usage?group_by=source")
        .await
        .expect(200);
    let of_chat = |row: &&Value| row["source"] == "chat_estimated";
    let row = usage.list().iter().find(of_chat);
    let row = row.unwrap_or_else(|| panic!("{usage}"));
    assert_eq!(row["turns"], 1);
    assert_eq!(row["output_tokens"], turn["usage"]["output_tokens"]);
}
