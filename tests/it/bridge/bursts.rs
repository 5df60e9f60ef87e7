//! Forty messages at the same moment, on two nodes: each is answered once, and no two transactions wait for
//! each other. A deadlock fails the test by itself (see `World`).

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::support::servers::model::Step;
use crate::support::{Fields, Reply, Scene};

const BURST: usize = 40;

/// Sends `BURST` messages at once, alternating between the nodes, and answers their replies and times.
async fn burst(b: &Scene, body: impl Fn(usize) -> Value) -> Vec<(Value, Duration)> {
    let send = async |place: usize| {
        let began = Instant::now();
        let reply = b.send_on(place % 2, body(place)).await;
        (reply, began.elapsed())
    };
    let answers = join_all((0..BURST).map(send)).await;
    let mut replies = Vec::new();
    for (place, (reply, took)) in answers.into_iter().enumerate() {
        let reply = reply.expect(200);
        let text = body(place).text("text").to_owned();
        assert_eq!(reply["reply"]["text"], format!("you said {text}"));
        replies.push((reply, took));
    }
    replies
}

fn message(identity: &str, place: usize) -> Value {
    json!({"identity": identity, "text": format!("message {place}"), "message_id": format!("m{place}")})
}

/// Every message is in its conversation once, followed by its own answer.
async fn check_transcripts(b: &Scene, replies: &[(Value, Duration)]) {
    let mut sessions: Vec<&str> = replies
        .iter()
        .map(|(reply, _)| reply.text("session_id"))
        .collect();
    sessions.sort_unstable();
    sessions.dedup();
    let mut answered = 0;
    for session in sessions {
        let path = format!("/v1/sessions/{session}/messages?limit=200");
        let listed = b.world.get(&b.tenant.key, &path).await.expect(200);
        let messages = listed.list();
        let mut times: Vec<&str> = Vec::new();
        for pair in messages.chunks(2) {
            let said = pair[0].text("content");
            assert_eq!(pair[0]["role"], "user");
            assert_eq!(pair[1]["content"], format!("you said {said}"));
            answered += usize::from(said.starts_with("message "));
            times.extend(pair.iter().map(|one| one.text("created_at")));
        }
        assert!(times.is_sorted(), "{times:?}");
    }
    assert_eq!(answered, replies.len());
}

async fn echoing() -> Scene {
    let b = Scene::bridge([]).await;
    b.model.otherwise(Step::echo());
    b
}

#[tokio::test(flavor = "multi_thread")]
async fn a_burst_of_first_messages_of_a_new_user_is_answered() {
    let b = echoing().await;
    let replies = burst(&b, |place| message("telegram:5", place)).await;
    let users: std::collections::BTreeSet<&str> = replies
        .iter()
        .map(|(reply, _)| reply.text("user_id"))
        .collect();
    assert_eq!(users.len(), 1);
    check_transcripts(&b, &replies).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_burst_after_a_minute_of_silence_is_answered() {
    let b = echoing().await;
    b.reply_to("telegram:5", "hello").await;
    for round in 0..3 {
        b.world.clock.advance(Duration::from_secs(61));
        let replies = burst(&b, |place| message("telegram:5", round * BURST + place)).await;
        assert_eq!(replies.len(), BURST);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_burst_through_two_linked_identities_is_answered() {
    let b = echoing().await;
    b.world.link(&b.bridge_key, "telegram:5", "discord:5").await;
    let names = ["telegram:5", "discord:5"];
    for round in 0..3 {
        b.world.clock.advance(Duration::from_secs(61));
        let of_round = |place: usize| message(names[place / 2 % 2], round * BURST + place);
        let replies = burst(&b, of_round).await;
        let users: Vec<&Value> = replies.iter().map(|(reply, _)| &reply["user_id"]).collect();
        assert!(users.iter().all(|user| *user == users[0]));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_burst_in_a_dm_and_a_group_at_once_is_answered() {
    let b = echoing().await;
    let replies = burst(&b, |place| {
        let mut body = message("telegram:5", place);
        if place / 2 % 2 == 1 {
            body["chat"] = json!({"type": "group", "id": "9"});
        }
        body
    })
    .await;
    check_transcripts(&b, &replies).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_burst_of_chat_with_a_new_user_token_is_answered() {
    let b = echoing().await;
    // The issuer is registered with someone else's token; this one is used for the first time.
    b.sign_in("somebody").await;
    let token = crate::support::people::token(&b.world, &b.tenant, "newcomer");
    let ask = async |place: usize| {
        let body = json!({"model": "main", "user": "me",
                          "messages": [{"role": "user", "content": format!("message {place}")}]});
        let url = b.world.url_on(place % 2, "/v1/chat/completions");
        Reply::of(b.world.client.post(url).bearer_auth(&token).json(&body)).await
    };
    let answers = join_all((0..BURST).map(ask)).await;
    for (place, answer) in answers.into_iter().enumerate() {
        let content = &answer.expect(200)["choices"][0]["message"]["content"];
        assert_eq!(*content, format!("you said message {place}"));
    }
}
