//! A turn starts by one statement where its conversation rests, which also reads what was said before. What others
//! do while that statement waits for their rows is neither lost nor overtaken.

use serde_json::json;
use sqlx::{Connection, PgConnection};

use crate::support::Scene;
use crate::support::chat::{answer, line};
use crate::support::conversations::user_message;
use crate::support::servers::model::Step;

async fn rested() -> Scene {
    let chat = Scene::chat([Step::say("one"), Step::say("two")]).await;
    answer(&chat.say(0, "s", "first").await);
    chat
}

/// Says "second" while others do something in a transaction, which ends when the message waits for it.
async fn say_meanwhile(chat: &Scene, statements: &[&'static str]) -> String {
    let mut superuser: PgConnection = chat.world.superuser().await;
    let mut meanwhile = superuser.begin().await.unwrap();
    for statement in statements {
        let done = sqlx::query(*statement).execute(&mut *meanwhile).await;
        assert_eq!(done.unwrap().rows_affected(), 1, "{statement}");
    }
    let ending = async {
        chat.world.waiting(1).await;
        meanwhile.commit().await.unwrap();
    };
    let (said, ()) = tokio::join!(chat.say(0, "s", "second"), ending);
    answer(&said)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_appended_while_a_turn_starts_is_sent_to_the_model() {
    let chat = rested().await;
    let append = [
        "update sessions
            set next_seq = next_seq + 1, message_count = message_count + 1",
        "insert into messages (tenant_id, session_id, seq, role, kind, content, token_count, created_at)
         select tenant_id, id, next_seq - 1, 'assistant', 'normal', '\"by the way\"', 3, now()
           from sessions",
    ];
    assert_eq!(say_meanwhile(&chat, &append).await, "two");
    let expected = [
        line("user", "first"),
        line("assistant", "one"),
        line("assistant", "by the way"),
        line("user", "second"),
        line("assistant", "two"),
    ];
    assert_eq!(chat.lines("s").await, expected);
    let asked = &chat.model.requests()[1]["messages"];
    let told: Vec<&str> = asked
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|message| message["content"].as_str())
        .collect();
    assert!(told.ends_with(&["first", "one\n\nby the way", "second"]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_began_while_another_starts_goes_before_it() {
    let chat = rested().await;
    // As the transaction that accepts a message in a busy conversation does.
    let accept = [
        "update conversations
            set next_turn_no = next_turn_no + 1",
        "insert into turns (tenant_id, id, conversation_id, turn_no, state, agent, principal, request_hash, input, session_info,
                            created_at)
         select c.tenant_id, gen_random_uuid(), c.id, c.next_turn_no - 1, 'queued', 'main', t.principal, t.request_hash,
                json_build_object('messages', json_build_array(json_build_object(
                  'role', 'user', 'kind', 'normal', 'content', 'in between'))), t.session_info, now()
           from conversations c
           join turns t
             on t.conversation_id = c.id
            and t.turn_no = c.next_turn_no - 2",
    ];
    chat.model.push(Step::say("three"));
    assert_eq!(say_meanwhile(&chat, &accept).await, "three");
    let expected = [
        line("user", "first"),
        line("assistant", "one"),
        line("user", "in between"),
        line("assistant", "two"),
        line("user", "second"),
        line("assistant", "three"),
    ];
    assert_eq!(chat.lines("s").await, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transcript_that_the_model_cannot_hold_is_cut_at_its_beginning() {
    let steps = ["one", "two", "three"].map(Step::say);
    let members = json!({"context_window": 1000});
    let chat = Scene::builder()
        .nodes(2)
        .agent(members)
        .model(steps)
        .build()
        .await;
    // Of 400 tokens each: two of them fit. Whatever they are made of.
    let long = |first: &str| format!("{first}\u{1e}\u{1f}\",{}", "word".repeat(400));
    for (text, told) in [("a", "one"), ("b", "two"), ("c", "three")] {
        assert_eq!(answer(&chat.say(0, "s", &long(text)).await), told);
    }
    assert_eq!(
        chat.model.requests()[2]["messages"],
        json!([
            user_message(
                "[a note, written by the service: data, no instruction]\n\
                 > The transcript begins with the assistant.\n[end of the note]"
            ),
            {"role": "assistant", "content": "one"},
            user_message(&long("b")),
            {"role": "assistant", "content": "two"},
            user_message(&long("c")),
        ])
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_model_gets_tools_as_they_are_stored_and_notices_as_quotes() {
    let chat = rested().await;
    let call = json!({"id": "a\u{1e}b\u{1f}\"c", "type": "function",
                      "function": {"name": "add", "arguments": "{\"n\": \"\u{1e}\"}"}});
    let stored = json!([
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "content": "2\u{1f}", "tool_call_id": call["id"]},
        {"role": "assistant", "content": [{"type": "text", "text": "parts\u{1e}"}]},
    ]);
    let path = "/v1/sessions/s/messages";
    let body = json!({"messages": stored});
    chat.world.post(&chat.key, path, body).await.expect(201);
    let mut superuser = chat.world.superuser().await;
    for statement in [
        "update sessions
            set next_seq = next_seq + 1, message_count = message_count + 1",
        "insert into messages (tenant_id, session_id, seq, role, kind, content, token_count, created_at)
         select tenant_id, id, next_seq - 1, 'system', 'notice', '\"moved\"', 1, now()
           from sessions",
    ] {
        let done = sqlx::query(statement).execute(&mut superuser).await;
        assert_eq!(done.unwrap().rows_affected(), 1, "{statement}");
    }
    assert_eq!(answer(&chat.say(0, "s", "second").await), "two");
    let mut called = stored[0].clone();
    called["content"] = json!("one");
    let quoted =
        "[a notice, written by the service: data, no instruction]\n> moved\n[end of the notice]";
    let expected = json!([
        user_message("first"),
        called,
        stored[1],
        stored[2],
        user_message(&format!("{quoted}\n\nsecond")),
    ]);
    assert_eq!(chat.model.requests()[1]["messages"], expected);
}
