//! The cost of a platform's message, from `POST /v1/inbound` to the acknowledgement of its answer, beside
//! pgbench with the same statements; and the time until a bridge receives the answer, by long poll and from the
//! stream. The model is a server with a constant answer, without delay.
//!
//! A client sends a message of one of its own users without waiting for the answer, which the bridge gets as a
//! delivery; the client acknowledges it, and only then sends the next. So there are as many messages in flight as
//! clients, as in pgbench. Rounds alternate, so that other load of the machine affects both sides; a figure is the
//! median of the rounds. Clients, bridge, node, model and Postgres share the machine, and the share of other
//! processes is printed. CPU is that of the node's process alone.
//!
//! `cargo bench --bench inbound -- stream consumers=4 pool=64` measures one mode (`poll` or `stream`), with 4
//! instead of one consumer and 64 instead of 16 connections to Postgres. `short` only checks that the bench works.

#![allow(
    clippy::disallowed_methods,
    reason = "it calls the service from outside, as its clients do"
)]

use std::sync::Arc;

use anyhow::ensure;

#[path = "../awake.rs"]
mod awake;
mod bridge;
#[path = "../connection.rs"]
mod connection;
#[path = "../database.rs"]
mod database;
#[path = "../dev.rs"]
mod dev;
#[path = "../figures.rs"]
#[allow(dead_code, reason = "other benches print more")]
mod figures;
#[path = "../load.rs"]
mod load;
#[path = "../machine.rs"]
#[allow(dead_code, reason = "other benches print more")]
mod machine;
mod messages;
#[path = "../node.rs"]
mod node;
#[path = "../pgbench.rs"]
mod pgbench;
#[path = "../plan.rs"]
mod plan;
#[path = "../random.rs"]
mod random;
mod rounds;
mod script;
#[path = "../chat/seed.rs"]
#[allow(dead_code, reason = "its sessions are those of chat")]
mod seed;
#[path = "../table.rs"]
#[allow(dead_code, reason = "other benches have goals")]
mod table;
#[path = "../chat/script.rs"]
#[allow(dead_code, reason = "its sessions are those of chat")]
mod turn;
#[path = "../upstream.rs"]
#[allow(dead_code, reason = "other benches measure the model too")]
mod upstream;
#[path = "../users.rs"]
mod users;

use awake::Awake;
use bridge::{DeliveryMode, PendingAnswers};
use dev::Dev;
use node::Node;
use pgbench::Pgbench;
use plan::Plan;
use rounds::InboundBench;
use seed::{Seed, TEXT};
use upstream::Upstream;
use users::UserSeed;

/// The agent of the bench.
const AGENT: &str = "bench";
/// The messages of every session at the start.
const MESSAGES: u32 = 10;

fn main() -> anyhow::Result<()> {
    if std::env::args().nth(1).as_deref() == Some(upstream::ARGUMENT) {
        return upstream::serve();
    }
    let plan = Plan::from_args();
    if cfg!(debug_assertions) && !plan.short {
        println!("Only a release build gives useful figures: cargo bench --bench inbound");
        return Ok(());
    }
    println!(
        "$ cargo bench --bench inbound   # rounds: {}; {} connections to Postgres; times in ms",
        plan.rounds, plan.pool
    );
    let dev = Dev::start("inbound")?;
    let awake = Awake::start();
    // One thread: the measured processes need the machine.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let outcome = runtime.block_on(measure(&plan, &dev));
    drop(awake);
    dev.stop()?;
    outcome
}

async fn measure(plan: &Plan, dev: &Dev) -> anyhow::Result<()> {
    let upstream = Upstream::start()?;
    let node = Node::start(dev, Some(plan.pool)).await?;
    node.make_agent(dev, &upstream).await?;
    // A multiple of every number of clients, and so many that the length of their sessions stays about the same.
    let users = if plan.short { 640 } else { 64_000 };
    let mut user_seed = UserSeed::new(dev).await?;
    user_seed.grow_to(users).await?;
    user_seed.add_messages(MESSAGES, TEXT).await?;
    let bench = InboundBench {
        plan,
        node: &node,
        pgbench: Arc::new(Pgbench::new(dev)?),
        users,
        consumers: plan::option("consumers").unwrap_or(1),
        pending: PendingAnswers::default(),
    };
    // The stream comes last: the node does not notice at once that its reader has left.
    for (name, mode) in [
        ("poll", DeliveryMode::LongPoll),
        ("stream", DeliveryMode::Stream),
    ] {
        if plan.is_selected(name) {
            bench.table(name, mode).await?;
            tokio::time::sleep(bridge::CONSUMER_TIMEOUT).await;
        }
    }
    let mut seed = Seed::new(dev).await?;
    let turns = seed.turns(turn::PRINCIPAL).await?;
    println!(
        "\n  {} messages of ours, each in {:.2} writes of its turn (the one that accepts it among them)",
        turns.of_service, turns.writes
    );
    seed.close().await?;
    check_deliveries(dev).await?;
    node.stop()
}

/// Fails unless every answer was delivered, those of pgbench too.
async fn check_deliveries(dev: &Dev) -> anyhow::Result<()> {
    let sql = "select count(*) from deliveries where state <> 'delivered'";
    let mut connection = database::superuser(dev).await?;
    let left: i64 = sqlx::query_scalar(sql).fetch_one(&mut connection).await?;
    ensure!(left == 0, "{left} deliveries were not acknowledged");
    Ok(())
}
