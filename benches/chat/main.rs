//! The latency that a node adds to its model for chat without a session, the cost of a turn in a session
//! beside pgbench with the same statements, and the memory of open event streams. The model is a server
//! with a constant answer, without delay. Fails when a figure is over its goal.
//!
//! Rounds alternate, so that other load of the machine affects all sides; a figure is the median of the
//! rounds. Clients, node, model and Postgres share the machine, and the share of other processes is printed.
//! CPU is that of the node's process alone.
//!
//! `cargo bench --bench chat -- sessions pool=64` measures one part, with 64 instead of 16 connections to
//! Postgres; the parts are `stateless`, `sessions` and `memory`. `short` only checks that the bench works.

#![allow(
    clippy::disallowed_methods,
    reason = "it calls the service from outside, as its clients do"
)]

use std::process::ExitCode;

#[path = "../awake.rs"]
mod awake;
mod client;
#[path = "../connection.rs"]
#[allow(dead_code, reason = "other benches use more")]
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
mod machine;
mod memory;
#[path = "../node.rs"]
mod node;
#[path = "../pgbench.rs"]
mod pgbench;
#[path = "../plan.rs"]
mod plan;
#[path = "../random.rs"]
mod random;
mod script;
mod seed;
mod sessions;
mod stateless;
#[path = "../table.rs"]
mod table;
#[path = "../upstream.rs"]
mod upstream;

use awake::Awake;
use dev::Dev;
use node::Node;
use plan::{Plan, SHORT};
use upstream::Upstream;

/// The agent of the bench.
const AGENT: &str = "bench";
const CLIENTS: [u32; 3] = [1, 16, 64];

fn main() -> anyhow::Result<ExitCode> {
    if std::env::args().nth(1).as_deref() == Some(upstream::ARGUMENT) {
        upstream::serve()?;
        return Ok(ExitCode::SUCCESS);
    }
    let plan = Plan::from_args();
    if cfg!(debug_assertions) && !std::env::args().any(|name| name == SHORT) {
        println!("Only a release build gives useful figures: cargo bench --bench chat");
        return Ok(ExitCode::SUCCESS);
    }
    println!(
        "$ cargo bench --bench chat   # rounds: {}; {} connections to Postgres; times in ms",
        plan.rounds, plan.pool
    );
    let dev = Dev::start("chat")?;
    let awake = Awake::start();
    // One thread: the measured processes need the machine.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let outcome = runtime.block_on(measure(&plan, &dev));
    drop(awake);
    dev.stop()?;
    Ok(if outcome? {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Returns whether every goal was met.
async fn measure(plan: &Plan, dev: &Dev) -> anyhow::Result<bool> {
    let upstream = Upstream::start()?;
    let node = Node::start(dev, Some(plan.pool)).await?;
    node.make_agent(dev, &upstream).await?;
    let mut met = true;
    if plan.is_selected("stateless") {
        met &= stateless::measure(plan, &node, &upstream).await?;
    }
    if plan.is_selected("sessions") {
        met &= sessions::measure(plan, dev, &node, &upstream).await?;
    }
    node.stop()?;
    if plan.is_selected("memory") {
        memory::measure(plan, dev).await?;
    }
    Ok(met)
}
