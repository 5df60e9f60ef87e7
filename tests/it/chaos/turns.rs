//! Nodes, Postgres and Redis that go away in the middle of turns.

use std::time::Duration;

use nix::sys::signal::Signal;

use super::turn_checks::violations;
use super::turn_history::{Disposition, TurnHistory, TurnsState};
use super::turn_load::{self, Load, Running};
use super::{Dice, many_rounds, seed};
use crate::support::eventually;
use crate::support::servers::nodes::{Nodes, NodesOptions};
use crate::support::servers::own_servers::Servers;

const NODES: usize = 2;
const LEASE: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(60);
/// How soon the service works again after what it needs is back.
const RECOVERY: Duration = Duration::from_secs(5);

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
            redis.child.stop();
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
