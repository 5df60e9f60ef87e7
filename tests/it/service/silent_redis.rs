//! A Redis that says nothing more and closes no connection, as when its host vanished.

use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use throughline::dev::servers::RedisServer;
use throughline::ids::SessionId;

use crate::support::servers::cluster::{scratch_dir, setup};
use crate::support::servers::process::redis_pid;
use crate::support::{World, eventually};

/// Much longer than a node needs.
const LIMIT: Duration = Duration::from_secs(20);

/// Stops Redis; `while_silent` happens then. The node must notice, and hear others again when Redis goes on.
async fn silence(while_silent: impl AsyncFn(&World)) {
    let redis = RedisServer::start(&setup(scratch_dir("silent-redis")), "pw")
        .await
        .unwrap();
    let world = World::with_redis(1, &redis.url).await;
    let live = &world.app().notifications;
    let hears = async || live.is_connected();
    eventually("others are heard", LIMIT, hears).await;
    let pid = Pid::from_raw(redis_pid(&redis.url).unwrap());
    kill(pid, Signal::SIGSTOP).unwrap();
    while_silent(&world).await;
    let silent = async || !live.is_connected();
    let noticed = eventually("the silence is noticed", LIMIT * 2, silent);
    // Redis goes on before the test can fail.
    let noticed = tokio::time::timeout(LIMIT, noticed).await;
    kill(pid, Signal::SIGCONT).unwrap();
    noticed.expect("a Redis that says nothing is noticed");
    eventually("others are heard again", LIMIT, hears).await;
    drop(world);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redis_that_says_nothing_is_noticed_although_nobody_asks_it() {
    silence(async |_| {}).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redis_that_answers_no_subscription_is_noticed() {
    silence(async |world| drop(world.app().notifications.subscribe(SessionId::generate()))).await;
}
