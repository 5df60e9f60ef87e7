//! Transcripts: appending at the end of a chain from many sides at once, and reading back what was said.

use std::collections::BTreeMap;
use std::sync::Arc;

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::conversations::{assistant_message, user_message};
use crate::support::people::sign_in;
use crate::support::{Fields, Reply, World};

#[tokio::test(flavor = "multi_thread")]
async fn sixty_four_appenders_on_two_nodes_leave_no_gap_and_no_double() {
    let world = Arc::new(World::with_nodes(2).await);
    let tenant = world.tenant("Acme").await;
    let id = world.session(&tenant.key, json!({})).await.id();
    let mut appenders = Vec::new();
    for place in 0..64 {
        let world = world.clone();
        let key = tenant.key.clone();
        let id = id.clone();
        appenders.push(tokio::spawn(async move {
            let turn = json!([
                user_message(&format!("{place} asks")),
                assistant_message(&format!("{place} is answered"))
            ]);
            let done = world
                .append_on(place % 2, &key, &id, turn)
                .await
                .expect(201);
            let seqs = done.items("messages").iter();
            seqs.map(|message| message.number("seq"))
                .collect::<Vec<_>>()
        }));
    }
    let mut acknowledged = BTreeMap::new();
    for (place, appender) in appenders.into_iter().enumerate() {
        let seqs = appender.await.unwrap();
        assert_eq!(seqs[1], seqs[0] + 1, "a turn stays together");
        acknowledged.insert(seqs[0], format!("{place} asks"));
        acknowledged.insert(seqs[1], format!("{place} is answered"));
    }
    let stored = world
        .walk(&tenant.key, &format!("/v1/sessions/{id}/messages?limit=50"))
        .await;
    let stored: Vec<(i64, String)> = stored
        .iter()
        .map(|row| (row.number("seq"), row.text("content").to_owned()))
        .collect();
    assert_eq!(stored, acknowledged.into_iter().collect::<Vec<_>>());
    assert_eq!(stored.last().unwrap().0, 128);
    let shown = world
        .get(&tenant.key, &format!("/v1/sessions/{id}"))
        .await
        .expect(200);
    assert_eq!(shown["message_count"], 128);
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_a_message_holds_comes_back_as_it_was_given() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let id = world.session(&tenant.key, json!({})).await.id();
    let given = json!([
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [
            {"type": "text", "text": "what is this?"},
            {"type": "image_url", "image_url": {"url": "https://example.com/a.png", "detail": "low"}},
        ]},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{\"at\": 1.50}"}},
        ]},
        {"role": "tool", "tool_call_id": "call_1", "content": "a \"cat\" \u{1f408} 猫 \\ \u{2028}"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": ""}, "extra_content": {"x": [1]}},
        ]},
        {"role": "user", "content": "counted", "token_count": 7},
    ]);
    let done = world
        .append(&tenant.key, &id, given.clone())
        .await
        .expect(201);
    assert_eq!(done["session_id"], id);
    let stored = world
        .walk(&tenant.key, &format!("/v1/sessions/{id}/messages"))
        .await;
    assert_eq!(
        done["messages"],
        json!(stored),
        "the answer is what is stored"
    );
    for (place, (given, stored)) in given.as_array().unwrap().iter().zip(&stored).enumerate() {
        assert_eq!(stored["seq"], place + 1);
        for member in ["role", "content", "tool_calls", "tool_call_id"] {
            let given = given.get(member).cloned().unwrap_or(Value::Null);
            assert_eq!(stored[member], given, "{member} of {place}");
        }
    }
    assert_eq!(stored[5]["token_count"], 7);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transcript_is_read_from_either_end() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let messages: Vec<Value> = (1..=25).map(|n| user_message(&n.to_string())).collect();
    let id = world
        .session(&tenant.key, json!({ "messages": messages }))
        .await
        .id();
    let path = format!("/v1/sessions/{id}/messages");
    let upwards: Vec<String> = (1..=25).map(|n: i32| n.to_string()).collect();
    let downwards: Vec<String> = upwards.iter().rev().cloned().collect();
    assert_eq!(
        world
            .contents(&tenant.key, &format!("{path}?limit=10"))
            .await,
        upwards
    );
    assert_eq!(
        world
            .contents(&tenant.key, &format!("{path}?order=desc&limit=10"))
            .await,
        downwards
    );
    let page = world.get(&tenant.key, &format!("{path}?limit=10")).await;
    assert_eq!(page.header("etag"), "\"25\"");
    let cursor = page.text("next_cursor");
    let other_way = format!("{path}?order=desc&limit=10&cursor={cursor}");
    world
        .get(&tenant.key, &other_way)
        .await
        .expect_problem(400, "invalid_cursor");
    for wrong in [
        "limit=0",
        "limit=201",
        "order=up",
        "scope=all",
        "exact=maybe",
        "color=red",
    ] {
        let reply = world.get(&tenant.key, &format!("{path}?{wrong}")).await;
        reply.expect_problem(400, "invalid_request");
    }
    for wrong in ["exact=true", "order=desc"] {
        let reply = world
            .get(&tenant.key, &format!("{path}?scope=conversation&{wrong}"))
            .await;
        reply.expect_problem(422, "invalid_value");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_append_on_condition_holds_only_while_nothing_else_was_said() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let id = world
        .session(&tenant.key, json!({"messages": [user_message("one")]}))
        .await
        .id();
    let append = async |condition: &str, text: &str| {
        let request = world
            .request(
                Method::POST,
                &format!("/v1/sessions/{id}/messages"),
                &tenant.key,
            )
            .header("if-match", condition);
        Reply::of(request.json(&json!({"messages": [user_message(text)]}))).await
    };
    append("\"0\"", "x")
        .await
        .expect_problem(412, "precondition_failed");
    let done = append("\"1\"", "two").await;
    assert_eq!(done.expect(201)["messages"][0]["seq"], 2);
    assert_eq!(done.header("etag"), "\"2\"");
    append("1", "x")
        .await
        .expect_problem(412, "precondition_failed");
    append(done.header("etag"), "three").await.expect(201);
    append("*", "four").await.expect(201);
    append("latest", "x")
        .await
        .expect_problem(400, "invalid_request");
    // Of many who saw the same last number, one is right.
    let mut racers = Vec::new();
    for n in 0..16 {
        let request = world
            .request(
                Method::POST,
                &format!("/v1/sessions/{id}/messages"),
                &tenant.key,
            )
            .header("if-match", "4")
            .json(&json!({"messages": [user_message(&format!("racer {n}"))]}));
        racers.push(tokio::spawn(Reply::of(request)));
    }
    let mut outcomes = BTreeMap::new();
    for racer in racers {
        *outcomes.entry(racer.await.unwrap().status).or_insert(0) += 1;
    }
    assert_eq!(outcomes, BTreeMap::from([(201, 1), (412, 15)]));
    let texts = world
        .contents(&tenant.key, &format!("/v1/sessions/{id}/messages"))
        .await;
    assert_eq!(texts.len(), 5, "{texts:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_breaks_a_rule_is_pointed_at_and_nothing_is_written() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let id = world.session(&tenant.key, json!({})).await.id();
    for (bad, status, pointer) in [
        (json!({"role": "user"}), 422, "/messages/1/content"),
        (
            json!({"role": "tool", "content": "x"}),
            422,
            "/messages/1/tool_call_id",
        ),
        (
            json!({"role": "assistant", "content": "x", "tool_calls": []}),
            422,
            "/messages/1/tool_calls",
        ),
        (
            json!({"role": "robot", "content": "x"}),
            400,
            "/messages/1/role",
        ),
        (
            json!({"role": "user", "content": 1}),
            400,
            "/messages/1/content",
        ),
        (
            json!({"role": "user", "content": []}),
            400,
            "/messages/1/content",
        ),
        (
            json!({"role": "user", "content": "x", "seq": 9}),
            400,
            "/messages/1/seq",
        ),
        (
            json!({"role": "user", "content": "x", "identity": "web:eve"}),
            400,
            "/messages/1/identity",
        ),
    ] {
        let reply = world
            .append(&tenant.key, &id, json!([user_message("fine"), bad]))
            .await;
        let problem = reply.expect(status);
        assert_eq!(problem["errors"][0]["pointer"], pointer, "{problem}");
    }
    let many: Vec<Value> = (0..1001).map(|_| user_message("x")).collect();
    for messages in [json!(many), json!([])] {
        world
            .append(&tenant.key, &id, messages)
            .await
            .expect_problem(422, "invalid_value");
    }
    let shown = world
        .get(&tenant.key, &format!("/v1/sessions/{id}"))
        .await
        .expect(200);
    assert_eq!(shown["message_count"], 0);
    world
        .append(
            &tenant.key,
            "ses_01a1e2373db47013a539524902c63338",
            json!([user_message("x")]),
        )
        .await
        .expect_problem(404, "session_not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn only_admin_and_chat_keys_write_what_others_said() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let ada = sign_in(&world, &tenant, "ada").await;
    let (_, chat) = world.api_key(&tenant, "chat").await;
    let roles = [
        json!({"role": "assistant", "content": "x"}),
        json!({"role": "system", "content": "x"}),
        json!({"role": "tool", "tool_call_id": "c", "content": "x"}),
    ];
    let own = world.session(&ada.token, json!({})).await.id();
    let service = world.session(&chat, json!({})).await.id();
    for role in &roles {
        let messages = json!([user_message("mine"), role]);
        let problem = world
            .append(&ada.token, &own, messages.clone())
            .await
            .expect_problem(403, "role_not_allowed");
        assert_eq!(problem["errors"][0]["pointer"], "/messages/1/role");
        let made = world
            .post(
                &ada.token,
                "/v1/sessions",
                json!({ "messages": messages.clone() }),
            )
            .await;
        made.expect_problem(403, "role_not_allowed");
        world
            .append(&chat, &service, messages.clone())
            .await
            .expect(201);
        world.append(&tenant.key, &own, messages).await.expect(201);
    }
    let spoken = world
        .append(&ada.token, &own, json!([user_message("hello")]))
        .await
        .expect(201);
    let message = &spoken["messages"][0];
    assert_eq!(
        (&message["identity"], &message["platform"]),
        (&json!("web:ada"), &json!("web"))
    );
    let stored = world
        .walk(&ada.token, &format!("/v1/sessions/{own}/messages"))
        .await;
    assert_eq!(stored.last().unwrap(), message);
    assert_eq!(
        stored[0]["identity"],
        json!(null),
        "an admin's are nobody's words"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retried_append_is_written_once() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    let id = world.session(&tenant.key, json!({})).await.id();
    let append = async |node: usize, text: &str| {
        let url = world.url_on(node, &format!("/v1/sessions/{id}/messages"));
        let request = world
            .client
            .post(url)
            .bearer_auth(&tenant.key)
            .header("idempotency-key", "turn-1");
        Reply::of(request.json(&json!({"messages": [user_message(text)]}))).await
    };
    let first = append(0, "once").await.expect(201);
    let again = append(1, "once").await;
    assert_eq!(again.header("idempotency-replayed"), "true");
    assert_eq!(again.expect(201), first);
    append(1, "another")
        .await
        .expect_problem(409, "idempotency_conflict");
    assert_eq!(
        world
            .contents(&tenant.key, &format!("/v1/sessions/{id}/messages"))
            .await,
        ["once"]
    );
}
