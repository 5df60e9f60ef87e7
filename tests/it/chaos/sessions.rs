//! Nodes that are killed in the middle of appends and compressions.

use std::sync::atomic::Ordering;
use std::time::Duration;

use sqlx::AssertSqlSafe;

use super::checks::violations;
use super::history::{History, Outcome, Sent};
use super::load::{self, Load, Tally};
use super::state::{self, Reader, State};
use super::{Dice, many_rounds, seed};
use crate::support::eventually;
use crate::support::servers::nodes::Nodes;

const NODES: usize = 2;
/// Calls that must have met a dead node: more than can be under way there when it dies.
const NOTICED: usize = 12;
const PATIENCE: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread")]
async fn acknowledged_messages_survive_a_killed_node() {
    survive_kills(1, seed()).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes a minute: make chaos"]
async fn acknowledged_messages_survive_many_killed_nodes() {
    survive_kills(many_rounds(), seed()).await;
}

async fn survive_kills(rounds: u64, seed: u64) {
    println!("CHAOS_ROUNDS={rounds} CHAOS_SEED={seed}");
    let mut dice = Dice::new(seed);
    let nodes = Nodes::start(NODES).await;
    let running = load::start(nodes, &mut dice).await;
    let mut hits = Hits::default();
    for _ in 0..rounds {
        kill_one(&running.load, &mut dice, &mut hits).await;
    }
    let (load, history, tallies) = running.stop().await;
    let state = read_settled(&load, &history).await;
    println!("{}", report(&history, &tallies, &state));
    let busy = |node| load.traffic(node).unavailable.load(Ordering::SeqCst);
    let unavailable: usize = (0..NODES).map(busy).sum();
    println!("{hits:?}; {unavailable} times a living node was unavailable");
    let mut found = violations(&history, &state);
    let deadlocks = count_deadlocks(&load).await;
    if deadlocks != 0 {
        found.push(format!("{deadlocks} deadlocks"));
    }
    assert!(
        found.is_empty(),
        "with CHAOS_SEED={seed}:\n{}",
        found.join("\n")
    );
}

/// What was under way on nodes at the moment of their deaths.
#[derive(Debug, Default)]
struct Hits {
    kills: usize,
    appends: usize,
    compressions: usize,
}

/// One round: a node dies under load, clients notice, and it comes back.
async fn kill_one(load: &Load, dice: &mut Dice, hits: &mut Hits) {
    let enough = load.acknowledged() + 20 + dice.below(60);
    eventually("messages are acknowledged", PATIENCE, async || {
        load.acknowledged() >= enough
    })
    .await;
    let victim = dice.below(NODES);
    let traffic = load.traffic(victim);
    if dice.one_in(2) {
        eventually("a compression runs there", PATIENCE, async || {
            traffic.compressions.load(Ordering::SeqCst) > 0
        })
        .await;
    } else {
        // Any moment, and not only that of an acknowledgement.
        tokio::time::sleep(Duration::from_micros(dice.below(10_000) as u64)).await;
    }
    let failures = traffic.failures.load(Ordering::SeqCst);
    hits.kills += 1;
    hits.appends += traffic.appends.load(Ordering::SeqCst);
    hits.compressions += traffic.compressions.load(Ordering::SeqCst);
    load.nodes.kill(victim);
    eventually("clients meet the dead node", PATIENCE, async || {
        traffic.failures.load(Ordering::SeqCst) >= failures + NOTICED
    })
    .await;
    load.nodes.revive(victim).await;
}

/// Everything there is, once Postgres is through with what dead nodes had begun.
async fn read_settled(load: &Load, history: &History) -> State {
    wait_for_backends(load, "xact_start is not null").await;
    let reader = Reader {
        client: &load.nodes.client,
        nodes: (0..NODES).map(|node| load.nodes.url_on(node, "")).collect(),
        key: &load.key,
    };
    state::read(&reader, &mut load.nodes.superuser().await, history).await
}

/// Those that Postgres had to break. It counts them for good when the connections end.
async fn count_deadlocks(load: &Load) -> i64 {
    (0..NODES).for_each(|node| load.nodes.kill(node));
    wait_for_backends(load, "true").await;
    sqlx::query_scalar("select deadlocks from pg_stat_database where datname = current_database()")
        .fetch_one(&mut load.nodes.superuser().await)
        .await
        .unwrap()
}

/// Waits until no connection of a node is as `condition` has it.
async fn wait_for_backends(load: &Load, condition: &str) {
    let sql = format!(
        "select count(*) = 0
           from pg_stat_activity
          where datname = current_database()
            and usename <> current_user
            and {condition}"
    );
    let database = tokio::sync::Mutex::new(load.nodes.superuser().await);
    eventually("the database is quiet", PATIENCE, async || {
        let sql = AssertSqlSafe(sql.clone());
        sqlx::query_scalar(sql)
            .fetch_one(&mut *database.lock().await)
            .await
            .unwrap()
    })
    .await;
}

fn report(history: &History, tallies: &[Tally], state: &State) -> String {
    let links = state.chains.iter().flat_map(|chain| &chain.links);
    format!(
        "{} acknowledged, {} refused, {} left unknown; {} in doubt, of which {} had been written; \
         {tallies:?}; {} links of which {} are undone",
        history.count(Sent::is_acknowledged),
        history.count(|sent| sent.outcome == Outcome::Refused),
        history.count(|sent| sent.outcome == Outcome::Unknown),
        history.count(|sent| sent.doubts > 0),
        history.count(|sent| sent.replayed),
        links.clone().count(),
        links.filter(|link| link.undone).count(),
    )
}
