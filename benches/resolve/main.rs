//! The cost that `/v1/resolve` adds to Postgres' own work for existing users, with 10,000 and with 100,000
//! of them: over HTTP, beside pgbench running `begin`, `set local`, the same statement and `commit` as the
//! same role. Fails when a ratio is over its goal.
//!
//! Rounds alternate, so that other load of the machine affects both sides, and a ratio is the median of the
//! rounds. Every identity has a presence within the last minute, so that a resolve writes no row: the bench
//! measures the one statement. Client, node and Postgres share the machine.

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
#[allow(dead_code, reason = "other benches print more")]
mod figures;
#[path = "../pgbench.rs"]
mod pgbench;
#[path = "../random.rs"]
mod random;
mod service;
#[path = "../users.rs"]
mod users;

use dev::Dev;
use figures::{Figures, Part, Ratio, Side, Times};
use pgbench::Pgbench;
use service::Service;
use users::UserSeed;

/// The agent of the bench.
const AGENT: &str = "main";
const ROUNDS: usize = 5;
const SIZES: [u32; 2] = [10_000, 100_000];
const CLIENTS: [u32; 3] = [1, 16, 64];
/// The number of clients of the goal.
const GOAL_CLIENTS: u32 = 16;
/// pgbench's transactions a second to ours: 40 % of pgbench.
const RATE_GOAL: f64 = 2.5;
/// pgbench's lead with many users to its lead with few: equal, except for noise.
const SIZE_GOAL: f64 = 1.15;

const TIMES: Times = Times {
    warm_up: Duration::from_millis(500),
    measured: Duration::from_millis(1500),
};

fn main() -> anyhow::Result<ExitCode> {
    if cfg!(debug_assertions) {
        println!("Only a release build gives useful figures: cargo bench --bench resolve");
        return Ok(ExitCode::SUCCESS);
    }
    println!(
        "$ cargo bench --bench resolve   # {ROUNDS} rounds each way; times in ms, ratios as median (min to max)"
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

/// Returns whether every goal was met.
async fn measure(dev: &Dev) -> anyhow::Result<bool> {
    let mut user_seed = UserSeed::new(dev).await?;
    let mut met = true;
    let mut behind = Vec::new();
    for users in SIZES {
        user_seed.grow_to(users).await?;
        println!(
            "\n{users} users    HTTP a second     p50     p99   pgbench a second     p50     p99"
        );
        for clients in CLIENTS {
            let figures = run(dev, users, clients).await?;
            print!("  {clients:>2} clients ");
            for (side, width) in [(Side::Http, 15), (Side::Pgbench, 19)] {
                let rate = figures.median(side, Part::rate);
                let p50 = figures.median(side, |part| part.quantile(0, 0.5));
                let p99 = figures.median(side, |part| part.quantile(0, 0.99));
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
        met &= many.over(few).check("100,000 users / 10,000", SIZE_GOAL);
    }
    Ok(met)
}

/// Both sides resolve random users in every round.
async fn run(dev: &Dev, users: u32, clients: u32) -> anyhow::Result<Figures> {
    let pgbench = Pgbench::new(dev)?;
    let choose = format!("\\set number random(1, {users})\n");
    let scripts = [choose + &pgbench.transaction(&users::resolve_sql(&pgbench)?)];
    let service = Service::start(dev, users, clients).await?;
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
