//! The effect of a noisy tenant on a quiet one on the same node: the quiet one sends at a steady rate,
//! alone and while the other sends twenty times its limit. Fails when the quiet tenant's p99 is more than
//! twice its p99 alone.
//!
//! Requests are sent when they are due, whether or not earlier ones were answered, so that a slow answer
//! hides no delay. Rounds alternate, so that other load of the machine affects both.

#![allow(
    clippy::disallowed_methods,
    reason = "it calls the service from outside, as its clients do"
)]

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use reqwest::{Client, Method};
use serde_json::{Value, json};
use tokio::time::{MissedTickBehavior, interval, sleep_until};
use tokio_util::sync::CancellationToken;

mod dev;

use dev::Dev;

const ROUNDS: usize = 8;
const ROUND: Duration = Duration::from_secs(5);
/// Requests a second.
const QUIET_RATE: u32 = 100;
const NOISY_LIMIT_PER_MINUTE: u32 = 3_000;
const TIMES_THE_LIMIT: u32 = 20;
const NOISY_CONNECTIONS: u32 = 32;
const GOAL: f64 = 2.0;

fn main() -> anyhow::Result<ExitCode> {
    if cfg!(debug_assertions) {
        println!("Only a release build gives useful figures: cargo bench --bench limits");
        return Ok(ExitCode::SUCCESS);
    }
    let noisy_rate = NOISY_LIMIT_PER_MINUTE / 60 * TIMES_THE_LIMIT;
    println!(
        "$ cargo bench --bench limits   # {ROUNDS} rounds of {} s each way; a quiet tenant at {QUIET_RATE}/s, \
         a noisy one at {noisy_rate}/s with a limit of {NOISY_LIMIT_PER_MINUTE}/min\n",
        ROUND.as_secs()
    );
    let dev = Dev::start("limits")?;
    let outcome = measure(&dev, noisy_rate);
    dev.stop()?;
    let Latencies {
        mut alone,
        mut beside,
        noise,
    } = outcome?;
    let alone = report("quiet tenant, alone", &mut alone)?;
    let beside = report("beside the noisy one", &mut beside)?;
    let offered = noise.admitted + noise.refused;
    let seconds = (ROUND * ROUNDS as u32).as_secs();
    println!(
        "\nnoise: {} a second offered, {} admitted, {} refused",
        offered / seconds,
        noise.admitted,
        noise.refused
    );
    ensure!(
        offered * 10 >= u64::from(noisy_rate) * seconds * 9,
        "this machine could not generate the noise: the result is void"
    );
    let ratio = beside / alone;
    let met = ratio <= GOAL;
    let verdict = if met { "goal met" } else { "over the goal" };
    println!("p99 beside / p99 alone: {ratio:.2} (goal: at most {GOAL:.0}) {verdict}");
    Ok(if met {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Prints one line; returns the p99.
fn report(name: &str, latencies: &mut [Duration]) -> anyhow::Result<f64> {
    ensure!(!latencies.is_empty(), "nothing was measured");
    latencies.sort_unstable();
    let at = |share: f64| {
        let index = (latencies.len() as f64 * share) as usize;
        latencies[index.min(latencies.len() - 1)].as_secs_f64() * 1000.0
    };
    let p50 = at(0.5);
    let p99 = at(0.99);
    let worst = at(1.0);
    println!(
        "{name:<22} p50 {p50:>6.2} ms   p99 {p99:>6.2} ms   max {worst:>7.2} ms   ({} requests)",
        latencies.len()
    );
    Ok(p99)
}

struct Latencies {
    alone: Vec<Duration>,
    beside: Vec<Duration>,
    noise: Noise,
}

/// The number of answers to the noisy tenant by result.
#[derive(Default)]
struct Noise {
    admitted: u64,
    refused: u64,
}

/// Two runtimes of one thread each: the noise must not delay the measurement in this process.
fn measure(dev: &Dev, noisy_rate: u32) -> anyhow::Result<Latencies> {
    let runtime = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
    };
    let quiet_runtime = runtime()?;
    let noisy_runtime = runtime()?;
    let operator = Operator::of(dev)?;
    let (quiet, noisy) = quiet_runtime.block_on(operator.two_tenants())?;
    let url = format!("{}/v1/tenant", operator.url);
    let quiet = Target::new(&url, &quiet)?;
    let noisy = Target::new(&url, &noisy)?;
    let mut measured = Latencies {
        alone: Vec::new(),
        beside: Vec::new(),
        noise: Noise::default(),
    };
    quiet_runtime.block_on(quiet.send_steadily())?;
    for _ in 0..ROUNDS {
        let alone = quiet_runtime.block_on(quiet.send_steadily())?;
        measured.alone.extend(alone);
        let stop = CancellationToken::new();
        let beside = std::thread::scope(|scope| {
            let noise = scope.spawn(|| noisy_runtime.block_on(noisy.hammer(noisy_rate, &stop)));
            let beside = quiet_runtime.block_on(quiet.send_steadily());
            stop.cancel();
            let noise = noise.join();
            let noise = noise.map_err(|_| anyhow::anyhow!("the noise ended badly"))??;
            measured.noise.admitted += noise.admitted;
            measured.noise.refused += noise.refused;
            beside
        })?;
        measured.beside.extend(beside);
    }
    Ok(measured)
}

struct Operator {
    client: Client,
    url: String,
    key: String,
}

impl Operator {
    fn of(dev: &Dev) -> anyhow::Result<Self> {
        let text = |name: &str| dev.ready[name].as_str().map(str::to_owned);
        Ok(Self {
            client: Client::new(),
            url: text("url").context("no url")?,
            key: text("operator_key").context("no operator key")?,
        })
    }

    async fn call(&self, method: Method, path: &str, body: Value) -> anyhow::Result<Value> {
        let request = self.client.request(method, format!("{}{path}", self.url));
        let response = request.bearer_auth(&self.key).json(&body).send().await?;
        Ok(response.error_for_status()?.json().await?)
    }

    /// The API keys of a quiet and a noisy tenant.
    async fn two_tenants(&self) -> anyhow::Result<(String, String)> {
        let generous =
            json!({"requests_per_minute": 100_000, "requests_per_minute_per_key": 100_000});
        let tight = json!({"requests_per_minute": NOISY_LIMIT_PER_MINUTE});
        Ok((
            self.tenant("quiet", generous).await?,
            self.tenant("noisy", tight).await?,
        ))
    }

    async fn tenant(&self, name: &str, limits: Value) -> anyhow::Result<String> {
        let created = self
            .call(Method::POST, "/v1/tenants", json!({ "name": name }))
            .await?;
        let id = created["id"].as_str().context("no id")?;
        let path = format!("/v1/operator/tenants/{id}/limits");
        self.call(Method::PUT, &path, limits).await?;
        Ok(created["api_key"].as_str().context("no key")?.to_owned())
    }
}

/// The request of one tenant.
struct Target {
    client: Client,
    request: reqwest::Request,
}

impl Target {
    fn new(url: &str, key: &str) -> anyhow::Result<Self> {
        let client = Client::new();
        let request = client.get(url).bearer_auth(key).build()?;
        Ok(Self { client, request })
    }

    async fn send(&self) -> anyhow::Result<u16> {
        let request = self.request.try_clone().context("a GET has no body")?;
        let response = self.client.execute(request).await?;
        let status = response.status().as_u16();
        response.bytes().await?;
        Ok(status)
    }

    /// Sends requests for one round; returns the latency of each, from the time it is sent: the timer has
    /// a resolution of a millisecond, which would improve every ratio.
    async fn send_steadily(&self) -> anyhow::Result<Vec<Duration>> {
        let count = QUIET_RATE * ROUND.as_secs() as u32;
        let began = Instant::now();
        let requests = (0..count).map(async |n| {
            let due = began + ROUND * n / count;
            sleep_until(due.into()).await;
            let sent = Instant::now();
            let status = self.send().await?;
            ensure!(status == 200, "the quiet tenant was answered {status}");
            Ok(sent.elapsed())
        });
        futures_util::future::try_join_all(requests).await
    }

    /// Sends requests at `rate` until `stop`, on several connections.
    async fn hammer(&self, rate: u32, stop: &CancellationToken) -> anyhow::Result<Noise> {
        let counts = Arc::new((AtomicU64::new(0), AtomicU64::new(0)));
        let connections = (0..NOISY_CONNECTIONS).map(async |n| {
            let period = Duration::from_secs(1) * NOISY_CONNECTIONS / rate;
            tokio::time::sleep(period * n / NOISY_CONNECTIONS).await;
            let mut due = interval(period);
            // Missed ticks are made up for, so that the rate stays constant.
            due.set_missed_tick_behavior(MissedTickBehavior::Burst);
            while !stop.is_cancelled() {
                due.tick().await;
                match self.send().await? {
                    200 => counts.0.fetch_add(1, Ordering::Relaxed),
                    429 => counts.1.fetch_add(1, Ordering::Relaxed),
                    status => anyhow::bail!("the noisy tenant was answered {status}"),
                };
            }
            Ok(())
        });
        futures_util::future::try_join_all(connections).await?;
        Ok(Noise {
            admitted: counts.0.load(Ordering::Relaxed),
            refused: counts.1.load(Ordering::Relaxed),
        })
    }
}
