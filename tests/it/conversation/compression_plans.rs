//! What a compression keeps of transcripts that are odd: repeated ids of tool calls, many rules at the beginning,
//! open calls, images, and messages that were taken back.

use serde_json::{Value, json};

use crate::support::conversations::{assistant_message, user_message};
use crate::support::servers::model::Step;
use crate::support::{Fields, Scene, World};

fn call(id: &str) -> Value {
    let call =
        json!({"id": id, "type": "function", "function": {"name": "look", "arguments": "{}"}});
    json!({"role": "assistant", "content": null, "tool_calls": [call]})
}

fn result(id: &str, content: Value) -> Value {
    json!({"role": "tool", "tool_call_id": id, "content": content})
}

fn long() -> String {
    "something long that a summary can stand for. ".repeat(20)
}

/// Compresses a new session with these messages. Returns the originals' numbers of what was kept.
async fn kept_of(messages: Vec<Value>, keep_last: u32) -> Vec<i64> {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let id = world.session(&tenant.key, json!({})).await.id();
    for messages in messages.chunks(500) {
        let reply = world.append(&tenant.key, &id, json!(messages)).await;
        reply.expect(201);
    }
    let body = json!({"summary": "they looked", "keep_last": keep_last});
    let done = world.compress(&tenant.key, &id, body).await.expect(201);
    let path = format!("/v1/sessions/{id}/messages?limit=200");
    let rows = world.walk(&tenant.key, &path).await;
    let originals = rows
        .iter()
        .filter_map(|row| row["copied_from"]["seq"].as_i64());
    let originals: Vec<i64> = originals.collect();
    assert_eq!(done["kept"], originals.len());
    originals
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_id_of_a_tool_call_draws_nothing_into_the_tail() {
    // Local servers number the calls of each answer from 0 on.
    let mut messages = vec![user_message(&long())];
    for _ in 0..8 {
        messages.extend([call("call_0"), result("call_0", json!(long()))]);
    }
    assert_eq!(kept_of(messages, 1).await, [1, 16, 17]);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_system_message_at_the_beginning_is_kept() {
    let rule = |n| json!({"role": "system", "content": format!("rule {n}")});
    let mut messages: Vec<Value> = (1..=40).map(rule).collect();
    for n in 0..150 {
        messages.extend([
            user_message(&format!("{n} {}", long())),
            assistant_message("yes"),
        ]);
    }
    let expected: Vec<i64> = (1..=40).chain([339, 340]).collect();
    assert_eq!(kept_of(messages, 2).await, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_tool_call_at_the_end_waits_for_its_result_in_the_tail() {
    let messages = vec![
        user_message(&long()),
        assistant_message(&long()),
        user_message("look"),
        call("c1"),
    ];
    assert_eq!(kept_of(messages, 0).await, [3, 4]);
}

#[tokio::test(flavor = "multi_thread")]
async fn images_since_the_newest_turn_of_a_user_are_kept() {
    let image = json!([{"type": "image_url", "image_url": {"url": "https://images.test/1.png"}}]);
    let messages = vec![
        json!({"role": "user", "content": image}),
        assistant_message(&long()),
        json!({"role": "user", "content": image}),
        user_message("what is it?"),
        call("c1"),
        result("c1", json!([{"type": "text", "text": long()}])),
        call("c1"),
        result("c1", image.clone()),
        assistant_message("\"type\":\"image_url\""),
        assistant_message("a cat"),
    ];
    assert_eq!(kept_of(messages, 1).await, [3, 4, 7, 8, 10]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_was_taken_back_is_neither_kept_nor_counted() {
    let b = Scene::bridge([]).await;
    b.model.otherwise(Step::echo());
    let mut session = String::new();
    for text in ["one", "two", "three"] {
        let body = json!({"identity": "telegram:5", "text": format!("{text} {}", long())});
        session = b.send(body).await.expect(200).text("session_id").to_owned();
    }
    let shown = b.reply_to("telegram:5", "/undo").await;
    assert!(shown.contains("taken back"), "{shown}");
    let path = format!("/v1/sessions/{session}/messages");
    let rows = b.world.walk(&b.tenant.key, &path).await;
    let live: i64 = rows[..4]
        .iter()
        .filter_map(|row| row["token_count"].as_i64())
        .sum();
    let body = json!({"summary": "they counted"});
    let done = b.world.compress(&b.tenant.key, &session, body).await;
    let done = done.expect(201);
    assert_eq!(
        (&done["kept"], &done["tokens_before"]),
        (&json!(1), &json!(live))
    );
    let rows = b.world.walk(&b.tenant.key, &path).await;
    let last = rows.last().unwrap();
    assert!(last.text("content").starts_with("two"), "{last}");
    let lineage = format!("/v1/sessions/{session}/lineage");
    let lineage = b.world.walk(&b.tenant.key, &lineage).await;
    assert_eq!(lineage[1]["compression"]["summarised"], 3);
}
