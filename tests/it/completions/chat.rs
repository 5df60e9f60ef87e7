//! `/v1/chat/completions` and `/v1/models` without a session: passed to the agent's model and back.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::people::sign_in;
use crate::support::servers::model::Step;
use crate::support::sse::events;
use crate::support::{Fields, Reply, Scene, World, eventually};

impl Scene {
    async fn ask(&self, body: Value) -> Reply {
        let mut asked = json!({"model": "main", "messages": [{"role": "user", "content": "hi"}]});
        for (member, value) in body.as_object().unwrap() {
            asked[member] = value.clone();
        }
        self.world
            .post(&self.key, "/v1/chat/completions", asked)
            .await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_is_passed_back_with_the_agents_name_and_no_session() {
    let chat = Scene::with_prompt([Step::Say("hello there".to_owned())]).await;
    let reply = chat.ask(json!({"temperature": 0.5})).await;
    let answer = reply.expect(200);
    assert_eq!(answer["choices"][0]["message"]["content"], "hello there");
    assert_eq!(answer["model"], "main");
    assert_eq!(answer.get("hermes"), None);
    assert!(!reply.headers.contains_key("x-hermes-session-id"));
    let asked = &chat.model.requests()[0];
    assert_eq!(asked["model"], "m-1");
    assert_eq!(asked["temperature"], 0.5);
    let system = json!({"role": "system", "content": "Be brief."});
    assert_eq!(
        asked["messages"],
        json!([system, {"role": "user", "content": "hi"}])
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_comes_word_by_word_and_breaks_no_plain_loop() {
    let chat = Scene::with_prompt([
        Step::Say("one two three".to_owned()),
        Step::Say("four".to_owned()),
    ])
    .await;
    let reply = chat.ask(json!({"stream": true})).await;
    assert_eq!(reply.status, 200);
    assert_eq!(reply.header("content-type"), "text/event-stream");
    assert!(reply.body.ends_with("data: [DONE]\n\n"));
    let chunks = events(&reply);
    let said: String = chunks
        .iter()
        .map(|chunk| {
            chunk["choices"][0]["delta"]["content"]
                .as_str()
                .unwrap_or_default()
        })
        .collect();
    assert_eq!(said, "one two three");
    assert!(chunks.iter().all(|chunk| chunk["model"] == "main"));
    assert!(
        chunks
            .iter()
            .all(|chunk| !chunk.items("choices").is_empty())
    );
    let asked = &chat.model.requests()[0];
    assert_eq!(asked["stream_options"], json!({"include_usage": true}));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_demo_model_answers_and_streams_without_a_key() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let ada = sign_in(&world, &tenant, "ada").await;
    let said = json!([{"role": "user", "content": "hi"}]);
    let body =
        |stream: bool| json!({"model": "main", "messages": said, "stream": stream, "store": false});
    for key in [&tenant.key, &ada.token] {
        let answer = world
            .post(key, "/v1/chat/completions", body(false))
            .await
            .expect(200);
        let text = answer.text("/choices/0/message/content").to_owned();
        assert!(text.contains("demo model"), "{text}");
        let reply = world.post(key, "/v1/chat/completions", body(true)).await;
        let said: String = events(&reply)
            .iter()
            .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str())
            .collect();
        assert_eq!(said, text);
    }
    let models = world.get(&tenant.key, "/v1/models").await.expect(200);
    assert_eq!(models["data"][0]["id"], "main");
    assert_eq!(
        world.get(&ada.token, "/v1/models/main").await.expect(200)["object"],
        "model"
    );
    world
        .get(&tenant.key, "/v1/models/nobody")
        .await
        .expect_openai_error(404, "model_not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_have_openais_shape_and_say_whose_fault_it_is() {
    let fail = |status: u16, message: &str| Step::Fail {
        status,
        body: json!({"error": {"message": message}}),
    };
    let chat = Scene::with_prompt([
        fail(400, "context too long, key sk-abcdefghijklmnop1234567890"),
        fail(401, "bad key"),
    ])
    .await;
    let refused = chat
        .ask(json!({}))
        .await
        .expect_openai_error(400, "upstream_refused");
    let message = refused.text("message");
    assert!(
        message.contains("context too long") && !message.contains("sk-abc"),
        "{message}"
    );
    let not_allowed = chat
        .ask(json!({}))
        .await
        .expect_openai_error(502, "upstream_failed");
    assert_eq!(not_allowed["type"], "server_error");
    chat.ask(json!({"model": "nobody"}))
        .await
        .expect_openai_error(404, "model_not_found");
    let wrong = chat
        .ask(json!({"messages": []}))
        .await
        .expect_openai_error(400, "invalid_request");
    assert_eq!(wrong["param"], "messages");
    chat.ask(json!({"user": 5}))
        .await
        .expect_openai_error(400, "invalid_request");
    let no_key = chat
        .world
        .post("tl_x", "/v1/chat/completions", json!({}))
        .await;
    no_key.expect_openai_error(401, "unauthorized");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_is_tried_again_only_before_the_first_byte() {
    let failing = || Step::Fail {
        status: 503,
        body: json!({}),
    };
    let chat = Scene::with_prompt([
        failing(),
        failing(),
        Step::Say("at last".to_owned()),
        Step::BreakOff("one two".to_owned()),
    ])
    .await;
    let answer = chat.ask(json!({})).await.expect(200);
    assert_eq!(answer["choices"][0]["message"]["content"], "at last");
    assert_eq!(chat.model.requests().len(), 3);
    let broken = chat.ask(json!({"stream": true})).await;
    let chunks = events(&broken);
    let (error, said) = chunks.split_last().unwrap();
    assert_eq!(said.len(), 2);
    assert_eq!(error["error"]["code"], "upstream_failed");
    assert!(!broken.body.contains("[DONE]"));
    assert_eq!(chat.model.requests().len(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_fails_again_and_again_is_left_alone() {
    let failing = (0..20).map(|_| Step::Fail {
        status: 500,
        body: json!({}),
    });
    let chat = Scene::with_prompt(failing).await;
    for _ in 0..2 {
        chat.ask(json!({}))
            .await
            .expect_openai_error(502, "upstream_failed");
    }
    let asked = chat.model.requests().len();
    assert!((5..=6).contains(&asked), "{asked}");
    let left_alone = chat.ask(json!({})).await;
    left_alone.expect_openai_error(502, "upstream_failed");
    assert!(!left_alone.header("retry-after").is_empty());
    assert_eq!(chat.model.requests().len(), asked);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_used_is_counted_also_when_the_client_leaves() {
    let chat = Scene::with_prompt([
        Step::Say("hello".to_owned()),
        Step::Say("one two three".to_owned()),
    ])
    .await;
    chat.ask(json!({})).await.expect(200);
    chat.ask(json!({"stream": true})).await;
    eventually("usage", Duration::from_secs(5), async || {
        throughline::jobs::flush_usage::tick(chat.world.app()).await;
        let usage = chat
            .world
            .get(&chat.tenant.key, "/v1/usage?group_by=source,agent,model")
            .await
            .expect(200);
        let rows = usage.list().clone();
        let row = |source: &str| rows.iter().find(|row| row["source"] == source).cloned();
        let (Some(told), Some(estimated)) = (row("chat"), row("chat_estimated")) else {
            return false;
        };
        assert_eq!(
            (&told["input_tokens"], &told["output_tokens"]),
            (&json!(1), &json!(1))
        );
        assert_eq!(
            (&told["agent"], &told["model"]),
            (&json!("main"), &json!("m-1"))
        );
        estimated.number("output_tokens") > 0
    })
    .await;
}
