//! What `/v1/resolve` adds to Postgres' own work for people it knows, with 10,000 of them and with
//! 100,000: over HTTP, beside pgbench running `begin`, `set local`, the same statement and `commit` as
//! the same role. Fails when a ratio is over its goal.
//!
//! Rounds alternate, so that what else the machine does falls on both sides, and a ratio is the median of
//! those of the rounds. Every account was heard within the last minute, so that nothing is written: what
//! is measured is the one statement. Client, node and Postgres share the machine.

#![allow(
    clippy::disallowed_methods,
    reason = "it calls the service from outside, as its clients do"
)]

use std::process::ExitCode;
use std::time::Duration;

#[path = "../database.rs"]
mod database;
#[path = "../dev.rs"]
mod dev;
#[path = "../figures.rs"]
#[allow(dead_code, reason = "other benches tell more")]
mod figures;
#[path = "../people.rs"]
mod people;
#[path = "../pgbench.rs"]
mod pgbench;
#[path = "../random.rs"]
mod random;
mod service;

use dev::Dev;
use figures::{Figures, Part, Ratio, Side, Times};
use people::FirstContact;
use pgbench::Pgbench;
use service::Service;

/// The agent that is spoken to.
const AGENT: &str = "main";
const ROUNDS: usize = 5;
const SIZES: [u32; 2] = [10_000, 100_000];
const CLIENTS: [u32; 3] = [1, 16, 64];
/// Where the goal is.
const GOAL_CLIENTS: u32 = 16;
/// pgbench's transactions a second to ours: 40 % of pgbench.
const RATE_GOAL: f64 = 2.5;
/// What pgbench is ahead with many people, to what it is ahead with few: no difference, but for noise.
const SIZE_GOAL: f64 = 1.15;

const TIMES: Times = Times {
    warm_up: Duration::from_millis(500),
    measured: Duration::from_millis(1500),
};

fn main() -> anyhow::Result<ExitCode> {
    if cfg!(debug_assertions) {
        println!("Only a release build tells something: cargo bench --bench resolve");
        return Ok(ExitCode::SUCCESS);
    }
    println!(
        "$ cargo bench --bench resolve   # {ROUNDS} rounds each way; times in ms, ratios as median (least to most)"
    );
    let dev = Dev::start("resolve")?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let outcome = runtime.block_on(measure(&dev));
    dev.stop()?;
    Ok(if outcome? {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Answers whether every goal was met.
async fn measure(dev: &Dev) -> anyhow::Result<bool> {
    let mut planted = FirstContact::new(dev).await?;
    let mut met = true;
    let mut behind = Vec::new();
    for people in SIZES {
        planted.grow_to(people).await?;
        println!(
            "\n{people} people   HTTP a second     p50     p99   pgbench a second     p50     p99"
        );
        for clients in CLIENTS {
            let figures = run(dev, people, clients).await?;
            print!("  {clients:>2} clients ");
            for (side, width) in [(Side::Http, 15), (Side::Pgbench, 19)] {
                let rate = figures.middle(side, Part::rate);
                let p50 = figures.middle(side, |part| part.quantile(0, 0.5));
                let p99 = figures.middle(side, |part| part.quantile(0, 0.99));
                print!("{rate:>width$.0}{p50:>8.3}{p99:>8.3}");
            }
            println!();
            let rates = |side| figures.each(side, Part::rate);
            let ratio = Ratio::of(&rates(Side::Pgbench), &rates(Side::Http));
            if clients == GOAL_CLIENTS {
                met &= ratio.check("pgbench / HTTP", RATE_GOAL);
                behind.push(ratio);
            } else {
                println!("  pgbench / HTTP: {ratio}");
            }
        }
    }
    println!();
    if let [few, many] = &behind[..] {
        met &= many.over(few).check("100,000 people / 10,000", SIZE_GOAL);
    }
    Ok(met)
}

/// Both sides resolve people chosen at random in every round.
async fn run(dev: &Dev, people: u32, clients: u32) -> anyhow::Result<Figures> {
    let pgbench = Pgbench::new(dev)?;
    let choose = format!("\\set number random(1, {people})\n");
    let scripts = [choose + &pgbench.transaction(&people::resolve_sql(&pgbench)?)];
    let service = Service::start(dev, people, clients).await?;
    let mut figures = Figures::default();
    let mut sides = [Side::Pgbench, Side::Http];
    for _ in 0..ROUNDS {
        for side in sides {
            let measured = match side {
                Side::Pgbench => pgbench.run(&scripts, clients, TIMES)?,
                Side::Library | Side::Http => service.run(clients, TIMES).await?,
            };
            figures.put(side, measured);
        }
        sides.reverse();
    }
    service.stop().await;
    Ok(figures)
}
