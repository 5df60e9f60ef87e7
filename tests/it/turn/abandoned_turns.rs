//! Turns that end without their agent: no call of a tool stays without a result, and who watches learns of the end.

use std::time::Duration;

use serde_json::{Value, json};
use sqlx::Connection;

use crate::support::chat::{answer, id_of_turn};
use crate::support::conversations::user_message;
use crate::support::servers::model::Step;
use crate::support::world::OPERATOR_KEY;
use crate::support::{Fields, Reply, Scene, eventually, stays};

const PATIENCE: Duration = Duration::from_secs(30);

/// A chat whose turn waits for the result of a client's tool.
async fn waiting() -> (Scene, String) {
    let call = ("a".to_owned(), "look".to_owned());
    let chat = Scene::chat([Step::CallTools(vec![call])]).await;
    chat.model.otherwise(Step::Echo(Duration::ZERO));
    let tools = json!([{"type": "function", "function": {"name": "look"}}]);
    let body = json!({"messages": [user_message("look")], "tools": tools});
    Reply::of(chat.completion_request(0, "s", body))
        .await
        .expect(200);
    let turn = id_of_turn(&chat.turns("s").await[0]);
    (chat, turn)
}

async fn execute(chat: &Scene, statement: &'static str) {
    sqlx::raw_sql(statement)
        .execute(&mut chat.world.superuser().await)
        .await
        .unwrap();
}

/// What the model was given as results of tools in its last request.
fn results(chat: &Scene) -> Vec<Value> {
    let requests = chat.model.requests();
    let messages = requests.last().unwrap().items("messages");
    let results = messages.iter().filter(|message| message["role"] == "tool");
    results.map(|message| message["content"].clone()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_cannot_be_recovered_ends_with_an_event_and_its_calls_have_results() {
    let (chat, turn) = waiting().await;
    execute(
        &chat,
        "update turns
            set state = 'running', node = gen_random_uuid(), lease_until = now() - interval '1 hour', failures = 7,
                input = '{\"odd\": true}'",
    )
    .await;
    eventually("it ends", PATIENCE, async || {
        chat.turn(&turn).await["state"] == "failed"
    })
    .await;
    let kinds: Vec<String> =
        sqlx::query_scalar("select kind from events order by seq desc limit 1")
            .fetch_all(&mut chat.world.superuser().await)
            .await
            .unwrap();
    assert_eq!(kinds, ["turn.failed"]);
    answer(&chat.say(1, "s", "and now?").await);
    assert_eq!(
        results(&chat),
        ["[interrupted: the turn could not be recovered]"]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_of_a_suspended_tenant_have_results_after_it_is_resumed() {
    let (chat, turn) = waiting().await;
    let verb = async |verb: &str| {
        let path = format!("/v1/tenants/{}/{verb}", chat.tenant.id);
        chat.world.post(OPERATOR_KEY, &path, json!({})).await
    };
    verb("suspend").await.expect(200);
    verb("resume").await.expect(200);
    eventually("it has ended", PATIENCE, async || {
        let path = format!("/v1/turns/{turn}");
        let turn = chat.world.get(&chat.key, &path).await;
        turn.status == 200 && turn.expect(200)["reason"] == "tenant_suspended"
    })
    .await;
    answer(&chat.say(1, "s", "and now?").await);
    assert_eq!(results(&chat), ["[interrupted: the tenant was suspended]"]);
    // It is part of the turn, and is undone with it.
    let transcript = chat.transcript("s").await;
    let result = transcript.iter().find(|message| message["role"] == "tool");
    assert_eq!(result.unwrap()["turn_id"], json!(turn));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_waits_is_cancelled_although_the_next_one_cannot_be_read() {
    let call = ("a".to_owned(), "look".to_owned());
    let chat = Scene::chat([Step::Hold, Step::CallTools(vec![call])]).await;
    let tools = json!([{"type": "function", "function": {"name": "look"}}]);
    let body = json!({"messages": [user_message("look")], "tools": tools});
    let first = tokio::spawn(Reply::of(chat.completion_request(0, "s", body)));
    let turn = id_of_turn(&chat.wait_for_turns("s", 1).await[0]);
    let second = tokio::spawn(Reply::of(chat.message_request(0, "s", "next")));
    chat.wait_for_turns("s", 2).await;
    chat.model.release();
    first.await.unwrap().expect(200);
    execute(
        &chat,
        "update turns set input = '{}' where state = 'queued'",
    )
    .await;
    chat.cancel(1, &turn).await.expect_success();
    assert_eq!(chat.turn(&turn).await["state"], "cancelled");
    second.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn turns_of_a_suspended_tenant_are_stopped_although_their_conversation_was_locked() {
    let (chat, _) = waiting().await;
    let mut superuser = chat.world.superuser().await;
    let mut held = superuser.begin().await.unwrap();
    sqlx::query("select 1 from conversations for update")
        .execute(&mut *held)
        .await
        .unwrap();
    let path = format!("/v1/tenants/{}/suspend", chat.tenant.id);
    let suspended = chat.world.post(OPERATOR_KEY, &path, json!({})).await;
    suspended.expect(200);
    let state = async || -> String {
        sqlx::query_scalar("select state from turns")
            .fetch_one(&mut chat.world.superuser().await)
            .await
            .unwrap()
    };
    // The job finds the conversation locked.
    let three_seconds = Duration::from_secs(3);
    stays("the turn waits", three_seconds, async || {
        state().await == "waiting_client"
    })
    .await;
    held.commit().await.unwrap();
    eventually("the turn is stopped", PATIENCE, async || {
        state().await == "cancelled"
    })
    .await;
}

/// A node renews the lease of a turn every few seconds; until then it looks as if nobody ran it.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_has_just_started_takes_over_no_turn_whose_node_may_live() {
    let chat = Scene::chat([Step::held("one ", "two")]).await;
    let mut stream = chat.open(0, "s", "hi").await;
    stream.reads("one ").await;
    for _ in 0..3 {
        execute(
            &chat,
            "update turns set lease_until = now() - interval '1 hour'",
        )
        .await;
        let attempts = "select attempt from turns";
        stays(
            "the turn is its node's",
            Duration::from_millis(700),
            async || {
                let attempt: i32 = sqlx::query_scalar(attempts)
                    .fetch_one(&mut chat.world.superuser().await)
                    .await
                    .unwrap();
                attempt == 1
            },
        )
        .await;
    }
    let turn = id_of_turn(&chat.turns("s").await[0]);
    chat.model.release();
    assert_eq!(chat.reaches(&turn, "completed").await["attempt"], json!(1));
    assert_eq!(chat.model.requests().len(), 1);
}

/// What a turn was accepted with is in the transcript by the time it ends, and takes no room for ever.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_turn_was_accepted_with_is_kept_until_its_end_only() {
    let (chat, _) = waiting().await;
    let tools = json!([{"type": "function", "function": {"name": "look"}}]);
    let result = json!({"role": "tool", "tool_call_id": "a", "content": "seen"});
    let body = json!({"messages": [result], "tools": tools});
    answer(&Reply::of(chat.completion_request(1, "s", body)).await);
    chat.model.push(Step::fail(400));
    chat.say(0, "s", "refused").await.expect(400);
    chat.model.push(Step::held("one", "!"));
    let running = tokio::spawn(Reply::of(chat.message_request(0, "s", "running")));
    chat.wait_for_turns("s", 3).await;
    let queued = tokio::spawn(Reply::of(chat.message_request(0, "s", "queued")));
    let turns = chat.wait_for_turns("s", 4).await;
    chat.cancel(0, &id_of_turn(&turns[3]))
        .await
        .expect_success();
    chat.model.release();
    answer(&running.await.unwrap());
    queued.await.unwrap();
    let ended: Vec<(String, String)> =
        sqlx::query_as("select state, (input ->> 'messages') from turns order by turn_no")
            .fetch_all(&mut chat.world.superuser().await)
            .await
            .unwrap();
    let empty = "[]";
    let expected = ["completed", "failed", "completed", "cancelled"];
    assert_eq!(
        ended,
        expected.map(|state| (state.to_owned(), empty.to_owned()))
    );
}

/// Two people with a turn in a conversation of the other are erased at the same time.
#[tokio::test(flavor = "multi_thread")]
async fn users_who_write_in_conversations_of_each_other_are_erased_without_a_deadlock() {
    let b = Scene::bridge([Step::Hold, Step::Hold]).await;
    let unwaited = |identity: &str| json!({"identity": identity, "text": "hi", "wait": false});
    let mut users = Vec::new();
    for identity in ["telegram:1", "telegram:2"] {
        let accepted = b.send(unwaited(identity)).await.expect(202);
        users.push(accepted.text("user_id").to_owned());
    }
    let mut superuser = b.world.superuser().await;
    let swap = "update turns t
                   set identity_id = i.id
                  from identities i
                 where i.id <> t.identity_id";
    sqlx::query(swap).execute(&mut superuser).await.unwrap();
    let mut held = superuser.begin().await.unwrap();
    // As one does who refers to both.
    sqlx::query("select 1 from users for key share")
        .execute(&mut *held)
        .await
        .unwrap();
    let erase = async |user: &str| {
        let path = format!("/v1/users/{user}");
        b.world.delete(&b.tenant.key, &path).await
    };
    let release = async {
        b.world.waiting(2).await;
        held.commit().await.unwrap();
    };
    let (first, second, ()) = tokio::join!(erase(&users[0]), erase(&users[1]), release);
    for reply in [first, second] {
        assert!(reply.status < 300, "{}", reply.body);
    }
}
