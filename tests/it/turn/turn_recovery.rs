//! Nodes that are lost in the middle of an answer: another one goes on, what was discarded is told, and a
//! node that comes back too late writes nothing. With real processes.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::json;

use crate::support::chat::{answer, line};
use crate::support::servers::model::Step;
use crate::support::servers::pair::{GRACE, LEASE, Pair};
use crate::support::sse::{self, Sse, SseEvent};
use crate::support::{Fields, Reply};

/// What the events of a turn tell that was begun anew once: each attempt's text.
fn attempts(events: &[SseEvent]) -> [String; 2] {
    let names: Vec<&str> = events.iter().map(|event| event.name.as_str()).collect();
    let discarded = names.iter().position(|name| *name == "message.discarded");
    let discarded = discarded.unwrap_or_else(|| panic!("{names:?}"));
    assert_eq!(
        names
            .iter()
            .filter(|name| **name == "message.discarded")
            .count(),
        1
    );
    assert_eq!(names[names.len() - 1], "turn.completed");
    assert_eq!(events[discarded].json()["data"]["discarded_attempt"], 1);
    let text = |events: &[SseEvent], attempt: i64| -> String {
        let deltas = events.iter().filter(|event| event.name == "message.delta");
        let texts = deltas.map(|event| {
            let body = event.json();
            assert_eq!(body["attempt"], attempt, "{body}");
            body.text("/data/text").to_owned()
        });
        texts.collect()
    };
    let (before, after) = events.split_at(discarded);
    [text(before, 1), text(after, 2)]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_whose_node_is_killed_is_finished_by_another() {
    let pair = Pair::new([Step::held("one two ", "three"), Step::say("all of it")]).await;
    let asked = || {
        pair.message_request(0, "hi", true)
            .header("idempotency-key", "k-1")
    };
    let mut stream = Sse::open(asked()).await;
    stream.reads("one two ").await;
    let turn = stream.header("x-throughline-turn-id");
    let watching = Sse::open(pair.get(1, &format!("/v1/turns/{turn}/events"))).await;
    let mut watching = watching;
    let mut told = watching.until("message.delta").await;
    let began = Instant::now();
    pair.nodes.kill(0);
    assert!(stream.try_next().await.is_err());
    let ended = pair.completes(1, &turn).await;
    assert!(
        began.elapsed() < LEASE + Duration::from_secs(4),
        "{:?}",
        began.elapsed()
    );
    assert_eq!(ended["attempt"], 2);
    assert_eq!(pair.lost().await, 1);
    assert_eq!(ended["message"]["content"], "all of it");
    told.extend(watching.rest().await);
    assert_eq!(
        attempts(&told),
        ["one two ".to_owned(), "all of it".to_owned()]
    );
    assert_eq!(told, pair.events(1, &turn).await);
    let expected = [line("user", "hi"), line("assistant", "all of it")];
    assert_eq!(pair.lines(1).await, expected);
    // The client's own retry is given that answer, and nothing of the one that is void.
    let again = pair
        .message_request(1, "hi", true)
        .header("idempotency-key", "k-1");
    let mut again = Sse::open(again).await;
    assert_eq!(again.header("idempotency-replayed"), "true");
    assert_eq!(sse::text_of(&again.rest().await), "all of it");
    let whole = pair
        .message_request(1, "hi", false)
        .header("idempotency-key", "k-2");
    pair.model.push(Step::say("next"));
    assert_eq!(answer(&Reply::of(whole).await), "next");
    assert_eq!(pair.model.requests().len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_slept_beyond_its_lease_writes_nothing() {
    let pair = Pair::new([Step::held("one two ", "three"), Step::say("all of it")]).await;
    let mut stream = Sse::open(pair.message_request(0, "hi", true)).await;
    stream.reads("one two ").await;
    let turn = stream.header("x-throughline-turn-id");
    pair.nodes.signal(0, Signal::SIGSTOP);
    let ended = pair.completes(1, &turn).await;
    assert_eq!(
        (&ended["attempt"], &ended["message"]["content"]),
        (&json!(2), &json!("all of it"))
    );
    let before = pair.rows().await;
    pair.model.release();
    pair.nodes.signal(0, Signal::SIGCONT);
    let rest = stream.rest().await;
    let error = rest[rest.len() - 1].json();
    assert_eq!(error["error"]["code"], "turn_restarted", "{error}");
    assert!(error.text("/error/message").contains(&turn), "{error}");
    // It serves again, and what it shows is what the other wrote.
    assert_eq!(pair.turn(0, &turn).await, pair.turn(1, &turn).await);
    assert_eq!(pair.rows().await, before);
    assert_eq!(attempts(&pair.events(0, &turn).await)[1], "all of it");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_shuts_down_finishes_what_ends_soon() {
    let pair = Pair::new([Step::Echo(Duration::from_millis(100))]).await;
    let mut stream = Sse::open(pair.message_request(0, "one two three four five six", true)).await;
    stream.reads("you said ").await;
    let took = pair.nodes.terminate(0).await;
    assert!(took < GRACE + Duration::from_secs(1), "{took:?}");
    let rest = stream.rest().await;
    assert_eq!(sse::text_of(&rest), "one two three four five six");
    assert_eq!(rest[rest.len() - 1].data, "[DONE]");
    let turn = stream.header("x-throughline-turn-id");
    let turn = pair.turn(1, &turn).await;
    assert_eq!(
        (&turn["state"], &turn["attempt"]),
        (&json!("completed"), &json!(1))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_shuts_down_hands_over_what_does_not() {
    let pair = Pair::new([Step::held("one two ", "three"), Step::say("all of it")]).await;
    let mut stream = Sse::open(pair.message_request(0, "hi", true)).await;
    stream.reads("one two ").await;
    let turn = stream.header("x-throughline-turn-id");
    let took = pair.nodes.terminate(0).await;
    assert!(took < GRACE + Duration::from_secs(1), "{took:?}");
    let rest = stream.rest().await;
    let error = rest[rest.len() - 1].json();
    assert_eq!(error["error"]["code"], "turn_restarted", "{error}");
    let ended = pair.completes(1, &turn).await;
    assert_eq!(ended["attempt"], 2);
    assert_eq!(
        pair.lost().await,
        0,
        "a turn that was handed over has lost no node"
    );
    assert_eq!(attempts(&pair.events(1, &turn).await)[1], "all of it");
    let expected = [line("user", "hi"), line("assistant", "all of it")];
    assert_eq!(pair.lines(1).await, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_has_seen_nothing_is_given_the_answer_of_the_node_that_took_over() {
    // Held before its first word: the next call takes the next step.
    let pair = Pair::new([Step::Hold, Step::say("all of it")]).await;
    let asked = tokio::spawn(Reply::of(pair.message_request(0, "hi", false)));
    pair.model.called(1).await;
    let took = pair.nodes.terminate(0).await;
    assert!(took < GRACE + Duration::from_secs(1), "{took:?}");
    let reply = asked.await.unwrap();
    assert_eq!(answer(&reply), "all of it");
    let turn = pair.turn(1, reply.header("x-throughline-turn-id")).await;
    assert_eq!(turn["attempt"], 2);
    assert_eq!(
        pair.lines(1).await,
        [line("user", "hi"), line("assistant", "all of it")]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn tools_whose_node_was_lost_are_stored_as_interrupted() {
    let pair = Pair::new([Step::held("one ", "two"), Step::say("all of it")]).await;
    let mut stream = Sse::open(pair.message_request(0, "hi", true)).await;
    stream.reads("one ").await;
    let turn = stream.header("x-throughline-turn-id");
    pair.nodes.kill(0);
    // As if it had stored a call of two tools, and the result of one, before it was lost.
    let step = "
        with place as (
          update sessions s set next_seq = next_seq + 2, message_count = message_count + 2
            from turns t where s.id = t.start_session_id
          returning s.tenant_id, s.id, s.next_seq - 2 as seq, t.id as turn_id),
        stepped as (update turns set steps = steps + 2 returning id)
        insert into messages (tenant_id, session_id, seq, role, kind, content, tool_calls, tool_call_id,
                              token_count, turn_id, step, created_at)
        select tenant_id, id, seq, 'assistant', 'normal', null, $1::json, null, 1, turn_id, 1, now() from place
        union all
        select tenant_id, id, seq + 1, 'tool', 'normal', '\"fine\"'::json, null, 'a', 1, turn_id, 2, now() from place";
    let call = |id: &str| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}});
    sqlx::query(step)
        .bind(json!([call("a"), call("b")]))
        .execute(&mut pair.nodes.superuser().await)
        .await
        .unwrap();
    let ended = pair.completes(1, &turn).await;
    assert_eq!(
        (&ended["attempt"], &ended["message"]["content"]),
        (&json!(2), &json!("all of it"))
    );
    let lines = pair.lines(1).await;
    let roles: Vec<&str> = lines.iter().map(|(role, _)| role.as_str()).collect();
    assert_eq!(roles, ["user", "assistant", "tool", "tool", "assistant"]);
    assert_eq!(lines[2].1, "fine");
    assert!(
        lines[3].1.starts_with("[interrupted: the node"),
        "{}",
        lines[3].1
    );
    let asked = pair.model.requests().pop().unwrap();
    assert_eq!(asked["messages"][3]["tool_call_id"], "b");
}
