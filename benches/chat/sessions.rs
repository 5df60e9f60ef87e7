//! Streamed turns in sessions, beside direct calls of the model with the same messages, and beside pgbench
//! with the statements of a turn.

use std::sync::Arc;

use anyhow::ensure;
use serde_json::{Value, json};

use crate::client::{Load, Requests, RoundResult, post};
use crate::dev::Dev;
use crate::figures::{Part, Ratio};
use crate::machine::Machine;
use crate::node::Node;
use crate::pgbench::Pgbench;
use crate::plan::Plan;
use crate::script;
use crate::seed::{Seed, Sessions, TEXT};
use crate::table::{Table, check, median};
use crate::upstream::Upstream;
use crate::{AGENT, CLIENTS};

/// pgbench's turns a second to ours: 60 % of pgbench.
const RATE_GOAL: f64 = 1.67;
/// Milliseconds to the first token in addition to the direct call and a commit, for one client.
const FIRST_GOAL: f64 = 2.0;
const GOAL_CLIENTS: u32 = 1;
const WARM_UPS: usize = 2;
const COLUMNS: [&str; 12] = [
    "ours/s",
    "p50",
    "p99",
    "first p50",
    "p99",
    "direct first p50",
    "p99",
    "CPU us",
    "Postgres us",
    "pgbench/s",
    "p50",
    "foreign %",
];

/// Returns whether every goal was met.
pub async fn measure(
    plan: &Plan,
    dev: &Dev,
    node: &Node,
    upstream: &Upstream,
) -> anyhow::Result<bool> {
    let mut seed = Seed::new(dev).await?;
    let all = session_sizes(plan);
    seed.plant(&all).await?;
    let pgbench = Pgbench::new(dev)?;
    let bench = SessionBench {
        plan,
        node,
        upstream,
        pgbench,
    };
    let mut met = true;
    for sessions in all {
        let table = Table::begin(format!("sessions of {}", sessions.messages), &COLUMNS);
        for clients in CLIENTS {
            let before = Machine::now()?;
            let figures = bench.run(sessions, clients).await?;
            let foreign = Machine::now()?.foreign_since(&before)?;
            table.row(clients, &figures.row(foreign));
            met &= figures.check(clients);
        }
        let now = seed.mean_length(sessions).await?;
        println!("  afterwards they have {now:.0} messages");
    }
    let turns = seed.turns(script::PRINCIPAL).await?;
    println!(
        "\n  {} turns of ours, each in {:.2} commits of its own (the one that accepts it among them)",
        turns.of_service, turns.writes
    );
    seed.close().await?;
    Ok(met)
}

fn session_sizes(plan: &Plan) -> [Sessions; 3] {
    let counts = if plan.short {
        [640, 128, 64]
    } else {
        [64_000, 9_600, 640]
    };
    let [few, some, many] = counts;
    [(10, few), (100, some), (1_000, many)].map(|(messages, count)| Sessions { messages, count })
}

/// The results of each round.
#[derive(Default)]
struct Figures {
    direct: Vec<RoundResult>,
    ours: Vec<RoundResult>,
    /// Microseconds of Postgres for a turn of ours.
    postgres: Vec<f64>,
    pgbench: Vec<Part>,
    commit: Vec<Part>,
}

#[derive(Clone, Copy)]
enum Side {
    Direct,
    Ours,
    Pgbench,
    Commit,
}

struct SessionBench<'a> {
    plan: &'a Plan,
    node: &'a Node,
    upstream: &'a Upstream,
    pgbench: Pgbench,
}

impl SessionBench<'_> {
    async fn run(&self, sessions: Sessions, clients: u32) -> anyhow::Result<Figures> {
        ensure!(
            sessions.count.is_multiple_of(u64::from(clients)),
            "a client has too few sessions"
        );
        let direct = self.load(
            clients,
            self.upstream.address,
            self.upstream.pid(),
            direct(sessions),
        );
        let requests = in_session(&self.node.key, sessions, clients);
        let ours = self.load(clients, self.node.address, self.node.pid(), requests);
        let turn = [script::turn(&self.pgbench, sessions, clients)?];
        let commit = [script::commit(&self.pgbench, sessions, clients)];
        // Until its connections to Postgres have prepared their statements.
        for _ in 0..WARM_UPS {
            ours.run().await?;
        }
        let mut figures = Figures::default();
        let mut sides = [Side::Direct, Side::Ours, Side::Pgbench, Side::Commit];
        for _ in 0..self.plan.rounds {
            for side in sides {
                match side {
                    Side::Direct => figures.direct.push(direct.run().await?),
                    Side::Ours => {
                        let before = Machine::now()?;
                        let result = ours.run().await?;
                        let used = Machine::now()?.postgres_since(&before);
                        figures
                            .postgres
                            .push(used.as_secs_f64() * 1e6 / result.done as f64);
                        figures.ours.push(result);
                    }
                    Side::Pgbench => {
                        let times = self.plan.times;
                        figures
                            .pgbench
                            .push(self.pgbench.run(&turn, clients, times)?);
                    }
                    // Only the goal uses it.
                    Side::Commit if clients != GOAL_CLIENTS => {}
                    Side::Commit => {
                        let times = self.plan.times;
                        figures
                            .commit
                            .push(self.pgbench.run(&commit, clients, times)?);
                    }
                }
            }
            sides.reverse();
        }
        Ok(figures)
    }

    fn load(
        &self,
        clients: u32,
        address: std::net::SocketAddr,
        pid: u32,
        requests: Requests,
    ) -> Load {
        Load {
            address,
            requests,
            clients,
            times: self.plan.times,
            pid,
        }
    }
}

/// The request of a client without a session: with the whole history.
fn direct(sessions: Sessions) -> Requests {
    let message = |index: u64| json!({"role": if index.is_multiple_of(2) { "user" } else { "assistant" }, "content": TEXT});
    let messages: Vec<Value> = (0..=sessions.messages).map(message).collect();
    let body = json!({"model": AGENT, "stream": true, "messages": messages});
    let request = post("none", None, &body.to_string());
    Arc::new(move |_, _| request.clone())
}

fn in_session(key: &str, sessions: Sessions, clients: u32) -> Requests {
    let body = json!({
        "model": AGENT, "stream": true, "messages": [{"role": "user", "content": TEXT}],
    });
    let body = body.to_string();
    let key = key.to_owned();
    Arc::new(move |client, random| {
        let id = sessions.choose(client, clients.into(), random);
        post(&key, Some(&id.to_string()), &body)
    })
}

impl Figures {
    fn row(&self, foreign: f64) -> [f64; 12] {
        let ours = |figure: fn(&RoundResult) -> f64| median(self.ours.iter().map(figure));
        let direct = |figure: fn(&RoundResult) -> f64| median(self.direct.iter().map(figure));
        let pgbench = |figure: fn(&Part) -> f64| median(self.pgbench.iter().map(figure));
        [
            ours(|result| result.whole.rate()),
            ours(|result| result.whole.quantile(0, 0.5)),
            ours(|result| result.whole.quantile(0, 0.99)),
            ours(|result| result.first.quantile(0, 0.5)),
            ours(|result| result.first.quantile(0, 0.99)),
            direct(|result| result.first.quantile(0, 0.5)),
            direct(|result| result.first.quantile(0, 0.99)),
            ours(|result| result.cpu),
            median(self.postgres.iter().copied()),
            pgbench(Part::rate),
            pgbench(|part| part.quantile(0, 0.5)),
            foreign * 100.0,
        ]
    }

    fn check(&self, clients: u32) -> bool {
        let theirs: Vec<f64> = self.pgbench.iter().map(Part::rate).collect();
        let ours: Vec<f64> = self.ours.iter().map(|result| result.whole.rate()).collect();
        let ratio = Ratio::of(&theirs, &ours);
        let mut met = ratio.check("  pgbench / ours", RATE_GOAL);
        if clients == GOAL_CLIENTS {
            let first = |result: &RoundResult| result.first.quantile(0, 0.5);
            let commit = |part: &Part| part.quantile(0, 0.5);
            println!(
                "    a commit: {:.3} ms",
                median(self.commit.iter().map(commit))
            );
            let rounds = self.ours.iter().zip(&self.direct).zip(&self.commit);
            let over =
                rounds.map(|((ours, direct), one)| first(ours) - first(direct) - commit(one));
            let name = "  first token over the direct call and a commit, ms";
            met &= check(name, median(over), FIRST_GOAL);
        }
        met
    }
}
