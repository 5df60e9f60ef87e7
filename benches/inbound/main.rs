//! What a message of a platform takes, from `POST /v1/inbound` to the acknowledgement of its answer, beside
//! pgbench doing the same statements; and how long it takes until a bridge has the answer in hand, by long poll
//! and from the stream. The model is a server that says the same words to whoever asks, without delay.
//!
//! A client brings a message of one of its own people without waiting for the answer, which the bridge gets as
//! a delivery; the client acknowledges that, and only then brings the next. So there are as many messages under
//! way as clients, as in pgbench. Rounds alternate, so that what else the machine does falls on both sides; a
//! figure is the median of those of the rounds. Clients, bridge, node, model and Postgres share the machine, and
//! what others had of it is told. CPU is that of the node's process alone.
//!
//! `cargo bench --bench inbound -- stream consumers=4 pool=64` measures one way (`poll` or `stream`), with other
//! than one consumer and 16 connections to Postgres. With `short` it only shows that it works.

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
#[allow(dead_code, reason = "other benches tell more")]
mod figures;
#[path = "../load.rs"]
mod load;
#[path = "../machine.rs"]
#[allow(dead_code, reason = "other benches tell more")]
mod machine;
mod messages;
#[path = "../node.rs"]
mod node;
#[path = "../people.rs"]
mod people;
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

use awake::Awake;
use bridge::{Waiting, Way};
use dev::Dev;
use node::Node;
use people::FirstContact;
use pgbench::Pgbench;
use plan::Plan;
use rounds::Measuring;
use seed::{Seed, TEXT};
use upstream::Upstream;

/// The agent that is asked.
const AGENT: &str = "bench";
/// In every session when it begins.
const MESSAGES: u32 = 10;

fn main() -> anyhow::Result<()> {
    if std::env::args().nth(1).as_deref() == Some(upstream::ARGUMENT) {
        return upstream::serve();
    }
    let plan = Plan::from_args();
    if cfg!(debug_assertions) && !plan.short {
        println!("Only a release build tells something: cargo bench --bench inbound");
        return Ok(());
    }
    println!(
        "$ cargo bench --bench inbound   # rounds: {}; {} connections to Postgres; times in ms",
        plan.rounds, plan.pool
    );
    let dev = Dev::start("inbound")?;
    let awake = Awake::start();
    // Of one thread: the machine is needed for what is measured.
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
    // A multiple of every number of clients, and so many that their sessions stay about as long.
    let people = if plan.short { 640 } else { 64_000 };
    let mut planted = FirstContact::new(dev).await?;
    planted.grow_to(people).await?;
    planted.say(MESSAGES, TEXT).await?;
    let measuring = Measuring {
        plan,
        node: &node,
        pgbench: Arc::new(Pgbench::new(dev)?),
        people,
        consumers: plan::option("consumers").unwrap_or(1),
        waiting: Waiting::default(),
    };
    // The stream comes last: nobody notices at once that its reader has left.
    for (name, way) in [("poll", Way::LongPoll), ("stream", Way::Stream)] {
        if plan.is_asked(name) {
            measuring.table(name, way).await?;
            tokio::time::sleep(bridge::GONE).await;
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
