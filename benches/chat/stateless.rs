//! Chat without a session, beside direct calls of its model.

use std::sync::Arc;

use serde_json::json;

use crate::client::{Load, Requests, RoundResult, post};
use crate::figures::Part;
use crate::machine::Machine;
use crate::node::Node;
use crate::plan::Plan;
use crate::seed::TEXT;
use crate::table::{Table, check, median};
use crate::upstream::Upstream;
use crate::{AGENT, CLIENTS};

/// CPU microseconds of the node for a request that is not streamed, with `GOAL_CLIENTS` clients.
const CPU_GOAL: f64 = 80.0;
const GOAL_CLIENTS: u32 = 16;
const COLUMNS: [&str; 11] = [
    "direct/s",
    "p50",
    "p99",
    "CPU us",
    "ours/s",
    "p50",
    "p99",
    "added p50",
    "p99",
    "CPU us",
    "foreign %",
];

/// Returns whether the goal was met.
pub async fn measure(plan: &Plan, node: &Node, upstream: &Upstream) -> anyhow::Result<bool> {
    let mut met = true;
    for stream in [false, true] {
        let how = if stream { "streamed" } else { "whole" };
        let table = Table::begin(format!("stateless, {how}"), &COLUMNS);
        for clients in CLIENTS {
            let before = Machine::now()?;
            let figures = run(plan, node, upstream, stream, clients).await?;
            let foreign = Machine::now()?.foreign_since(&before)?;
            table.row(clients, &row(&figures, foreign));
            if stream {
                print_first(&figures);
            }
            if !stream && clients == GOAL_CLIENTS {
                let (cpu, direct) = figures.cpu();
                println!("    CPU: {:.1} times the model's", cpu / direct);
                met &= check("  CPU of our process, us a request", cpu, CPU_GOAL);
            }
        }
    }
    Ok(met)
}

/// The results of each round.
struct Figures {
    direct: Vec<RoundResult>,
    ours: Vec<RoundResult>,
}

impl Figures {
    /// The CPU of the node's process, and of the model's in direct calls.
    fn cpu(&self) -> (f64, f64) {
        let of = |results: &[RoundResult]| median(results.iter().map(|result| result.cpu));
        (of(&self.ours), of(&self.direct))
    }

    /// The figure that the node adds to the direct call, as the median of the rounds.
    fn added(&self, figure: impl Fn(&RoundResult) -> f64) -> f64 {
        let rounds = self.ours.iter().zip(&self.direct);
        median(rounds.map(|(ours, direct)| figure(ours) - figure(direct)))
    }
}

async fn run(
    plan: &Plan,
    node: &Node,
    upstream: &Upstream,
    stream: bool,
    clients: u32,
) -> anyhow::Result<Figures> {
    let body = json!({
        "model": AGENT, "stream": stream, "messages": [{"role": "user", "content": TEXT}],
    });
    let request = post(&node.key, None, &body.to_string());
    let requests: Requests = Arc::new(move |_, _| request.clone());
    let load = |address, pid| Load {
        address,
        requests: requests.clone(),
        clients,
        times: plan.times,
        pid,
    };
    let direct = load(upstream.address, upstream.pid());
    let ours = load(node.address, node.pid());
    let mut figures = Figures {
        direct: Vec::new(),
        ours: Vec::new(),
    };
    for round in 0..plan.rounds {
        if round % 2 == 0 {
            figures.direct.push(direct.run().await?);
            figures.ours.push(ours.run().await?);
        } else {
            figures.ours.push(ours.run().await?);
            figures.direct.push(direct.run().await?);
        }
    }
    Ok(figures)
}

fn row(figures: &Figures, foreign: f64) -> [f64; 11] {
    let direct = |figure: fn(&Part) -> f64| {
        median(figures.direct.iter().map(|result| figure(&result.whole)))
    };
    let ours =
        |figure: fn(&Part) -> f64| median(figures.ours.iter().map(|result| figure(&result.whole)));
    let (cpu, direct_cpu) = figures.cpu();
    [
        direct(Part::rate),
        direct(|part| part.quantile(0, 0.5)),
        direct(|part| part.quantile(0, 0.99)),
        direct_cpu,
        ours(Part::rate),
        ours(|part| part.quantile(0, 0.5)),
        ours(|part| part.quantile(0, 0.99)),
        figures.added(|result| result.whole.quantile(0, 0.5)),
        figures.added(|result| result.whole.quantile(0, 0.99)),
        cpu,
        foreign * 100.0,
    ]
}

fn print_first(figures: &Figures) {
    let of = |result: &[RoundResult], share| {
        median(result.iter().map(|result| result.first.quantile(0, share)))
    };
    println!(
        "    first token: direct {:.3} / {:.3}, ours {:.3} / {:.3}, added {:.3} / {:.3}",
        of(&figures.direct, 0.5),
        of(&figures.direct, 0.99),
        of(&figures.ours, 0.5),
        of(&figures.ours, 0.99),
        figures.added(|result| result.first.quantile(0, 0.5)),
        figures.added(|result| result.first.quantile(0, 0.99)),
    );
}
