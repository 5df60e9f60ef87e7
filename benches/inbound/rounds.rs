//! Rounds of messages and of pgbench, and the table of their figures.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::spawn_blocking;

use crate::bridge::{self, DeliveryMode, PendingAnswers};
use crate::figures::{Part, Ratio, Times};
use crate::machine::Machine;
use crate::messages::{Messages, RoundResult};
use crate::node::Node;
use crate::pgbench::Pgbench;
use crate::plan::Plan;
use crate::script;
use crate::table::{Table, median};

const CLIENTS: [u32; 3] = [1, 16, 64];
/// The time until a new connection of the node to Postgres uses generic plans for the many statements, which
/// it plans individually the first five times.
const LEARNING: Duration = Duration::from_millis(150);
const COLUMNS: [&str; 14] = [
    "ours/s",
    "call p50",
    "p99",
    "delivery p50",
    "p99",
    "written p50",
    "p99",
    "CPU us",
    "Postgres us",
    "batch",
    "pgbench/s",
    "p50",
    "p99",
    "foreign %",
];

pub struct InboundBench<'a> {
    pub plan: &'a Plan,
    pub node: &'a Node,
    pub pgbench: Arc<Pgbench>,
    pub users: u32,
    pub consumers: u32,
    pub pending: PendingAnswers,
}

#[derive(Clone, Copy)]
enum Side {
    Ours,
    Pgbench,
}

/// The results of each round.
#[derive(Default)]
struct Figures {
    ours: Vec<RoundResult>,
    /// Microseconds of Postgres for a message of ours.
    postgres: Vec<f64>,
    pgbench: Vec<Part>,
}

impl InboundBench<'_> {
    /// Measures with deliveries in this mode, and prints a row for each number of clients.
    pub async fn table(&self, name: &str, mode: DeliveryMode) -> anyhow::Result<()> {
        let table = Table::begin(format!("deliveries by {name}"), &COLUMNS);
        let rows = async {
            for clients in CLIENTS {
                let before = Machine::now()?;
                let figures = self.run(clients).await?;
                let foreign = Machine::now()?.foreign_since(&before)?;
                table.row(clients, &figures.row(foreign));
                println!("    pgbench / ours: {}", figures.ratio());
            }
            anyhow::Ok(())
        };
        tokio::select! {
            served = bridge::serve(self.node, mode, self.consumers, &self.pending) => served,
            measured = rows => measured,
        }
    }

    async fn run(&self, clients: u32) -> anyhow::Result<Figures> {
        let scripts = [script::message(&self.pgbench, self.users, clients)?];
        let learning = Times {
            warm_up: self.plan.times.warm_up + LEARNING * clients,
            ..self.plan.times
        };
        let messages = |times: Times| Messages {
            node: self.node,
            pending: &self.pending,
            users: self.users,
            clients,
            times,
        };
        messages(learning).run().await?;
        let ours = messages(self.plan.times);
        let mut figures = Figures::default();
        let mut sides = [Side::Ours, Side::Pgbench];
        for _ in 0..self.plan.rounds {
            for side in sides {
                match side {
                    Side::Ours => {
                        let before = Machine::now()?;
                        let result = ours.run().await?;
                        let used = Machine::now()?.postgres_since(&before).as_secs_f64() * 1e6;
                        figures.postgres.push(used / result.done as f64);
                        figures.ours.push(result);
                    }
                    Side::Pgbench => {
                        let pgbench = self.pgbench.clone();
                        let scripts = scripts.clone();
                        // In another thread: the bridge must continue to poll, or its connection is closed.
                        let times = self.plan.times;
                        let run = move || pgbench.run(&scripts, clients, times);
                        figures.pgbench.push(spawn_blocking(run).await??);
                    }
                }
            }
            sides.reverse();
        }
        Ok(figures)
    }
}

impl Figures {
    fn row(&self, foreign: f64) -> [f64; COLUMNS.len()] {
        let ours = |figure: fn(&RoundResult) -> f64| median(self.ours.iter().map(figure));
        let pgbench = |figure: fn(&Part) -> f64| median(self.pgbench.iter().map(figure));
        [
            ours(|result| result.call.rate()),
            ours(|result| result.call.quantile(0, 0.5)),
            ours(|result| result.call.quantile(0, 0.99)),
            ours(|result| result.delivery.quantile(0, 0.5)),
            ours(|result| result.delivery.quantile(0, 0.99)),
            ours(|result| result.written.quantile(0, 0.5)),
            ours(|result| result.written.quantile(0, 0.99)),
            ours(|result| result.cpu),
            median(self.postgres.iter().copied()),
            ours(|result| result.batch),
            pgbench(Part::rate),
            pgbench(|part| part.quantile(0, 0.5)),
            pgbench(|part| part.quantile(0, 0.99)),
            foreign * 100.0,
        ]
    }

    fn ratio(&self) -> Ratio {
        let theirs: Vec<f64> = self.pgbench.iter().map(Part::rate).collect();
        let ours: Vec<f64> = self.ours.iter().map(|result| result.call.rate()).collect();
        Ratio::of(&theirs, &ours)
    }
}
