//! What open streams cost while nothing happens: readers of a node share what they read and how their
//! rights are checked. Nothing that was said after a reader lost its right is shown.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde_json::json;

use crate::support::servers::cluster::cluster;
use crate::support::servers::model::Step;
use crate::support::sse::Sse;
use crate::support::world::OPERATOR_KEY;
use crate::support::{Fields, Scene, World, real_time};

const STREAMS: usize = 200;
const SECONDS: u64 = 6;
/// Transactions in that time, of all streams together.
const ALLOWED: i64 = 100;

async fn transactions(world: &World) -> i64 {
    let mut superuser = cluster().superuser(&world.database).await;
    // What other connections have counted shows when they flush it, once a second while they work.
    sqlx::query_scalar(
        "select xact_commit + xact_rollback from pg_stat_database where datname = current_database()",
    )
    .fetch_one(&mut superuser)
    .await
    .unwrap()
}

/// How many there are in a while.
async fn transactions_in(world: &World) -> i64 {
    let before = transactions(world).await;
    real_time("counted over a while", Duration::from_secs(SECONDS)).await;
    transactions(world).await - before
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_streams_cost_no_transaction_each() {
    let chat = Scene::chat([]).await;
    chat.model.otherwise(Step::Echo(Duration::ZERO));
    let mut paths = Vec::new();
    for number in 0..10 {
        let first = chat.say(0, &format!("s-{number}"), "hi").await;
        first.expect(200);
        let id = first.header("x-hermes-session-id").to_owned();
        paths.push(format!("/v1/sessions/{id}/events"));
    }
    let open = |number: usize| chat.events(number % 2, &paths[number / 20], None);
    let idle = transactions_in(&chat.world).await;
    let streams: Vec<Sse> = join_all((0..STREAMS).map(open)).await;
    // What opening them cost is counted some time after they are open.
    let mut spent = transactions_in(&chat.world).await;
    for _ in 0..3 {
        spent = spent.min(transactions_in(&chat.world).await);
        if spent < idle + ALLOWED {
            break;
        }
    }
    // Two nodes look for due work, whether there are streams or not. One transaction a second for each
    // stream would be 1200 more.
    assert!(
        spent < idle + ALLOWED,
        "{STREAMS} idle streams: {spent} transactions in {SECONDS} s, {idle} without"
    );
    drop(streams);
}

const STAYS: &str = "telegram:5";
const LEAVES: &str = "discord:5";

/// A stream of the conversation for one identity, on a node.
async fn stream_for(b: &Scene, node: usize, identity: &str, session: &str) -> Sse {
    let path = format!("/v1/sessions/{session}/events");
    let request = b.world.client.get(b.world.url_on(node, &path));
    let request = request.bearer_auth(&b.bridge_key);
    Sse::open(request.header("x-throughline-identity", identity)).await
}

async fn say(b: &Scene, identity: &str, text: &str) -> serde_json::Value {
    let said = json!({"identity": identity, "text": text, "message_id": text});
    b.send(said).await.expect(200)
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_after_an_unlink_are_not_shown_to_the_unlinked_identity() {
    let b = Scene::bridge([]).await;
    b.model.otherwise(Step::Echo(Duration::ZERO));
    b.world.link(&b.bridge_key, STAYS, LEAVES).await;
    let first = say(&b, STAYS, "before").await;
    let session = first.text("session_id");
    for node in [0, 1] {
        let mut stays = stream_for(&b, node, STAYS, session).await;
        let mut leaves = stream_for(&b, node, LEAVES, session).await;
        say(&b, STAYS, &format!("shown to both {node}")).await;
        for stream in [&mut stays, &mut leaves] {
            stream.until("turn.completed").await;
        }
        // The verdicts on both are as fresh as they can be.
        b.reply_to(LEAVES, "/unlink").await;
        say(&b, STAYS, &format!("after the unlink {node}")).await;
        stays.until("turn.completed").await;
        let shown = leaves.rest().await;
        assert_eq!(shown.len(), 1, "{shown:?}");
        assert_eq!(shown[0].name, "closed");
        b.world.link(&b.bridge_key, STAYS, LEAVES).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_streams_of_a_suspended_tenant_close_within_five_seconds() {
    let chat = Scene::chat([]).await;
    let session = chat.world.session(&chat.tenant.key, json!({})).await;
    let path = format!("/v1/sessions/{}/events", session.text("id"));
    let mut streams = [
        chat.events(0, &path, None).await,
        chat.events(1, &path, None).await,
    ];
    let suspend = format!("/v1/tenants/{}/suspend", chat.tenant.id);
    let suspended = chat.world.post(OPERATOR_KEY, &suspend, json!({})).await;
    suspended.expect_success();
    let asked = Instant::now();
    for stream in &mut streams {
        let rest = stream.rest().await;
        assert_eq!(rest.last().unwrap().name, "closed", "{rest:?}");
    }
    assert!(asked.elapsed() < Duration::from_secs(5));
}
