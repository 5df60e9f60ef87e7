//! Turns: one at a time in a conversation, in the order of acceptance, on all nodes; once for each message
//! however often it is sent; and stopped when somebody asks.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::support::chat::{answer, id_of_turn, line};
use crate::support::servers::model::{Step, echo_of};
use crate::support::sse::text_of;
use crate::support::world::OPERATOR_KEY;
use crate::support::{Reply, Scene, eventually};

const NONE: Duration = Duration::ZERO;

async fn with_agent(members: Value, steps: impl IntoIterator<Item = Step>) -> Scene {
    Scene::builder()
        .nodes(2)
        .agent(members)
        .model(steps)
        .build()
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_that_come_at_once_are_answered_one_after_the_other_in_their_order() {
    let chat = Scene::chat([]).await;
    chat.model.otherwise(Step::Echo(Duration::from_millis(1)));
    let ask = async |number: usize| {
        let node = number % 2;
        let text = format!("m-{number}");
        let (turn, heard) = if number.is_multiple_of(3) {
            let mut stream = chat.open(node, "s-1", &text).await;
            let chunks = stream.rest().await;
            assert_eq!(chunks[chunks.len() - 1].data, "[DONE]");
            (stream.header("x-throughline-turn-id"), text_of(&chunks))
        } else {
            let reply = chat.say(node, "s-1", &text).await;
            (
                reply.header("x-throughline-turn-id").to_owned(),
                answer(&reply),
            )
        };
        assert_eq!(heard, echo_of(&text));
        (turn, text)
    };
    let asked = join_all((0..64).map(ask)).await;
    let turns = chat.turns("s-1").await;
    assert_eq!(turns.len(), 64);
    let transcript = chat.transcript("s-1").await;
    assert_eq!(transcript.len(), 128);
    for (turn, pair) in turns.iter().zip(transcript.chunks(2)) {
        assert_eq!(
            (&turn["state"], &turn["attempt"]),
            (&json!("completed"), &json!(1))
        );
        let (_, text) = asked.iter().find(|(id, _)| turn["id"] == *id).unwrap();
        for (message, role) in pair.iter().zip(["user", "assistant"]) {
            assert_eq!(message["turn_id"], turn["id"]);
            assert_eq!(message["role"], role);
        }
        assert_eq!(pair[0]["content"], *text);
        assert_eq!(pair[1]["content"], echo_of(text));
    }
    assert_eq!(chat.model.requests().len(), 64);
    assert_eq!(chat.model.most_under_way(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_is_sent_many_times_is_one_turn_with_one_answer() {
    let chat = Scene::chat([Step::Echo(Duration::from_millis(5))]).await;
    let send = |number: usize| {
        let request = chat.message_request(number % 2, "s-1", "only once");
        Reply::of(request.header("idempotency-key", "k-1"))
    };
    let replies = join_all((0..20).map(send)).await;
    let first = replies[0].expect(200);
    for reply in &replies {
        let body = reply.expect(200);
        for member in ["id", "choices", "hermes", "usage"] {
            assert_eq!(body[member], first[member]);
        }
    }
    let replayed = |reply: &&Reply| reply.headers.contains_key("idempotency-replayed");
    assert_eq!(replies.iter().filter(replayed).count(), 19);
    assert_eq!(answer(&replies[0]), echo_of("only once"));
    assert_eq!(chat.turns("s-1").await.len(), 1);
    assert_eq!(chat.model.requests().len(), 1);
    // Also later, from either node and as a stream; but not for something else.
    let body = json!({"messages": [{"role": "user", "content": "another"}]});
    let other = chat
        .completion_request(1, "s-1", body)
        .header("idempotency-key", "k-1");
    Reply::of(other)
        .await
        .expect_openai_error(409, "idempotency_conflict");
    assert_eq!(chat.lines("s-1").await.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_official_clients_own_retry_attaches_to_its_turn() {
    let chat = Scene::chat([Step::held("one ", "two")]).await;
    let mut first = chat.open(0, "s-1", "hi").await;
    first.reads("one ").await;
    drop(first);
    let again = chat
        .message_request(1, "s-1", "hi")
        .header("x-stainless-retry-count", "1");
    let again = tokio::spawn(Reply::of(again));
    chat.model.release();
    let again = again.await.unwrap();
    assert_eq!(answer(&again), "one two");
    assert_eq!(again.header("idempotency-replayed"), "true");
    assert_eq!(chat.turns("s-1").await.len(), 1);
    assert_eq!(chat.model.requests().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_turn_is_cancelled_at_once_from_either_node_and_keeps_what_it_said() {
    let held = || Step::held("one two ", "three");
    let chat = Scene::chat([held(), held(), Step::Echo(NONE)]).await;
    for node in [0, 1] {
        let session = format!("s-{node}");
        let mut stream = chat.open(0, &session, "hi").await;
        let turn = stream.header("x-throughline-turn-id");
        stream.reads("one two ").await;
        let asked = Instant::now();
        chat.cancel(node, &turn).await.expect(202);
        let rest = stream.rest().await;
        assert!(
            asked.elapsed() < Duration::from_secs(2),
            "{:?}",
            asked.elapsed()
        );
        let error = rest[rest.len() - 1].json();
        assert_eq!(error["error"]["code"], "turn_stopped", "{error}");
        let stands = chat.turn(&turn).await;
        assert_eq!(
            (&stands["state"], &stands["reason"]),
            (&json!("cancelled"), &json!("cancelled"))
        );
        assert_eq!(stands["message"]["content"], "one two ");
        assert_eq!(
            chat.lines(&session).await,
            [line("user", "hi"), line("assistant", "one two ")]
        );
        // It stays as it is.
        assert_eq!(
            chat.cancel(node, &turn).await.expect(202)["state"],
            "cancelled"
        );
    }
    assert_eq!(chat.model.requests().len(), 2);
    assert_eq!(answer(&chat.say(1, "s-0", "next").await), echo_of("next"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queued_turn_is_cancelled_before_it_says_anything() {
    let chat = Scene::chat([Step::held("one ", "two")]).await;
    chat.model.otherwise(Step::Echo(NONE));
    let mut running = chat.open(0, "s-1", "first").await;
    running.reads("one ").await;
    let queued = tokio::spawn(Reply::of(chat.message_request(1, "s-1", "second")));
    let turns = chat.wait_for_turns("s-1", 2).await;
    assert_eq!(turns[1]["state"], "queued");
    let cancelled = chat.cancel(0, &id_of_turn(&turns[1])).await.expect(202);
    assert_eq!(cancelled["state"], "cancelled");
    queued
        .await
        .unwrap()
        .expect_openai_error(409, "turn_stopped");
    let path = format!("/v1/turns/{}/events", id_of_turn(&turns[1]));
    let told = chat.events(1, &path, None).await.rest().await;
    assert_eq!(told.len(), 1);
    assert_eq!(told[0].name, "turn.cancelled");
    let third = tokio::spawn(Reply::of(chat.message_request(1, "s-1", "third")));
    chat.wait_for_turns("s-1", 3).await;
    chat.model.release();
    assert_eq!(text_of(&running.rest().await), "two");
    assert_eq!(answer(&third.await.unwrap()), echo_of("third"));
    let lines = chat.lines("s-1").await;
    assert_eq!(lines[0], line("user", "first"));
    assert_eq!(lines[2], line("user", "third"));
    assert_eq!(lines.len(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_rejects_takes_nothing_while_it_is_busy() {
    let chat = with_agent(json!({"on_busy": "reject"}), [Step::held("one ", "two")]).await;
    let mut running = chat.open(0, "s-1", "first").await;
    running.reads("one ").await;
    for node in [0, 1] {
        let refused = chat.say(node, "s-1", "second").await;
        refused.expect_openai_error(409, "session_busy");
        assert!(!refused.header("retry-after").is_empty());
        let appended = chat
            .world
            .append_on(
                node,
                &chat.tenant.key,
                "s-1",
                json!([{"role": "user", "content": "x"}]),
            )
            .await;
        appended.expect_problem(409, "session_busy");
    }
    chat.model.release();
    running.rest().await;
    chat.model.push(Step::Echo(NONE));
    assert_eq!(
        answer(&chat.say(1, "s-1", "second").await),
        echo_of("second")
    );
    let appended = json!([{"role": "user", "content": "x"}]);
    chat.world
        .append(&chat.tenant.key, "s-1", appended)
        .await
        .expect(201);
    assert_eq!(chat.lines("s-1").await.len(), 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_is_interrupted_stops_and_answers_the_newer_message() {
    let steps = [Step::held("one ", "two"), Step::Echo(NONE)];
    let chat = with_agent(json!({"on_busy": "interrupt"}), steps).await;
    let mut running = chat.open(0, "s-1", "first").await;
    running.reads("one ").await;
    assert_eq!(
        answer(&chat.say(1, "s-1", "second").await),
        echo_of("second")
    );
    let rest = running.rest().await;
    assert_eq!(rest[rest.len() - 1].json()["error"]["code"], "turn_stopped");
    let turns = chat.turns("s-1").await;
    assert_eq!(turns[0]["state"], "interrupted");
    assert_eq!(turns[0]["reason"], "superseded");
    assert_eq!(
        chat.lines("s-1").await,
        [
            line("user", "first"),
            line("assistant", "one "),
            line("user", "second"),
            line("assistant", &echo_of("second")),
        ]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_is_bounded_and_then_worked_off_in_its_order() {
    let chat = Scene::chat([Step::held("one ", "two")]).await;
    chat.model.otherwise(Step::Echo(NONE));
    let mut running = chat.open(0, "s-1", "first").await;
    running.reads("one ").await;
    let texts: Vec<String> = (0..100).map(|number| format!("m-{number}")).collect();
    let asking = texts.iter().enumerate();
    let waiting =
        asking.map(|(number, text)| Reply::of(chat.message_request(number % 2, "s-1", text)));
    let waiting = tokio::spawn(join_all(waiting.collect::<Vec<_>>()));
    chat.wait_for_turns("s-1", 101).await;
    for node in [0, 1] {
        let refused = chat.say(node, "s-1", "one too many").await;
        refused.expect_openai_error(429, "queue_full");
        assert!(!refused.header("retry-after").is_empty());
    }
    // Another conversation is not concerned.
    assert_eq!(answer(&chat.say(1, "s-2", "hi").await), echo_of("hi"));
    chat.model.release();
    let answers: HashSet<String> = waiting.await.unwrap().iter().map(answer).collect();
    assert_eq!(answers, texts.iter().map(|text| echo_of(text)).collect());
    let turns = chat.turns("s-1").await;
    let transcript = chat.transcript("s-1").await;
    let spoken = transcript
        .iter()
        .filter(|message| message["role"] == "user");
    let order: Vec<&Value> = spoken.map(|message| &message["turn_id"]).collect();
    assert_eq!(
        order,
        turns.iter().map(|turn| &turn["id"]).collect::<Vec<_>>()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_suspended_tenants_turns_are_stopped() {
    let chat = Scene::chat([Step::held("one ", "two")]).await;
    let mut running = chat.open(0, "s-1", "first").await;
    running.reads("one ").await;
    let queued = tokio::spawn(Reply::of(chat.message_request(1, "s-1", "second")));
    chat.wait_for_turns("s-1", 2).await;
    let path = |what: &str| format!("/v1/tenants/{}/{what}", chat.tenant.id);
    let asked = Instant::now();
    let suspend = chat
        .world
        .post(OPERATOR_KEY, &path("suspend"), json!({}))
        .await;
    suspend.expect_success();
    let rest = running.rest().await;
    let error = rest[rest.len() - 1].json();
    assert_ne!(error["error"]["code"], "turn_restarted", "{error}");
    assert!(error["error"]["code"].is_string(), "{error}");
    let queued = queued.await.unwrap();
    assert!(queued.status >= 400, "{queued:?}");
    assert!(
        asked.elapsed() < Duration::from_secs(10),
        "{:?}",
        asked.elapsed()
    );
    chat.model.release();
    let resume = chat
        .world
        .post(OPERATOR_KEY, &path("resume"), json!({}))
        .await;
    resume.expect_success();
    eventually(
        "the tenant is served",
        Duration::from_secs(10),
        async || {
            let turns = "/v1/sessions/s-1/turns";
            chat.world.get(&chat.key, turns).await.status == 200
        },
    )
    .await;
    for turn in chat.turns("s-1").await {
        assert_eq!(turn["state"], "cancelled");
        assert_eq!(turn["reason"], "tenant_suspended");
    }
    assert_eq!(chat.lines("s-1").await, [line("user", "first")]);
    assert_eq!(chat.model.requests().len(), 1);
    chat.model.push(Step::Echo(NONE));
    assert_eq!(answer(&chat.say(1, "s-1", "third").await), echo_of("third"));
}

#[tokio::test(flavor = "multi_thread")]
async fn times_of_a_conversation_do_not_run_backwards() {
    let chat = Scene::chat([]).await;
    chat.model.otherwise(Step::say("fine"));
    chat.say(0, "mine", "one").await.expect(200);
    // The clock of the node that wrote last was ahead.
    sqlx::query("update conversations set last_at = last_at + interval '1 hour'")
        .execute(&mut chat.world.superuser().await)
        .await
        .unwrap();
    let ahead: chrono::DateTime<chrono::Utc> =
        sqlx::query_scalar("select last_at from conversations")
            .fetch_one(&mut chat.world.superuser().await)
            .await
            .unwrap();
    chat.say(1, "mine", "two").await.expect(200);
    let time = |value: &Value| -> chrono::DateTime<chrono::Utc> {
        value.as_str().unwrap().parse().unwrap()
    };
    let kept = chat.transcript("mine").await;
    let times: Vec<_> = kept
        .iter()
        .map(|message| time(&message["created_at"]))
        .collect();
    assert!(times.is_sorted(), "{times:?}");
    assert!(times[2] >= ahead, "{times:?}");
    let turn = &chat.turns("mine").await[1];
    assert!(time(&turn["started_at"]) >= ahead, "{turn}");
    assert!(
        time(&turn["ended_at"]) >= time(&turn["started_at"]),
        "{turn}"
    );
}
