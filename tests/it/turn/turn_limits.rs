//! `concurrent_turns` is exact, however many ask at a time; and what a turn writes while it runs stays within its
//! page.

use std::time::Duration;

use futures_util::future::join_all;
use serde_json::json;
use sqlx::{Connection, PgConnection};

use crate::support::chat::answer;
use crate::support::conversations::user_message;
use crate::support::servers::model::Step;
use crate::support::world::OPERATOR_KEY;
use crate::support::{Reply, Scene, eventually, stays};

const PATIENCE: Duration = Duration::from_secs(20);

async fn chat_with(concurrent_turns: usize) -> Scene {
    let chat = Scene::chat([]).await;
    chat.model.otherwise(Step::Echo(Duration::from_millis(50)));
    limit(&chat, concurrent_turns).await;
    chat
}

async fn limit(chat: &Scene, concurrent_turns: usize) {
    let limits = format!("/v1/operator/tenants/{}/limits", chat.tenant.id);
    let body = json!({ "concurrent_turns": concurrent_turns });
    let put = chat.world.put(OPERATOR_KEY, &limits, body).await;
    put.expect(200);
}

async fn running(chat: &Scene) -> i64 {
    sqlx::query_scalar("select count(*) from turns where state = 'running'")
        .fetch_one(&mut chat.world.superuser().await)
        .await
        .unwrap()
}

/// Sends as many first messages at a time, each to a session of its own, on so many nodes.
async fn race(concurrent_turns: usize, racers: usize, nodes: usize) {
    let chat = chat_with(concurrent_turns).await;
    for round in 0..3 {
        let send = |place: usize| {
            let chat = &chat;
            let session = format!("s-{round}-{place}");
            async move { chat.say(place % nodes, &session, "one two three").await }
        };
        let replies = join_all((0..racers).map(send)).await;
        let (taken, refused): (Vec<_>, Vec<_>) =
            replies.iter().partition(|reply| reply.status == 200);
        for reply in &refused {
            reply.expect_openai_error(429, "too_many_turns");
        }
        let most = chat.model.most_under_way();
        assert!(
            most <= concurrent_turns,
            "{most} of {concurrent_turns} at a time"
        );
        assert!(
            taken.len() >= concurrent_turns,
            "{} of {racers}",
            taken.len()
        );
    }
    assert_eq!(chat.model.most_under_way(), concurrent_turns);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_more_turns_run_than_the_limit_on_one_node() {
    race(2, 20, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_more_turns_run_than_the_limit_on_two_nodes() {
    race(5, 40, 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_waits_in_a_queue_starts_within_the_limit() {
    let chat = chat_with(2).await;
    chat.model.push(Step::held("one", "!"));
    chat.model.push(Step::held("two", "!"));
    let first = "first";
    let other = "other";
    let running_first = tokio::spawn(Reply::of(chat.message_request(0, first, "a")));
    chat.wait_for_turns(first, 1).await;
    chat.model.called(1).await;
    let running_other = tokio::spawn(Reply::of(chat.message_request(0, other, "b")));
    chat.model.called(2).await;
    let queued = tokio::spawn(Reply::of(chat.message_request(0, first, "c")));
    chat.wait_for_turns(first, 2).await;
    limit(&chat, 1).await;
    chat.model.release();
    eventually("one turn has ended", PATIENCE, async || {
        running(&chat).await == 1
    })
    .await;
    // Sweepers look at the queue meanwhile.
    stays("one turn runs", Duration::from_secs(3), async || {
        running(&chat).await == 1
    })
    .await;
    assert_eq!(chat.model.requests().len(), 2);
    chat.model.release();
    for reply in [running_first, running_other, queued] {
        answer(&reply.await.unwrap());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn results_of_tools_go_on_within_the_limit() {
    let chat = chat_with(1).await;
    let call = ("a".to_owned(), "look".to_owned());
    chat.model.push(Step::CallTools(vec![call]));
    let tools = json!([{"type": "function", "function": {"name": "look"}}]);
    let body = json!({"messages": [user_message("look")], "tools": tools});
    Reply::of(chat.completion_request(0, "mine", body))
        .await
        .expect(200);
    chat.model.push(Step::held("other", "!"));
    let other = tokio::spawn(Reply::of(chat.message_request(0, "other", "b")));
    chat.model.called(2).await;
    let result = json!({"role": "tool", "tool_call_id": "a", "content": "seen"});
    let body = json!({"messages": [result], "tools": tools});
    let send = async || Reply::of(chat.completion_request(1, "mine", body.clone())).await;
    send().await.expect_openai_error(429, "too_many_turns");
    let instead = chat.say(1, "mine", "never mind").await;
    instead.expect_openai_error(429, "too_many_turns");
    chat.model.release();
    answer(&other.await.unwrap());
    // It waited all the time, and nothing that was refused has changed it.
    answer(&send().await);
    assert_eq!(chat.turns("mine").await.len(), 1);
}

/// One start waits in the middle of its statement while others fill the limit: they wait for it, or count it.
#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_is_not_committed_yet_counts() {
    // Two nodes of six connections each: below one running turn no start waits for another.
    let most = 25;
    let chat = chat_with(most).await;
    answer(&chat.say(0, "slow", "hi").await);
    chat.model.otherwise(Step::held("one", "!"));
    let mut superuser = chat.world.superuser().await;
    let mut held = superuser.begin().await.unwrap();
    sqlx::query("select 1 from sessions for update")
        .execute(&mut *held)
        .await
        .unwrap();
    let slow = tokio::spawn(Reply::of(chat.message_request(0, "slow", "hi")));
    chat.world.waiting(1).await;
    let others: Vec<_> = (0..most)
        .map(|place| {
            tokio::spawn(Reply::of(chat.message_request(
                place % 2,
                &format!("s-{place}"),
                "hi",
            )))
        })
        .collect();
    let all_asked = chat.model.called(1 + most);
    tokio::time::timeout(Duration::from_secs(1), all_asked)
        .await
        .ok();
    held.commit().await.unwrap();
    eventually("each runs or is refused", PATIENCE, async || {
        let all = others.iter().chain([&slow]);
        let refused = all.filter(|reply| reply.is_finished()).count();
        running(&chat).await as usize + refused == most + 1
    })
    .await;
    assert_eq!(running(&chat).await as usize, most);
    for _ in 0..=most {
        chat.model.release();
    }
    for reply in others.into_iter().chain([slow]) {
        let reply = reply.await.unwrap();
        if reply.status != 200 {
            reply.expect_openai_error(429, "too_many_turns");
        }
    }
}

/// Holds the lock under which a tenant's running turns are counted, until the transaction ends.
async fn hold_count(held: &mut PgConnection, lock: &'static str) {
    sqlx::raw_sql(lock).execute(held).await.unwrap();
}

const SHARED: &str = "select pg_advisory_xact_lock_shared(hashtextextended('turns of ' || id::text, 0)) from tenants";
const ALONE: &str =
    "select pg_advisory_xact_lock(hashtextextended('turns of ' || id::text, 0)) from tenants";

#[tokio::test(flavor = "multi_thread")]
async fn far_below_the_limit_no_start_waits_for_another() {
    let chat = chat_with(1000).await;
    let call = ("a".to_owned(), "look".to_owned());
    chat.model.push(Step::CallTools(vec![call]));
    let tools = json!([{"type": "function", "function": {"name": "look"}}]);
    let body = json!({"messages": [user_message("look")], "tools": tools});
    Reply::of(chat.completion_request(0, "mine", body))
        .await
        .expect(200);
    let mut superuser = chat.world.superuser().await;
    let mut held = superuser.begin().await.unwrap();
    // As a start does that is under way.
    hold_count(&mut held, SHARED).await;
    let result = json!({"role": "tool", "tool_call_id": "a", "content": "seen"});
    let body = json!({"messages": [result], "tools": tools});
    answer(&Reply::of(chat.completion_request(1, "mine", body)).await);
    answer(&chat.say(0, "other", "hi").await);
    held.commit().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queued_turn_waits_for_no_lock_and_fails_by_none() {
    let chat = chat_with(1000).await;
    chat.model.push(Step::held("one", "!"));
    let first = tokio::spawn(Reply::of(chat.message_request(0, "s", "a")));
    chat.wait_for_turns("s", 1).await;
    let second = tokio::spawn(Reply::of(chat.message_request(1, "s", "b")));
    chat.wait_for_turns("s", 2).await;
    let mut superuser = chat.world.superuser().await;
    let mut held = superuser.begin().await.unwrap();
    hold_count(&mut held, ALONE).await;
    chat.model.release();
    answer(&first.await.unwrap());
    let failures = async || -> i32 {
        sqlx::query_scalar("select max(failures) from turns")
            .fetch_one(&mut chat.world.superuser().await)
            .await
            .unwrap()
    };
    // Sweepers look at the queue.
    let three_seconds = Duration::from_secs(3);
    stays("no turn fails", three_seconds, async || {
        failures().await == 0
    })
    .await;
    chat.world.waiting(0).await;
    held.commit().await.unwrap();
    answer(&second.await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_running_turn_writes_touches_no_index() {
    let chat = Scene::chat([]).await;
    chat.model.otherwise(Step::Echo(Duration::from_millis(60)));
    let text = "word ".repeat(40);
    answer(&chat.say(0, "s", &text).await);
    eventually("updates are counted", Duration::from_secs(20), async || {
        let (all, hot): (i64, i64) = sqlx::query_as(
            "select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where relname = 'turns'",
        )
        .fetch_one(&mut chat.world.superuser().await)
        .await
        .unwrap();
        // The end of the turn changes its state, which is in an index.
        assert!(all - hot <= 1, "{hot} of {all} updates are HOT");
        all > 10
    })
    .await;
}
