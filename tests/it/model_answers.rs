//! What a model says beside its text, in sessions and on platforms.

use serde_json::{Value, json};

use crate::deliveries::{fetch, say};
use crate::inbound::bridged;
use crate::support::Reply;
use crate::support::chat::{Chat, answer, expect_error, said};
use crate::support::model::Step;

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
    let chat = Chat::new([refusal(), Step::say("fine")]).await;
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

#[tokio::test(flavor = "multi_thread")]
async fn a_platform_is_told_the_refusal_and_never_gets_an_empty_message() {
    let b = bridged([
        refusal(),
        refusal(),
        streams(&[]),
        streams(&[json!({"content": " \n"})]),
    ])
    .await;
    assert_eq!(b.told("telegram:5", "do it").await, "I can't help.");
    say(&b.world, &b.key, "telegram:5", "do it").await;
    let delivered = fetch(&b.world, 0, &b.key, "wait=10").await;
    assert_eq!(delivered[0]["text"], "I can't help.");
    crate::deliveries::ack(&b.world, &b.key, &delivered[0]).await;
    let silent = b
        .bring(json!({"identity": "telegram:5", "text": "well?"}))
        .await;
    let silent = silent.expect(200);
    assert_eq!(silent["reply"], Value::Null, "{silent}");
    assert_eq!(silent["notices"][0]["code"], "empty_answer");
    say(&b.world, &b.key, "telegram:5", "well?").await;
    let delivered = fetch(&b.world, 0, &b.key, "wait=10").await;
    assert_eq!(delivered[0]["kind"], "notice", "{delivered:?}");
    let text = delivered[0]["text"].as_str().unwrap();
    assert!(text.contains("said nothing"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_length_of_a_message_is_counted_in_characters() {
    let chat = Chat::new([Step::say("noted")]).await;
    let spec = json!({"context_window": 2_000_000});
    let spec = crate::support::chat::agent_on(&chat.model, spec);
    let put = chat
        .world
        .put(&chat.tenant.key, "/v1/agents/main", spec)
        .await;
    put.expect(200);
    let long = "漢".repeat(400_000);
    let body = json!({"messages": [said(&long)]});
    Reply::of(chat.asking(0, "mine", body)).await.expect(200);
    assert_eq!(chat.transcript("mine").await[0]["content"], long);
    let body = json!({"messages": [said(&"a".repeat(1_048_577))]});
    let reply = Reply::of(chat.asking(0, "mine", body)).await;
    let error = expect_error(&reply, 400, "invalid_request");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("at most 1048576 characters"), "{message}");
}
