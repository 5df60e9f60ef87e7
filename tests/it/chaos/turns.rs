//! Nodes, Postgres and Redis that go away in the middle of turns.

use std::path::PathBuf;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use throughline::config::MigrateConfig;
use throughline::dev::servers::{PostgresServer, RedisServer, Setup};
use throughline::store;

use super::turn_checks::violations;
use super::turn_history::{Disposition, TurnHistory, TurnsState};
use super::turn_load::{self, Load, Running};
use super::{Dice, many_rounds, seed};
use crate::support::cluster::{scratch_dir, setup};
use crate::support::eventually;
use crate::support::nodes::{Nodes, NodesOptions};

const NODES: usize = 2;
const LEASE: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(60);
/// How soon the service works again after what it needs is back.
const RECOVERY: Duration = Duration::from_secs(5);
const PASSWORD: &str = "pw-of-one-test";

/// One at a time: what is measured here is the service, and not how two loads share a machine.
static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

fn options() -> NodesOptions {
    NodesOptions {
        count: NODES,
        private_upstreams: true,
        turn_lease: Some(LEASE),
        ..NodesOptions::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn accepted_messages_are_answered_although_a_node_is_killed() {
    survive_kills(1, seed()).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes: make chaos"]
async fn accepted_messages_are_answered_although_many_nodes_are_killed() {
    survive_kills(many_rounds(), seed()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn accepted_messages_are_answered_although_postgres_and_redis_go_away() {
    survive_outages(1, seed()).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes: make chaos"]
async fn accepted_messages_are_answered_although_postgres_and_redis_go_away_often() {
    survive_outages(many_rounds(), seed()).await;
}

async fn survive_kills(rounds: u64, seed: u64) {
    let _alone = ALONE.lock().await;
    println!("CHAOS_ROUNDS={rounds} CHAOS_SEED={seed}");
    let mut dice = Dice::new(seed);
    let running = turn_load::start(Nodes::with(options()).await, &mut dice).await;
    for _ in 0..rounds {
        let load = &running.load;
        work(load, &mut dice).await;
        let victim = dice.below(NODES);
        let failures = load.failures_of(victim);
        load.nodes.kill(victim);
        eventually("clients meet the dead node", PATIENCE, async || {
            load.failures_of(victim) >= failures + 20
        })
        .await;
        load.nodes.revive(victim).await;
    }
    settle(running, seed).await;
}

async fn survive_outages(rounds: u64, seed: u64) {
    let _alone = ALONE.lock().await;
    println!("CHAOS_ROUNDS={rounds} CHAOS_SEED={seed}");
    let mut dice = Dice::new(seed);
    let mut servers = Servers::start().await;
    let nodes = Nodes::with(NodesOptions {
        database: Some((
            servers.url("throughline"),
            servers.postgres.superuser("throughline"),
        )),
        redis_url: servers.redis.as_ref().map(|redis| redis.url.clone()),
        // Nodes that live recover by themselves, long before a lease runs out.
        turn_lease: None,
        ..options()
    })
    .await;
    let running = turn_load::start(nodes, &mut dice).await;
    let load = running.load.clone();
    for _ in 0..rounds {
        for signal in [Signal::SIGINT, Signal::SIGQUIT] {
            work(&load, &mut dice).await;
            servers.restart_postgres(signal).await;
            load.answers_everywhere("it recovers from Postgres", RECOVERY)
                .await;
        }
        work(&load, &mut dice).await;
        let port = servers.redis.take().map(|redis| {
            redis.guarded.stop();
            redis.port
        });
        load.answers_everywhere("it answers without Redis", RECOVERY)
            .await;
        servers.redis = Some(Servers::start_redis(port).await);
        load.answers_everywhere("it answers with Redis again", RECOVERY)
            .await;
    }
    drop(load);
    settle(running, seed).await;
    servers.stop();
}

/// Lets the clients work for a while, up to any moment.
async fn work(load: &Load, dice: &mut Dice) {
    let enough = load.acknowledged() + 40 + dice.below(40);
    eventually("messages are answered", PATIENCE, async || {
        load.acknowledged() >= enough
    })
    .await;
}

async fn settle(running: Running, seed: u64) {
    let (_load, history, state) = running.stop().await;
    println!("{}", report(&history, &state));
    let found = violations(&history, &state);
    let shown = found.len().min(30);
    assert!(
        found.is_empty(),
        "with CHAOS_SEED={seed}, {} in all:\n{}",
        found.len(),
        found[..shown].join("\n")
    );
}

fn report(history: &TurnHistory, state: &TurnsState) -> String {
    let turns = || state.conversations.iter().flat_map(|one| &one.turns);
    let reasons: Vec<&String> = turns().filter_map(|turn| turn.reason.as_ref()).collect();
    format!(
        "{} answered, {} ended without an answer ({reasons:?}); {} in doubt at times; {} turns, of which {} were begun \
         anew; {} events watched",
        history.count(|asked| matches!(asked.became, Disposition::Answered { .. })),
        history.count(|asked| matches!(asked.became, Disposition::Ended { .. })),
        history.count(|asked| asked.doubts > 0),
        turns().count(),
        turns().filter(|turn| turn.attempt > 1).count(),
        history
            .seen
            .iter()
            .map(|seen| seen.events.len())
            .sum::<usize>(),
    )
}

/// A Postgres that keeps what it was told, and a Redis, of this test alone.
pub struct Servers {
    setup: Setup,
    pub postgres: PostgresServer,
    pub redis: Option<RedisServer>,
}

impl Servers {
    pub async fn start() -> Self {
        let setup = Setup {
            throwaway: false,
            ..setup(scratch_dir("own-postgres"))
        };
        let postgres = PostgresServer::start(&setup, PASSWORD).await.unwrap();
        let servers = Self {
            setup,
            postgres,
            redis: Some(Self::start_redis(None).await),
        };
        let superuser = servers.postgres.superuser("postgres");
        store::db::admin::ensure_database(&superuser, "throughline_owner", PASSWORD, "throughline")
            .await
            .unwrap();
        let config = MigrateConfig {
            owner_url: servers.url("throughline_owner").into(),
            service_url: servers.url("throughline").into(),
        };
        store::db::migrate::run(&config).await.unwrap();
        servers
    }

    async fn start_redis(port: Option<u16>) -> RedisServer {
        let setup = setup(scratch_dir("own-redis"));
        match port {
            Some(port) => RedisServer::start_on(&setup, PASSWORD, port).await.unwrap(),
            None => RedisServer::start(&setup, PASSWORD).await.unwrap(),
        }
    }

    pub fn url(&self, user: &str) -> String {
        self.postgres.url(user, PASSWORD, "throughline")
    }

    /// SIGINT ends it fast, SIGQUIT at once and without a word.
    async fn restart_postgres(&mut self, signal: Signal) {
        self.restart_postgres_after(signal, Duration::ZERO).await;
    }

    /// The same, with an outage of this length.
    pub async fn restart_postgres_after(&mut self, signal: Signal, outage: Duration) {
        let pid = self.postgres.guarded.pid();
        kill(Pid::from_raw(pid as i32), signal).unwrap();
        while !self.postgres.guarded.has_ended() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        tokio::time::sleep(outage).await;
        let port = self.postgres.port;
        let started = PostgresServer::start_on(&self.setup, PASSWORD, port).await;
        self.postgres = started.unwrap();
    }

    pub fn stop(self) {
        self.postgres.guarded.stop();
        drop(self.redis);
        let dir: PathBuf = self.setup.dir;
        std::fs::remove_dir_all(dir).unwrap();
    }
}
