//! Tools that a client gives: its turn waits for their results, holding its place, until they come or
//! something else does. A call never stays without a result in the transcript.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::chat::{answer, id_of_turn, line};
use crate::support::conversations::user_message;
use crate::support::servers::model::{Step, echo_of};
use crate::support::{Fields, Reply, Scene};

const NONE: Duration = Duration::ZERO;
const NO_RESULT: &str = "[interrupted: the client brought no result]";

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}])
}

fn calls() -> Step {
    let call = |id: &str| (id.to_owned(), "look".to_owned());
    Step::CallTools(vec![call("a"), call("b")])
}

fn result(id: &str, text: &str) -> Value {
    json!({"role": "tool", "tool_call_id": id, "content": text})
}

/// A chat whose turn waits for two results, and the turn.
async fn waiting() -> (Scene, String) {
    let chat = Scene::chat([calls()]).await;
    chat.model.otherwise(Step::Echo(NONE));
    let body = json!({"messages": [user_message("look twice")], "tools": tools()});
    let reply = Reply::of(chat.completion_request(0, "s-1", body))
        .await
        .expect(200);
    let choice = &reply["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    let ids = |of: &Value| -> Vec<Value> {
        let calls = of.as_array().unwrap().iter();
        calls.map(|call| call["id"].clone()).collect()
    };
    assert_eq!(ids(&choice["message"]["tool_calls"]), ["a", "b"]);
    let turn = reply.text("/hermes/turn_id").to_owned();
    assert_eq!(chat.turn(&turn).await["state"], "waiting_client");
    (chat, turn)
}

async fn send(chat: &Scene, node: usize, results: &[Value]) -> Reply {
    let body = json!({"messages": results, "tools": tools()});
    Reply::of(chat.completion_request(node, "s-1", body)).await
}

/// What the model was told last of the tools.
fn told(chat: &Scene) -> Vec<(String, String)> {
    let requests = chat.model.requests();
    let messages = requests[requests.len() - 1].items("messages").clone();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let results = messages.iter().filter(|message| message["role"] == "tool");
    results
        .map(|message| (text(&message["tool_call_id"]), text(&message["content"])))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_goes_on_with_the_results_that_its_client_sends_to_either_node() {
    let (chat, turn) = waiting().await;
    let reply = send(&chat, 1, &[result("b", "two"), result("a", "one")]).await;
    assert_eq!(answer(&reply), echo_of("look twice"));
    assert_eq!(reply.header("x-throughline-turn-id"), turn);
    let expected = [line("a", "one"), line("b", "two")];
    assert_eq!(told(&chat), expected);
    assert_eq!(chat.turns("s-1").await.len(), 1);
    let stands = chat.turn(&turn).await;
    assert_eq!(
        (&stands["state"], &stands["attempt"]),
        (&json!("completed"), &json!(1))
    );
    let roles: Vec<String> = chat
        .lines("s-1")
        .await
        .into_iter()
        .map(|(role, _)| role)
        .collect();
    assert_eq!(roles, ["user", "assistant", "tool", "tool", "assistant"]);
    // The same again finds nothing that waits.
    send(&chat, 0, &[result("a", "one")])
        .await
        .expect_openai_error(400, "tool_call_unknown");
}

#[tokio::test(flavor = "multi_thread")]
async fn results_that_never_come_are_stored_as_interrupted() {
    let (chat, _) = waiting().await;
    let reply = send(&chat, 1, &[result("b", "two")]).await;
    assert_eq!(answer(&reply), echo_of("look twice"));
    assert_eq!(told(&chat), [line("a", NO_RESULT), line("b", "two")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_result_of_an_unknown_call_changes_nothing() {
    let (chat, turn) = waiting().await;
    for results in [
        vec![result("c", "x")],
        vec![result("a", "one"), result("c", "x")],
    ] {
        let refused = send(&chat, 1, &results).await;
        let error = refused.expect_openai_error(400, "tool_call_unknown");
        let place = results.len() - 1;
        assert_eq!(error["param"], format!("messages[{place}].tool_call_id"));
        assert_eq!(refused.header("x-should-retry"), "false");
    }
    assert_eq!(chat.turn(&turn).await["state"], "waiting_client");
    let reply = send(&chat, 1, &[result("a", "one"), result("b", "two")]).await;
    assert_eq!(answer(&reply), echo_of("look twice"));
    assert_eq!(told(&chat).len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_message_instead_of_results_interrupts_the_turn_and_starts_the_next() {
    let (chat, turn) = waiting().await;
    assert_eq!(
        answer(&chat.say(1, "s-1", "never mind").await),
        echo_of("never mind")
    );
    let stands = chat.turn(&turn).await;
    assert_eq!(
        (&stands["state"], &stands["reason"]),
        (&json!("interrupted"), &json!("superseded"))
    );
    assert_eq!(told(&chat), [line("a", NO_RESULT), line("b", NO_RESULT)]);
    let roles: Vec<String> = chat
        .lines("s-1")
        .await
        .into_iter()
        .map(|(role, _)| role)
        .collect();
    assert_eq!(
        roles,
        ["user", "assistant", "tool", "tool", "user", "assistant"]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_waits_for_its_client_is_cancelled_at_once() {
    let (chat, turn) = waiting().await;
    let cancelled = chat.cancel(1, &turn).await.expect(202);
    assert_eq!(cancelled["state"], "cancelled");
    send(&chat, 0, &[result("a", "one")])
        .await
        .expect_openai_error(400, "tool_call_unknown");
    assert_eq!(answer(&chat.say(0, "s-1", "go on").await), echo_of("go on"));
    assert_eq!(told(&chat), [line("a", NO_RESULT), line("b", NO_RESULT)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_never_comes_back_ends_its_turn_by_the_time_limit() {
    let (chat, turn) = waiting().await;
    let mut database = chat.world.superuser().await;
    let left: f64 = sqlx::query_scalar(
        "select extract(epoch from lease_until - clock_timestamp())::float8 from turns",
    )
    .fetch_one(&mut database)
    .await
    .unwrap();
    assert!((590.0..=600.0).contains(&left), "{left}");
    sqlx::query("update turns set lease_until = clock_timestamp() - interval '1 second'")
        .execute(&mut database)
        .await
        .unwrap();
    let ended = chat.reaches(&turn, "interrupted").await;
    assert_eq!(ended["reason"], "tool_results_missing");
    send(&chat, 0, &[result("a", "one")])
        .await
        .expect_openai_error(400, "tool_call_unknown");
    assert_eq!(
        answer(&chat.say(1, "s-1", "hello?").await),
        echo_of("hello?")
    );
    assert_eq!(told(&chat), [line("a", NO_RESULT), line("b", NO_RESULT)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_queued_before_its_client_was_asked_starts_after_the_results() {
    let chat = Scene::chat([Step::Hold, calls()]).await;
    chat.model.otherwise(Step::Echo(NONE));
    let body = json!({"messages": [user_message("look twice")], "tools": tools()});
    let first = tokio::spawn(Reply::of(chat.completion_request(0, "s-1", body)));
    let turns = chat.wait_for_turns("s-1", 1).await;
    let queued = tokio::spawn(Reply::of(chat.message_request(1, "s-1", "and then")));
    chat.wait_for_turns("s-1", 2).await;
    chat.model.release();
    first.await.unwrap().expect(200);
    assert_eq!(
        chat.turn(&id_of_turn(&turns[0])).await["state"],
        "waiting_client"
    );
    let reply = send(&chat, 1, &[result("a", "one"), result("b", "two")]).await;
    assert_eq!(answer(&reply), echo_of("look twice"));
    assert_eq!(answer(&queued.await.unwrap()), echo_of("and then"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_message_also_makes_room_for_what_was_queued_before_it() {
    let chat = Scene::chat([Step::Hold, calls()]).await;
    chat.model.otherwise(Step::Echo(NONE));
    let body = json!({"messages": [user_message("look twice")], "tools": tools()});
    let first = tokio::spawn(Reply::of(chat.completion_request(0, "s-1", body)));
    let turns = chat.wait_for_turns("s-1", 1).await;
    let second = tokio::spawn(Reply::of(chat.message_request(1, "s-1", "second")));
    chat.wait_for_turns("s-1", 2).await;
    chat.model.release();
    first.await.unwrap().expect(200);
    assert_eq!(answer(&chat.say(0, "s-1", "third").await), echo_of("third"));
    assert_eq!(answer(&second.await.unwrap()), echo_of("second"));
    let stands = chat.turn(&id_of_turn(&turns[0])).await;
    assert_eq!(stands["state"], "interrupted");
    let lines = chat.lines("s-1").await;
    let spoken = lines.iter().filter(|(role, _)| role == "user");
    let spoken: Vec<&str> = spoken.map(|(_, text)| text.as_str()).collect();
    assert_eq!(spoken, ["look twice", "second", "third"]);
    assert_eq!(told(&chat), [line("a", NO_RESULT), line("b", NO_RESULT)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_model_is_informed_of_a_tool_that_nobody_has() {
    let call = Step::CallTool {
        name: "nothing".to_owned(),
        arguments: json!({}),
    };
    let chat = Scene::chat([call, Step::Echo(NONE)]).await;
    assert_eq!(answer(&chat.say(0, "s-1", "hi").await), echo_of("hi"));
    assert_eq!(told(&chat), [line("call_1", "[there is no tool nothing]")]);
}
