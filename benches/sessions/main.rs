//! The cost that the service adds to Postgres' own work when it finds a tip, reads a history and appends a
//! turn: through the library and over HTTP, beside pgbench running `begin`, `set local`, the same statements
//! and `commit` as the same role. Fails when a ratio is over its goal.
//!
//! Rounds alternate, so that other load of the machine affects all sides, and a ratio is the median of the
//! rounds. pgbench's statements contain constants and are planned once; the service opens a transaction with
//! its settings in one round trip, where pgbench needs two.

#![allow(
    clippy::disallowed_methods,
    reason = "it calls the service from outside, as its clients do"
)]

use std::process::ExitCode;
use std::time::Duration;

use anyhow::ensure;

#[path = "../database.rs"]
mod database;
#[path = "../dev.rs"]
mod dev;
#[path = "../figures.rs"]
#[allow(dead_code, reason = "other benches print more")]
mod figures;
#[path = "../pgbench.rs"]
mod pgbench;
mod scripts;
mod seed;
mod service;

use dev::Dev;
use figures::{Figures, Part, Ratio, Side, Times};
use pgbench::Pgbench;
use scripts::script;
use seed::{LONG_SESSION, Seed};
use service::Service;

const ROUNDS: usize = 7;
const DEPTHS: [u32; 5] = [1, 10, 100, 1_000, 10_000];
const LIMITS: [u32; 3] = [10, 100, 1_000];
const CLIENTS: [u32; 3] = [1, 16, 64];
/// The ratio of depth 10,000 to depth 1.
const TIP_GOAL: f64 = 1.2;
/// The service's mean time to pgbench's.
const HISTORY_GOAL: f64 = 1.5;
/// pgbench's transactions a second to the service's.
const APPEND_GOAL: f64 = 1.3;

/// One transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Task {
    /// From the first link of a chain with `depth` compressions. Only the statement is timed, because the
    /// begin and the end of the transaction are the same for every depth.
    Tip { depth: u32 },
    /// The newest messages of the long session.
    History { limit: u32 },
    /// A user's message and an answer, in a random session.
    Append,
}

const READING: Times = Times {
    warm_up: Duration::from_millis(250),
    measured: Duration::from_millis(750),
};
const WRITING: Times = Times {
    warm_up: Duration::from_millis(500),
    measured: Duration::from_secs(1),
};

fn main() -> anyhow::Result<ExitCode> {
    if cfg!(debug_assertions) {
        println!("Only a release build gives useful figures: cargo bench --bench sessions");
        return Ok(ExitCode::SUCCESS);
    }
    println!(
        "$ cargo bench --bench sessions   # {ROUNDS} rounds each way; times in ms, ratios as median (min to max)"
    );
    let dev = Dev::start("sessions")?;
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

/// Returns whether every goal was met.
async fn measure(dev: &Dev) -> anyhow::Result<bool> {
    let seed = Seed::plant(dev).await?;
    let mut met = true;
    if is_selected("tip") {
        met &= measure_tips(dev).await?;
    }
    if is_selected("history") {
        met &= measure_history(dev).await?;
    }
    if is_selected("append") {
        met &= measure_append(dev, seed).await?;
    }
    Ok(met)
}

/// Whether to measure a part: `cargo bench --bench sessions -- history` selects one, no name selects all.
fn is_selected(part: &str) -> bool {
    let mut names = std::env::args().skip(1).filter(|name| name != "--bench");
    let first = names.next();
    first.is_none_or(|first| first == part || names.any(|name| name == part))
}

async fn measure_tips(dev: &Dev) -> anyhow::Result<bool> {
    let tasks = DEPTHS.map(|depth| Task::Tip { depth });
    let figures = run(dev, &tasks, 1, READING).await?;
    println!("\ntip by depth        ours p50     p99   pgbench p50     p99   HTTP p50     p99");
    for (task, depth) in DEPTHS.iter().enumerate() {
        print!("  {depth:>10}");
        for (side, width) in [(Side::Library, 16), (Side::Pgbench, 14), (Side::Http, 11)] {
            let p50 = figures.median(side, |part| part.quantile(task, 0.5));
            let p99 = figures.median(side, |part| part.quantile(task, 0.99));
            print!("{p50:>width$.3}{p99:>8.3}");
        }
        println!();
    }
    let growth = |side| {
        let p50 = |task| figures.each(side, |part| part.quantile(task, 0.5));
        Ratio::of(&p50(DEPTHS.len() - 1), &p50(0))
    };
    println!("  depth 10,000 / depth 1 over HTTP: {}", growth(Side::Http));
    Ok(growth(Side::Library).check("depth 10,000 / depth 1", TIP_GOAL))
}

async fn measure_history(dev: &Dev) -> anyhow::Result<bool> {
    let tasks = LIMITS.map(|limit| Task::History { limit });
    let figures = run(dev, &tasks, 1, READING).await?;
    println!(
        "\nlast n of {LONG_SESSION}   ours p50    mean   pgbench p50    mean   HTTP p50    mean"
    );
    let mut met = true;
    for (task, limit) in LIMITS.iter().enumerate() {
        print!("  {limit:>10}");
        for (side, width) in [(Side::Library, 18), (Side::Pgbench, 14), (Side::Http, 11)] {
            let p50 = figures.median(side, |part| part.quantile(task, 0.5));
            let mean = figures.median(side, |part| part.mean(task));
            print!("{p50:>width$.3}{mean:>8.3}");
        }
        println!();
        let ratio_to_pgbench = |side| {
            let p50 = |side| figures.each(side, |part| part.quantile(task, 0.5));
            Ratio::of(&p50(side), &p50(Side::Pgbench))
        };
        println!("    HTTP / pgbench: {}", ratio_to_pgbench(Side::Http));
        met &= ratio_to_pgbench(Side::Library).check("ours / pgbench", HISTORY_GOAL);
    }
    Ok(met)
}

async fn measure_append(dev: &Dev, seed: Seed) -> anyhow::Result<bool> {
    println!(
        "\nappend of a turn  ours a second      p50   pgbench a second      p50   HTTP a second      p50"
    );
    let mut met = true;
    let mut appended = 0;
    for clients in CLIENTS {
        let figures = run(dev, &[Task::Append], clients, WRITING).await?;
        appended += figures.done();
        print!("  {clients:>2} clients  ");
        for (side, width) in [(Side::Library, 18), (Side::Pgbench, 19), (Side::Http, 16)] {
            let rate = figures.median(side, Part::rate);
            let p50 = figures.median(side, |part| part.quantile(0, 0.5));
            print!("{rate:>width$.0}{p50:>9.3}");
        }
        println!();
        let ratio_to_pgbench = |side| {
            let rates = |side| figures.each(side, Part::rate);
            Ratio::of(&rates(Side::Pgbench), &rates(side))
        };
        println!("    pgbench / HTTP: {}", ratio_to_pgbench(Side::Http));
        met &= ratio_to_pgbench(Side::Library).check("pgbench / ours", APPEND_GOAL);
    }
    let stored = seed.appended().await?;
    ensure!(
        stored == 2 * appended,
        "{appended} turns left {stored} messages"
    );
    Ok(met)
}

/// Every side runs `tasks` in every round, with a connection for each client.
async fn run(dev: &Dev, tasks: &[Task], clients: u32, times: Times) -> anyhow::Result<Figures> {
    let pgbench = Pgbench::new(dev)?;
    let scripts: Vec<String> = tasks.iter().map(|task| script(&pgbench, *task)).collect();
    let service = Service::start(dev, clients).await?;
    let mut figures = Figures::default();
    let mut sides = [Side::Pgbench, Side::Library, Side::Http];
    for _ in 0..ROUNDS {
        for side in sides {
            let measured = match side {
                Side::Pgbench => pgbench.run(&scripts, clients, times)?,
                Side::Library | Side::Http => service.run(side, tasks, clients, times).await?,
            };
            figures.put(side, measured);
        }
        sides.reverse();
    }
    service.stop().await;
    Ok(figures)
}
