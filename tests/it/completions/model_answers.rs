//! What a model says beside its text, in sessions and on platforms.

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::chat::answer;
use crate::support::conversations::user_message;
use crate::support::servers::model::Step;
use crate::support::sse::{Sse, SseEvent};
use crate::support::{Fields, Reply, Scene};

/// A stream of these deltas.
fn streams(deltas: &[Value]) -> Step {
    let chunk = |delta: &Value, finish: Value| {
        let choice = json!({"index": 0, "delta": delta, "finish_reason": finish});
        format!("data: {}\n\n", json!({"choices": [choice]}))
    };
    let mut text: String = deltas
        .iter()
        .map(|delta| chunk(delta, Value::Null))
        .collect();
    text.push_str(&chunk(&json!({}), json!("stop")));
    text.push_str("data: [DONE]\n\n");
    Step::Raw(text)
}

fn refusal() -> Step {
    streams(&[json!({"refusal": "I can't "}), json!({"refusal": "help."})])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_is_kept_in_the_session_and_shown_as_one() {
    let chat = Scene::chat([refusal(), Step::say("fine")]).await;
    let reply = chat.say(0, "mine", "do it").await.expect(200);
    let message = &reply["choices"][0]["message"];
    assert_eq!(message["content"], Value::Null, "{reply}");
    assert_eq!(message["refusal"], "I can't help.");
    let kept = json!([{"type": "refusal", "refusal": "I can't help."}]);
    assert_eq!(chat.transcript("mine").await[1]["content"], kept);
    let next = chat.say(1, "mine", "why?").await;
    assert_eq!(answer(&next), "fine");
    assert_eq!(
        next.expect(200)["choices"][0]["message"]["refusal"],
        Value::Null
    );
    assert_eq!(chat.model.requests()[1]["messages"][1]["content"], kept);
}

/// What providers tell beside the text, in chunks as they have them.
fn talkative() -> Step {
    let chunk = |choice: Value| {
        let chunk = json!({
            "id": "x", "model": "m-1", "system_fingerprint": "fp_1", "service_tier": "flex", "choices": [choice],
        });
        format!("data: {chunk}\n\n")
    };
    let piece = |text: &str| {
        let logprobs = json!({"content": [{"token": text, "logprob": -0.5}], "refusal": null});
        json!({"index": 0, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": null})
    };
    let thought = |text: &str| json!({"index": 0, "delta": {"reasoning_content": text}, "finish_reason": null});
    let usage = json!({
        "prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 5, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 3},
    });
    let mut text: String = [
        thought("let me "),
        thought("think"),
        piece("four"),
        piece("ty"),
    ]
    .map(chunk)
    .concat();
    text += &chunk(json!({"index": 0, "delta": {}, "finish_reason": "stop"}));
    text += &format!("data: {}\n\n", json!({"choices": [], "usage": usage}));
    text += "data: [DONE]\n\n";
    Step::Raw(text)
}

fn expect_details(usage: &Value) {
    assert_eq!(usage["total_tokens"], 13, "{usage}");
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 5);
    assert_eq!(usage["completion_tokens_details"]["reasoning_tokens"], 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_model_sends_beside_its_text_is_in_a_whole_answer_and_in_its_replay() {
    let chat = Scene::chat([talkative()]).await;
    for node in [0, 1] {
        let request = chat.message_request(node, "mine", "how many?");
        let reply = Reply::of(request.header("idempotency-key", "k1")).await;
        let body = reply.expect(200);
        let choice = &body["choices"][0];
        assert_eq!(choice["message"]["content"], "fourty");
        assert_eq!(choice["message"]["reasoning_content"], "let me think");
        let tokens = choice.items("/logprobs/content");
        let tokens: Vec<&Value> = tokens.iter().map(|token| &token["token"]).collect();
        assert_eq!(tokens, ["four", "ty"], "{body}");
        assert_eq!(choice["logprobs"]["refusal"], Value::Null);
        assert_eq!(body["system_fingerprint"], "fp_1");
        assert_eq!(body["service_tier"], "flex");
        expect_details(&body["usage"]);
    }
    assert_eq!(chat.model.requests().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_model_sends_beside_its_text_is_in_a_stream() {
    let chat = Scene::chat([talkative()]).await;
    let body = json!({
        "messages": [user_message("how many?")], "stream": true, "logprobs": true,
        "stream_options": {"include_usage": true},
    });
    let mut stream = Sse::open(chat.completion_request(0, "mine", body)).await;
    let events = stream.rest().await;
    let chunks: Vec<Value> = events
        .iter()
        .filter(|event| event.data != "[DONE]")
        .map(SseEvent::json)
        .collect();
    let choices: Vec<&Value> = chunks.iter().map(|chunk| &chunk["choices"][0]).collect();
    let thoughts = choices
        .iter()
        .filter_map(|choice| choice["delta"]["reasoning_content"].as_str());
    assert_eq!(thoughts.collect::<String>(), "let me think");
    let tokens = choices
        .iter()
        .filter_map(|choice| choice["logprobs"]["content"][0]["token"].as_str());
    assert_eq!(tokens.collect::<Vec<_>>(), ["four", "ty"]);
    let finish = chunks
        .iter()
        .find(|chunk| chunk["choices"][0]["finish_reason"] == "stop")
        .unwrap();
    assert_eq!(finish["system_fingerprint"], "fp_1");
    assert_eq!(finish["service_tier"], "flex");
    let last = chunks.last().unwrap();
    assert_eq!(last["system_fingerprint"], "fp_1");
    expect_details(&last["usage"]);
    assert_eq!(chat.model.requests()[0]["logprobs"], true);
}

#[tokio::test(flavor = "multi_thread")]
async fn usage_details_of_all_calls_of_a_turn_are_added_up() {
    let unknown =
        json!([{"index": 0, "id": "c1", "function": {"name": "nobodys", "arguments": "{}"}}]);
    let usage = json!({
        "prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 2},
    });
    let called = json!({
        "choices": [{"index": 0, "delta": {"tool_calls": unknown}, "finish_reason": "tool_calls"}], "usage": usage,
    });
    let called = Step::Raw(format!("data: {called}\n\ndata: [DONE]\n\n"));
    let chat = Scene::chat([called, talkative()]).await;
    let body = chat.say(0, "mine", "how many?").await.expect(200);
    assert_eq!(body["usage"]["prompt_tokens"], 10, "{body}");
    assert_eq!(body["usage"]["prompt_tokens_details"]["cached_tokens"], 7);
}

#[tokio::test(flavor = "multi_thread")]
async fn reasoning_is_kept_in_the_transcript_and_its_copies_and_not_sent_back() {
    let chat = Scene::chat([talkative(), Step::say("fine")]).await;
    chat.say(0, "mine", "how many?").await.expect(200);
    let kept = chat.transcript("mine").await;
    assert_eq!(kept[1]["reasoning_content"], "let me think");
    assert_eq!(kept[0]["reasoning_content"], Value::Null);
    chat.say(0, "mine", "sure?").await.expect(200);
    let sent = &chat.model.requests()[1]["messages"][1];
    assert_eq!(sent, &json!({"role": "assistant", "content": "fourty"}));
    let world = &chat.world;
    let key = &chat.key;
    let branch = world.post(key, "/v1/sessions/mine/branch", json!({})).await;
    let branch = branch.expect(201).id();
    let copied = chat.transcript(&branch).await;
    assert_eq!(copied[1]["reasoning_content"], "let me think");
    let document = world.get(key, "/v1/sessions/mine/export").await.expect(200);
    let imported = world.post(key, "/v1/sessions/import", document).await;
    let imported = imported.expect(201).id();
    let imported = chat.transcript(&imported).await;
    assert_eq!(imported[1]["reasoning_content"], "let me think");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_name_of_an_author_is_kept_and_passed_on() {
    let chat = Scene::chat([]).await;
    chat.model.otherwise(Step::say("fine"));
    let named = json!({"role": "user", "content": "hi", "name": "ada_l"});
    let body = json!({"messages": [named]});
    Reply::of(chat.completion_request(0, "mine", body))
        .await
        .expect(200);
    chat.say(1, "mine", "and?").await.expect(200);
    for (request, place) in [(0, 0), (1, 0)] {
        assert_eq!(chat.model.requests()[request]["messages"][place], named);
    }
    assert_eq!(
        chat.model.requests()[1]["messages"][2],
        user_message("and?")
    );
    let kept = chat.transcript("mine").await;
    assert_eq!(
        (&kept[0]["name"], &kept[2]["name"]),
        (&json!("ada_l"), &Value::Null)
    );
    let appended = chat
        .world
        .post(
            &chat.key,
            "/v1/sessions/mine/messages",
            json!({"messages": [named]}),
        )
        .await;
    assert_eq!(appended.expect(201)["messages"][0]["name"], "ada_l");
    let long = json!({"role": "user", "content": "hi", "name": "a".repeat(257)});
    let reply = Reply::of(chat.completion_request(0, "mine", json!({"messages": [long]}))).await;
    let error = reply.expect_openai_error(400, "invalid_request");
    assert_eq!(error["param"], "messages[0].name");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_is_shown_once_in_a_stream_and_again_in_its_replay() {
    let chat = Scene::chat([refusal()]).await;
    for node in [0, 1] {
        let body = json!({"messages": [user_message("do it")], "stream": true});
        let request = chat.completion_request(node, "mine", body);
        let mut stream = Sse::open(request.header("idempotency-key", "k1")).await;
        let events = stream.rest().await;
        let chunks = events
            .iter()
            .filter(|event| event.data != "[DONE]")
            .map(SseEvent::json);
        let refusal = chunks.filter_map(|chunk| {
            let refusal = chunk["choices"][0]["delta"]["refusal"].as_str();
            refusal.map(str::to_owned)
        });
        assert_eq!(refusal.collect::<String>(), "I can't help.");
    }
    assert_eq!(chat.model.requests().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_platform_gets_the_refusal_and_never_an_empty_message() {
    let b = Scene::bridge([
        refusal(),
        refusal(),
        streams(&[]),
        streams(&[json!({"content": " \n"})]),
    ])
    .await;
    assert_eq!(b.reply_to("telegram:5", "do it").await, "I can't help.");
    b.queue("telegram:5", "do it").await;
    let delivered = b.fetch(0, "wait=10").await;
    assert_eq!(delivered[0]["text"], "I can't help.");
    b.ack(&delivered[0]).await;
    let silent = b
        .send(json!({"identity": "telegram:5", "text": "well?"}))
        .await;
    let silent = silent.expect(200);
    assert_eq!(silent["reply"], Value::Null, "{silent}");
    assert_eq!(silent["notices"][0]["code"], "empty_answer");
    b.queue("telegram:5", "well?").await;
    let delivered = b.fetch(0, "wait=10").await;
    assert_eq!(delivered[0]["kind"], "notice", "{delivered:?}");
    let text = delivered[0].text("text");
    assert!(text.contains("said nothing"), "{text}");
}

/// An agent that is shown long messages whole.
async fn patient(steps: impl IntoIterator<Item = Step>) -> Scene {
    let spec = json!({"context_window": 2_000_000});
    Scene::builder()
        .nodes(2)
        .agent(spec)
        .model(steps)
        .build()
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_length_of_a_message_is_counted_in_characters() {
    let long = "漢".repeat(400_000);
    let chat = patient([Step::say(&long)]).await;
    let body = json!({"messages": [user_message(&long)]});
    let reply = Reply::of(chat.completion_request(0, "mine", body)).await;
    assert_eq!(answer(&reply), long);
    let kept = chat.transcript("mine").await;
    assert_eq!(
        (&kept[0]["content"], &kept[1]["content"]),
        (&json!(long), &json!(long))
    );
    let longer = "a".repeat(1_048_577);
    for content in [json!(longer), json!([{"type": "text", "text": longer}])] {
        let body = json!({"messages": [{"role": "user", "content": content}]});
        let reply = Reply::of(chat.completion_request(0, "mine", body)).await;
        let error = reply.expect_openai_error(400, "invalid_request");
        let message = error.text("message");
        assert!(message.contains("at most 1048576 characters"), "{message}");
    }
}

/// A text of so many characters, and its request as clients write it that send ASCII alone.
fn ascii(body: &Value) -> String {
    let escaped = |c: char| {
        if c.is_ascii() {
            c.to_string()
        } else {
            let units = c.encode_utf16(&mut [0; 2]).to_vec();
            units.iter().map(|unit| format!("\\u{unit:04x}")).collect()
        }
    };
    body.to_string().chars().map(escaped).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn as_many_characters_as_documented_are_accepted_however_many_bytes_they_are() {
    let chat = patient([]).await;
    chat.model.otherwise(Step::say("noted"));
    let world = &chat.world;
    let key = &chat.tenant.key;
    let send = async |method: Method, path: &str, body: &Value| {
        let request = world.request(method, path, key);
        let request = request.header("content-type", "application/json");
        Reply::of(request.body(ascii(body))).await
    };
    let wide = |count: usize| "🙂".repeat(count);
    let message = |text: &str| json!([user_message(text)]);
    let mut agent = crate::support::chat::agent_on(&chat.model, json!({}));
    for (count, status) in [(100_000, 200), (100_001, 422)] {
        agent["system_prompt"] = json!(wide(count));
        let reply = send(Method::PUT, "/v1/agents/main", &agent).await;
        assert_eq!(reply.status, status, "{}", reply.body);
    }
    for (count, status) in [(100_000, 200), (100_001, 422)] {
        let body = json!({"identity": "telegram:1", "text": wide(count)});
        let reply = send(Method::POST, "/v1/inbound", &body).await;
        assert_eq!(reply.status, status, "{}", reply.body);
    }
    let long = wide(1_048_576);
    let body = json!({"id": "long", "messages": message(&long)});
    send(Method::POST, "/v1/sessions", &body).await.expect(201);
    let body = json!({"messages": message(&long)});
    let path = "/v1/sessions/long/messages";
    send(Method::POST, path, &body).await.expect(201);
    let body = json!({"messages": message(&wide(1_048_577))});
    let refused = send(Method::POST, path, &body).await;
    let problem = refused.expect_problem(400, "invalid_request");
    let detail = problem.text("detail");
    assert!(detail.contains("at most 1048576 characters"), "{detail}");
    let large = json!({"messages": [user_message("x")], "padding": "x".repeat(17 * 1024 * 1024)});
    let refused = send(Method::POST, path, &large).await;
    let problem = refused.expect_problem(413, "payload_too_large");
    let detail = problem.text("detail");
    assert!(detail.contains("16777216"), "{detail}");
}
