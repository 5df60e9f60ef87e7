//! What an outage of the database and a deploy do to turns whose node lives: nothing that costs a second call of
//! the model.

use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::json;
use tokio::net::TcpStream;

use crate::support::chat::line;
use crate::support::servers::model::Step;
use crate::support::servers::nodes::NodesOptions;
use crate::support::servers::own_servers::Servers;
use crate::support::servers::pair::{GRACE, LEASE, Pair};
use crate::support::sse::{self, Sse};
use crate::support::{eventually, stays};

const TURNS: usize = 12;

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_longer_than_the_lease_restarts_no_turn() {
    let mut servers = Servers::start().await;
    let options = NodesOptions {
        database: Some((
            servers.url("throughline"),
            servers.postgres.superuser("throughline"),
        )),
        redis_url: servers.redis.as_ref().map(|redis| redis.url.clone()),
        ..NodesOptions::default()
    };
    let held = vec![Step::held("one two ", "three"); TURNS];
    let pair = Pair::with(options, held).await;
    let mut streams = Vec::new();
    for place in 0..TURNS {
        let request = pair.message_request_in(place % 2, &format!("s-{place}"), "hi", true);
        let mut stream = Sse::open(request).await;
        stream.reads("one two ").await;
        streams.push(stream);
    }
    servers
        .restart_postgres_after(Signal::SIGINT, LEASE * 3)
        .await;
    // Long enough for sweepers to look, on both nodes.
    let attempts = async || -> Option<i32> {
        sqlx::query_scalar("select max(attempt) from turns")
            .fetch_one(&mut pair.nodes.superuser().await)
            .await
            .unwrap()
    };
    stays("no turn restarts", LEASE * 3, async || {
        attempts().await == Some(1)
    })
    .await;
    for stream in &mut streams {
        pair.model.release();
        let turn = stream.header("x-throughline-turn-id");
        let ended = pair.completes(1, &turn).await;
        assert_eq!(ended["attempt"], json!(1));
    }
    for mut stream in streams {
        assert_eq!(sse::text_of(&stream.rest().await), "three");
    }
    assert_eq!(pair.model.requests().len(), TURNS, "each is asked once");
    drop(pair);
    servers.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_ends_leaves_the_next_turn_to_another() {
    // It would not end within the node's grace.
    let slow = Step::Wait(GRACE + Duration::from_secs(1));
    let pair = Pair::new([Step::held("one ", "two"), slow, Step::say("next")]).await;
    let mut stream = Sse::open(pair.message_request(0, "first", true)).await;
    stream.reads("one ").await;
    let second = tokio::spawn(pair.message_request(0, "second", true).send());
    let count = async || -> i64 {
        sqlx::query_scalar("select count(*) from turns")
            .fetch_one(&mut pair.nodes.superuser().await)
            .await
            .unwrap()
    };
    let patience = Duration::from_secs(20);
    eventually("both are accepted", patience, async || count().await == 2).await;
    let nodes = pair.nodes.clone();
    let ending = tokio::spawn(async move { nodes.terminate(0).await });
    // A node that begins no turn any more closes its port first.
    let url = pair.nodes.url_on(0, "");
    let address = url.trim_start_matches("http://");
    let closed = async || TcpStream::connect(address).await.is_err();
    eventually("the node is ending", patience, closed).await;
    pair.model.release();
    assert_eq!(sse::text_of(&stream.rest().await), "two");
    ending.await.unwrap();
    drop(second);
    let expected = [
        line("user", "first"),
        line("assistant", "one two"),
        line("user", "second"),
        line("assistant", "next"),
    ];
    eventually("the second is answered", patience, async || {
        pair.lines(1).await == expected
    })
    .await;
    let runs: Vec<(i32, i32)> = sqlx::query_as("select attempt, lost from turns order by turn_no")
        .fetch_all(&mut pair.nodes.superuser().await)
        .await
        .unwrap();
    // The node that ended began nothing that it had to leave.
    assert_eq!(runs, [(1, 0), (1, 0)]);
    assert_eq!(pair.model.requests().len(), 2);
}
