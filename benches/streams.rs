//! The cost of idle event streams: many streams on two nodes without events. Prints the transactions a second that
//! Postgres counts, and the CPU of the node that serves half of them. Fails over the goal.
//!
//! `STREAMS` and `CONVERSATIONS` set their numbers.

#![allow(
    clippy::disallowed_methods,
    reason = "it calls the service from outside, as its clients do"
)]

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, ensure};
use reqwest::Client;
use serde_json::{Value, json};
use sqlx::PgConnection;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

#[allow(dead_code, reason = "other benches seed rows of the tenant")]
mod database;
mod dev;
#[allow(dead_code, reason = "other benches measure in rounds")]
mod figures;
#[allow(dead_code, reason = "other benches measure more")]
mod machine;
#[allow(dead_code, reason = "other benches call a model")]
mod node;
#[allow(dead_code, reason = "other benches call a model")]
mod upstream;

use dev::Dev;
use node::Node;

/// The agent of other benches.
const AGENT: &str = "bench";
/// Transactions a second of both nodes.
const GOAL: f64 = 200.0;
const MEASURE_TIME: Duration = Duration::from_secs(30);
/// The time until the cost of opening the streams no longer counts.
const SETTLE: Duration = Duration::from_secs(10);
/// The number of streams that are opened at once.
const BURST: usize = 200;

fn main() -> anyhow::Result<ExitCode> {
    if cfg!(debug_assertions) {
        println!("Only a release build gives useful figures: cargo bench --bench streams");
        return Ok(ExitCode::SUCCESS);
    }
    let streams = number("STREAMS", 10_000)?;
    let conversations = number("CONVERSATIONS", 2_000)?;
    println!(
        "$ cargo bench --bench streams   # {streams} idle streams of {conversations} conversations on two nodes, \
         {} s",
        MEASURE_TIME.as_secs()
    );
    let dev = Dev::start("streams")?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let outcome = runtime.block_on(measure(&dev, streams, conversations));
    dev.stop()?;
    let met = outcome?;
    Ok(if met {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn number(name: &str, default: usize) -> anyhow::Result<usize> {
    match std::env::var(name) {
        Ok(text) => text.parse().with_context(|| format!("{name} is a number")),
        Err(_) => Ok(default),
    }
}

async fn measure(dev: &Dev, streams: usize, conversations: usize) -> anyhow::Result<bool> {
    let text = |name: &str| dev.ready[name].as_str().context("not ready");
    // `dev` is the other node.
    let node = Node::start(dev, None).await?;
    let first = text("url")?.trim_start_matches("http://").to_owned();
    let addresses = [first, node.address.to_string()];
    raise_limits(dev).await?;
    let paths = make_conversations(dev, conversations).await?;
    let mut superuser = database::superuser(dev).await?;
    let alone = rate(&mut superuser, &node).await?;
    let mut open = JoinSet::new();
    let key = text("api_key")?;
    for number in 0..streams {
        let path = &paths[number % paths.len()];
        let socket = open_stream(&addresses[number % 2], path, key).await?;
        open.spawn(read_on(socket));
        if number % BURST == 0 {
            tokio::task::yield_now().await;
        }
    }
    tokio::time::sleep(SETTLE).await;
    let busy = rate(&mut superuser, &node).await?;
    ensure!(open.try_join_next().is_none(), "a stream has ended");
    println!("\n                 transactions/s   CPU of a node, %");
    println!("no stream        {:>14.1} {:>18.1}", alone.0, alone.1);
    println!("{streams:<6} streams   {:>14.1} {:>18.1}", busy.0, busy.1);
    let met = busy.0 < GOAL;
    let verdict = if met { "goal met" } else { "over the goal" };
    println!("\ngoal: less than {GOAL} transactions a second in all: {verdict}");
    open.shutdown().await;
    Ok(met)
}

/// Transactions a second, and the CPU of one node in percent.
async fn rate(superuser: &mut PgConnection, node: &Node) -> anyhow::Result<(f64, f64)> {
    let before = count(superuser).await?;
    let cpu = machine::cpu_of(node.pid())?;
    tokio::time::sleep(MEASURE_TIME).await;
    let after = count(superuser).await?;
    let used = machine::cpu_of(node.pid())?;
    let seconds = MEASURE_TIME.as_secs_f64();
    let busy = used.saturating_sub(cpu).as_secs_f64() / seconds * 100.0;
    Ok(((after - before) as f64 / seconds, busy))
}

async fn count(superuser: &mut PgConnection) -> anyhow::Result<i64> {
    let sql = "select sum(xact_commit + xact_rollback)::bigint from pg_stat_database";
    Ok(sqlx::query_scalar(sql).fetch_one(superuser).await?)
}

async fn raise_limits(dev: &Dev) -> anyhow::Result<()> {
    let text = |name: &str| dev.ready[name].as_str().context("not ready");
    let url = text("url")?;
    let tenant = text("tenant_id")?;
    let limits = json!({
        "requests_per_minute": 10_000_000, "requests_per_minute_per_key": 10_000_000,
        "open_streams": 1_000_000,
    });
    let request = Client::new()
        .put(format!("{url}/v1/operator/tenants/{tenant}/limits"))
        .bearer_auth(text("operator_key")?)
        .json(&limits);
    request.send().await?.error_for_status()?;
    Ok(())
}

async fn make_conversations(dev: &Dev, count: usize) -> anyhow::Result<Vec<String>> {
    let text = |name: &str| dev.ready[name].as_str().context("not ready");
    let url = format!("{}/v1/sessions", text("url")?);
    let key = text("api_key")?;
    let client = Client::new();
    let mut paths = Vec::with_capacity(count);
    for _ in 0..count {
        let request = client.post(&url).bearer_auth(key).json(&json!({}));
        let made: Value = request.send().await?.error_for_status()?.json().await?;
        let id = made["id"].as_str().context("no id")?;
        paths.push(format!("/v1/sessions/{id}/events"));
    }
    Ok(paths)
}

async fn open_stream(address: &str, path: &str, key: &str) -> anyhow::Result<TcpStream> {
    let mut socket = TcpStream::connect(address).await?;
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {key}\r\nAccept: text/event-stream\r\n\r\n"
    );
    socket.write_all(request.as_bytes()).await?;
    let mut head = [0; 512];
    let read = socket.read(&mut head).await?;
    let head = String::from_utf8_lossy(&head[..read]);
    ensure!(head.starts_with("HTTP/1.1 200"), "a stream: {head}");
    Ok(socket)
}

/// Reads until the stream ends.
async fn read_on(mut socket: TcpStream) {
    let mut piece = [0; 1024];
    while socket.read(&mut piece).await.is_ok_and(|read| read > 0) {}
}
