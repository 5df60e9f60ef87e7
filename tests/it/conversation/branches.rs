//! Branches of a conversation that is in the middle of something: what they take along is whole.

use serde_json::{Value, json};

use crate::support::chat::{answer, line, lines};
use crate::support::conversations::user_message;
use crate::support::servers::model::{Step, echo_of};
use crate::support::{Fields, Reply, Scene};

fn calls() -> Step {
    let call = |id: &str| (id.to_owned(), "look".to_owned());
    Step::CallTools(vec![call("a"), call("b")])
}

async fn branch(chat: &Scene, session: &str, body: Value) -> String {
    let path = format!("/v1/sessions/{session}/branch");
    let made = chat.world.post(&chat.key, &path, body).await.expect(201);
    made.id()
}

/// What the model saw last.
fn seen(chat: &Scene) -> Vec<Value> {
    let requests = chat.model.requests();
    let messages = &requests[requests.len() - 1]["messages"];
    messages.as_array().unwrap().clone()
}

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_branch_in_the_middle_of_a_tool_group_has_a_result_for_each_call() {
    let chat = Scene::chat([calls()]).await;
    chat.model.otherwise(Step::Echo(std::time::Duration::ZERO));
    let body = json!({"messages": [user_message("look twice")], "tools": tools()});
    Reply::of(chat.completion_request(0, "s", body))
        .await
        .expect(200);
    let result =
        |id: &str| json!({"role": "tool", "tool_call_id": id, "content": format!("saw {id}")});
    let body = json!({"messages": [result("a"), result("b")], "tools": tools()});
    Reply::of(chat.completion_request(0, "s", body))
        .await
        .expect(200);
    let missing = "[interrupted: the branch begins before its result]";
    for (from_seq, results) in [
        (2, [("a", missing), ("b", missing)]),
        (3, [("a", "saw a"), ("b", missing)]),
        (4, [("a", "saw a"), ("b", "saw b")]),
    ] {
        let id = branch(&chat, "s", json!({ "from_seq": from_seq })).await;
        assert_eq!(
            answer(&chat.say(1, &id, "and now?").await),
            echo_of("and now?")
        );
        let told: Vec<Value> = seen(&chat)
            .into_iter()
            .filter(|message| message["role"] == "tool")
            .collect();
        let expected: Vec<Value> = results
            .map(|(id, text)| json!({"role": "tool", "tool_call_id": id, "content": text}))
            .to_vec();
        assert_eq!(told, expected, "from {from_seq}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_branch_of_a_turn_that_waits_for_its_client_leaves_the_turn_out() {
    let chat = Scene::chat([Step::say("hello"), calls()]).await;
    chat.say(0, "s", "hi").await.expect(200);
    let body = json!({"messages": [user_message("look twice")], "tools": tools()});
    Reply::of(chat.completion_request(0, "s", body))
        .await
        .expect(200);
    let id = branch(&chat, "s", json!({})).await;
    let whole = [line("user", "hi"), line("assistant", "hello")];
    assert_eq!(chat.lines(&id).await, whole);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_branch_of_a_running_turn_has_no_unanswered_question() {
    let chat = Scene::chat([Step::say("hello"), Step::held("half ", "whole")]).await;
    chat.say(0, "s", "hi").await.expect(200);
    let running = tokio::spawn(Reply::of(chat.message_request(0, "s", "and?")));
    chat.wait_for_turns("s", 2).await;
    crate::support::eventually(
        "the question is in the transcript",
        std::time::Duration::from_secs(10),
        async || chat.transcript("s").await.len() == 3,
    )
    .await;
    let id = branch(&chat, "s", json!({})).await;
    let transcript = chat.transcript(&id).await;
    assert_eq!(
        lines(&transcript),
        [line("user", "hi"), line("assistant", "hello")]
    );
    // Who names the question takes it along.
    let named = branch(&chat, "s", json!({"from_seq": 3})).await;
    assert_eq!(chat.lines(&named).await.len(), 3);
    chat.model.release();
    running.await.unwrap().expect(200);
    assert_eq!(chat.lines("s").await.len(), 4);
}
