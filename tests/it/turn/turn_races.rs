//! The ends of turns against whatever stops turns from outside: suspension, deletion, erasure. Each race is made
//! deterministic by a lock that the test holds.

use std::time::Duration;

use serde_json::{Value, json};
use sqlx::{Connection, PgConnection};

use crate::support::chat::{answer, line};
use crate::support::servers::model::Step;
use crate::support::world::OPERATOR_KEY;
use crate::support::{Reply, Scene, eventually};

const PATIENCE: Duration = Duration::from_secs(20);

async fn scalar<T>(chat: &Scene, query: &'static str) -> T
where
    T: Send + Unpin + sqlx::Type<sqlx::Postgres> + for<'r> sqlx::Decode<'r, sqlx::Postgres>,
{
    let mut database: PgConnection = chat.world.superuser().await;
    sqlx::query_scalar(query)
        .fetch_one(&mut database)
        .await
        .unwrap()
}

async fn operator(chat: &Scene, verb: &str) -> Reply {
    let path = format!("/v1/tenants/{}/{verb}", chat.tenant.id);
    chat.world.post(OPERATOR_KEY, &path, json!({})).await
}

/// How many statements wait for a lock.
async fn waiting(chat: &Scene) -> i64 {
    scalar(
        chat,
        "select count(*) from pg_stat_activity
          where datname = current_database() and wait_event_type = 'Lock'",
    )
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_whose_queue_moved_on_during_a_suspension_goes_on_after_it() {
    let chat = Scene::chat([
        Step::Hold,
        Step::say("one"),
        Step::say("two"),
        Step::say("three"),
    ])
    .await;
    let asked: Vec<_> = ["first", "second"]
        .into_iter()
        .map(|text| tokio::spawn(Reply::of(chat.message_request(0, "s", text))))
        .collect();
    chat.wait_for_turns("s", 2).await;
    let mut superuser = chat.world.superuser().await;
    let mut held = superuser.begin().await.unwrap();
    sqlx::query("select 1 from sessions for update")
        .execute(&mut *held)
        .await
        .unwrap();
    chat.model.release();
    eventually("the end of the first turn waits", PATIENCE, async || {
        waiting(&chat).await == 1
    })
    .await;
    let suspend = async { operator(&chat, "suspend").await };
    let release = async {
        // Either the suspension is done by now, or it waits as well.
        tokio::time::timeout(Duration::from_millis(700), chat.world.waiting(2))
            .await
            .ok();
        held.commit().await.unwrap();
    };
    let (suspended, ()) = tokio::join!(suspend, release);
    suspended.expect(200);
    for one in asked {
        one.await.unwrap();
    }
    operator(&chat, "resume").await.expect(200);
    eventually("a resumed conversation answers", PATIENCE, async || {
        let reply = chat.say(0, "s", "third").await;
        assert_ne!(reply.status, 500, "{}", reply.body);
        reply.status == 200
    })
    .await;
    let dangling: i64 = scalar(
        &chat,
        "select count(*) from sessions s join turns t on t.id = s.turn_id where t.ended_at is not null",
    )
    .await;
    assert_eq!(dangling, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_is_accepted_just_after_a_suspension_is_stopped() {
    let chat = Scene::chat([Step::Hold, Step::say("too late")]).await;
    answered_by(&chat, 1).await;
    operator(&chat, "suspend").await.expect(200);
    // The second node has the key in its cache for a moment.
    let accepted = tokio::spawn(Reply::of(chat.message_request(1, "s", "hi")));
    eventually("the turn is accepted", PATIENCE, async || {
        scalar::<i64>(&chat, "select count(*) from turns").await == 1
    })
    .await;
    eventually("the turn is stopped", Duration::from_secs(10), async || {
        let reason: Option<String> = scalar(&chat, "select reason from turns").await;
        reason.as_deref() == Some("tenant_suspended")
    })
    .await;
    chat.model.release();
    assert_ne!(accepted.await.unwrap().status, 200);
}

/// Fills a node's cache of the key.
async fn answered_by(chat: &Scene, node: usize) {
    chat.world
        .get_on(node, &chat.key, "/v1/models")
        .await
        .expect(200);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_is_not_lost_because_the_next_turn_was_cancelled_in_that_moment() {
    let chat = Scene::chat([Step::Hold, Step::say("one")]).await;
    let first = tokio::spawn(Reply::of(chat.message_request(0, "s", "first")));
    chat.wait_for_turns("s", 1).await;
    let second = tokio::spawn(Reply::of(chat.message_request(0, "s", "second")));
    chat.wait_for_turns("s", 2).await;
    let mut superuser = chat.world.superuser().await;
    let mut erasing = superuser.begin().await.unwrap();
    sqlx::query(
        "update turns set state = 'cancelled', ended_at = now(), reason = 'person_erased'
          where state = 'queued'",
    )
    .execute(&mut *erasing)
    .await
    .unwrap();
    chat.model.release();
    let end = async {
        // The end of the first turn waits for the row of the second, or does without it.
        tokio::time::timeout(Duration::from_millis(700), chat.world.waiting(1))
            .await
            .ok();
        erasing.commit().await.unwrap();
    };
    let (first, ()) = tokio::join!(first, end);
    assert_eq!(answer(&first.unwrap()), "one");
    assert_ne!(second.await.unwrap().status, 200);
    assert_eq!(chat.model.requests().len(), 1);
    let expected = [line("user", "first"), line("assistant", "one")];
    assert_eq!(chat.lines("s").await, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_is_not_lost_because_the_next_turn_cannot_be_read() {
    let chat = Scene::chat([Step::Hold, Step::say("one"), Step::say("three")]).await;
    let first = tokio::spawn(Reply::of(chat.message_request(0, "s", "first")));
    chat.wait_for_turns("s", 1).await;
    let second = tokio::spawn(Reply::of(chat.message_request(0, "s", "second")));
    chat.wait_for_turns("s", 2).await;
    sqlx::query("update turns set input = '{}' where state = 'queued'")
        .execute(&mut chat.world.superuser().await)
        .await
        .unwrap();
    chat.model.release();
    assert_eq!(answer(&first.await.unwrap()), "one");
    // It is tried again for a while, and then fails visibly; the conversation goes on.
    for _ in 0..20 {
        let state: Option<String> =
            scalar(&chat, "select max(state) from turns where turn_no = 2").await;
        if state.as_deref() == Some("failed") {
            break;
        }
        sqlx::query("update turns set due_at = now() where state = 'queued'")
            .execute(&mut chat.world.superuser().await)
            .await
            .unwrap();
        throughline::turns::sweep(chat.world.app()).await.unwrap();
    }
    let state: String = scalar(&chat, "select state from turns where turn_no = 2").await;
    assert_eq!(state, "failed");
    assert_ne!(second.await.unwrap().status, 200);
    assert_eq!(answer(&chat.say(0, "s", "third").await), "three");
}

#[tokio::test(flavor = "multi_thread")]
async fn erasing_a_member_of_a_group_leaves_the_others_their_answers() {
    let b = Scene::bridge([Step::Hold]).await;
    b.model.otherwise(Step::echo());
    let spec = json!({"upstream": {"kind": "openai", "base_url": b.model.base_url, "model": "m"},
                      "group_scope": "shared"});
    b.world
        .put(&b.tenant.key, "/v1/agents/main", spec)
        .await
        .expect(200);
    let say = |sender: &str, text: &str| json!({"identity": sender, "text": text, "chat": {"type": "group", "id": "9"}, "mentioned": true});
    b.world.expire_caches();
    let erased = b.world.dm(&b.bridge_key, "telegram:6").await["user_id"].clone();
    let first = b.send(say("telegram:5", "one"));
    let others = async {
        b.model.called(1).await;
        let mut second = say("telegram:6", "two");
        second["wait"] = json!(false);
        b.send(second).await.expect(202);
        let mut superuser = b.world.superuser().await;
        let mut held = superuser.begin().await.unwrap();
        sqlx::query("select 1 from sessions where turn_id is not null for update")
            .execute(&mut *held)
            .await
            .unwrap();
        b.model.release();
        b.world.waiting(1).await;
        let path = format!("/v1/users/{}", erased.as_str().unwrap());
        let erase = async { b.world.delete(&b.tenant.key, &path).await.expect(202) };
        let release = async {
            b.world.waiting(2).await;
            held.commit().await.unwrap();
        };
        tokio::join!(erase, release);
    };
    let (first, ()) = tokio::join!(first, others);
    let first: Value = first.expect(200);
    assert_eq!(first["reply"]["text"], "you said [5] one");
    let third = b.send(say("telegram:5", "three")).await.expect(200);
    assert_eq!(third["conversation_id"], first["conversation_id"]);
    assert_eq!(third["reply"]["text"], "you said [5] three");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_slot_leads_to_a_conversation_that_was_deleted_while_it_was_switched_to() {
    let chat = Scene::chat([Step::say("one"), Step::say("two")]).await;
    answer(&chat.say(0, "s", "first").await);
    let path = "/v1/chat/completions";
    let by_key = |text: &str| {
        let body = json!({"model": "main", "messages": [{"role": "user", "content": text}]});
        let request = chat.world.request(reqwest::Method::POST, path, &chat.key);
        request.header("x-hermes-session-key", "k").json(&body)
    };
    answer(&Reply::of(by_key("second")).await);
    let mut superuser = chat.world.superuser().await;
    // The job that removes the rows would hide what is left behind.
    let later = "create function later() returns trigger language plpgsql as $$
                 begin new.run_at := 'infinity'; return new; end $$;
                 create trigger later before insert on jobs for each row execute function later()";
    sqlx::raw_sql(later).execute(&mut superuser).await.unwrap();
    let mut switching = superuser.begin().await.unwrap();
    // As a switch does: the slot and the conversation are locked, then the slot is moved.
    sqlx::query("select 1 from conversations where client_id = 's' for no key update")
        .execute(&mut *switching)
        .await
        .unwrap();
    sqlx::query(
        "update slots set conversation_id = (select id from conversations where client_id = 's')
          where key = 'k'",
    )
    .execute(&mut *switching)
    .await
    .unwrap();
    let delete = async { chat.world.delete(&chat.key, "/v1/sessions/s").await };
    // As a message through the slot does, which waits for the switch too.
    let mut sender = chat.world.superuser().await;
    let send = async {
        chat.world.waiting(1).await;
        let mut sending = sender.begin().await.unwrap();
        for lock in [
            "select 1 from slots where key = 'k' for no key update",
            "select 1 from conversations where client_id = 's' for no key update",
        ] {
            sqlx::query(lock).execute(&mut *sending).await.unwrap();
        }
        sending.commit().await.unwrap();
    };
    let release = async {
        chat.world.waiting(2).await;
        switching.commit().await.unwrap();
    };
    let (deleted, (), ()) = tokio::join!(delete, send, release);
    deleted.expect(204);
    let leading: i64 = scalar(
        &chat,
        "select count(*) from slots k join conversations c on c.id = k.conversation_id
          where c.deleted_at is not null",
    )
    .await;
    assert_eq!(leading, 0);
}

/// Another node took the turn over while this one's write waited for the conversation: nothing of the write stays.
#[tokio::test(flavor = "multi_thread")]
async fn a_write_of_a_turn_that_was_lost_meanwhile_numbers_no_events() {
    let chat = Scene::chat([Step::Hold]).await;
    let asked = tokio::spawn(Reply::of(chat.message_request(0, "s", "hi")));
    chat.model.called(1).await;
    let mut superuser = chat.world.superuser().await;
    let mut other_node = superuser.begin().await.unwrap();
    for statement in [
        "select 1 from conversations for no key update",
        "update turns set fence = fence + 1",
    ] {
        sqlx::query(statement)
            .execute(&mut *other_node)
            .await
            .unwrap();
    }
    chat.model.release();
    chat.world.waiting(1).await;
    other_node.commit().await.unwrap();
    eventually("the write has ended", PATIENCE, async || {
        waiting(&chat).await == 0
            && scalar::<i64>(
                &chat,
                "select count(*) from pg_stat_activity
                  where datname = current_database() and state = 'idle in transaction'",
            )
            .await
                == 0
    })
    .await;
    let unused: i64 = scalar(
        &chat,
        "select c.next_event_seq - 1 - (select max(e.seq) from events e) from conversations c",
    )
    .await;
    assert_eq!(unused, 0, "numbers of events that do not exist");
    asked.abort();
}
