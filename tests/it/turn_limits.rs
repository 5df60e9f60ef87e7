//! `concurrent_turns` is exact, however many ask at a time; and what a turn writes while it runs stays within its
//! page.

use std::time::Duration;

use futures_util::future::join_all;
use serde_json::json;

use crate::support::chat::{Chat, answer, expect_error};
use crate::support::eventually;
use crate::support::model::Step;
use crate::support::world::OPERATOR_KEY;

async fn chat_with(concurrent_turns: usize) -> Chat {
    let chat = Chat::new([]).await;
    chat.model.otherwise(Step::Echo(Duration::from_millis(50)));
    let limits = format!("/v1/operator/tenants/{}/limits", chat.tenant.id);
    let body = json!({ "concurrent_turns": concurrent_turns });
    let put = chat.world.put(OPERATOR_KEY, &limits, body).await;
    put.expect(200);
    chat
}

/// Sends as many first messages at a time, each to a session of its own, on so many nodes.
async fn race(concurrent_turns: usize, racers: usize, nodes: usize) {
    let chat = chat_with(concurrent_turns).await;
    for round in 0..3 {
        let send = |place: usize| {
            let (chat, session) = (&chat, format!("s-{round}-{place}"));
            async move { chat.say(place % nodes, &session, "one two three").await }
        };
        let replies = join_all((0..racers).map(send)).await;
        let (taken, refused): (Vec<_>, Vec<_>) =
            replies.iter().partition(|reply| reply.status == 200);
        for reply in &refused {
            expect_error(reply, 429, "too_many_turns");
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
async fn what_a_running_turn_writes_touches_no_index() {
    let chat = Chat::new([]).await;
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
