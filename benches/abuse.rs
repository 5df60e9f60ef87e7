//! The effect of a hostile tenant on a node and on another tenant: many bodies of the most expensive JSON by one
//! user token, requests that wait for one row, stateless calls to a silent model, and a burst of first contacts. Prints
//! the node's memory at its peak and a minute later, and the p99 of the quiet tenant during the attack and alone. Fails
//! over a goal.
//!
//! `ATTACKS` limits their number. Requests of the quiet tenant are sent when they are due, whether or not earlier ones
//! were answered.

#![allow(
    clippy::disallowed_methods,
    reason = "it calls the service from outside, as its clients do"
)]

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, ensure};
use bytes::Bytes;
use futures_util::future::join_all;
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use reqwest::{Client, Method};
use serde_json::{Value, json};
use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;
use tokio::time::sleep_until;
use tokio_util::sync::CancellationToken;

mod dev;
#[allow(dead_code, reason = "other benches measure times")]
mod figures;
#[allow(dead_code, reason = "other benches measure the processor")]
mod machine;
#[allow(dead_code, reason = "other benches call a model of their own")]
mod node;
#[allow(dead_code, reason = "other benches call a model of their own")]
mod upstream;

use dev::Dev;
use machine::Memory;
use node::Node;

const AGENT: &str = "silent";
const SECRET: &str = "a secret of the people of a bench, 32 bytes";
const ISSUER: &str = "https://people.example";
/// Requests a second of the quiet tenant.
const QUIET_RATE: u32 = 100;
const ROUND: Duration = Duration::from_secs(6);
const ROUNDS: usize = 3;
const BODIES: usize = 40;
const BODY_BYTES: usize = 2_000_000;
/// The time between an attack and the next measurement of memory.
const IDLE_TIME: Duration = Duration::from_secs(60);
const GOAL_PEAK: f64 = 300.0;
const GOAL_AFTER: f64 = 80.0;
const GOAL_P99: f64 = 3.0;

fn main() -> anyhow::Result<ExitCode> {
    if std::env::args().nth(1).as_deref() == Some(upstream::ARGUMENT) {
        upstream::serve()?;
        return Ok(ExitCode::SUCCESS);
    }
    if cfg!(debug_assertions) {
        println!("Only a release build gives useful figures: cargo bench --bench abuse");
        return Ok(ExitCode::SUCCESS);
    }
    println!(
        "$ cargo bench --bench abuse   # {ROUNDS} rounds of {} s each way; a quiet tenant at {QUIET_RATE}/s",
        ROUND.as_secs()
    );
    let dev = Dev::start("abuse")?;
    let outcome = measure(&dev);
    dev.stop()?;
    Ok(if outcome? {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// An attack of the noisy tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Attack {
    /// Bodies that exceed the memory limit of a body.
    TooManyObjects,
    /// Bodies just below that limit.
    ManyObjects,
    OneRow,
    SilentModel,
    FirstContacts,
}

impl Attack {
    const ALL: [Self; 5] = [
        Self::TooManyObjects,
        Self::ManyObjects,
        Self::OneRow,
        Self::SilentModel,
        Self::FirstContacts,
    ];

    /// Whether it attacks memory: the node must return to its normal size after it.
    fn attacks_memory(self) -> bool {
        matches!(self, Self::TooManyObjects | Self::ManyObjects)
    }

    fn name(self) -> &'static str {
        match self {
            Self::TooManyObjects => "40 x 2 MB of 249,000 objects",
            Self::ManyObjects => "40 x 2 MB of 120,000 objects",
            Self::OneRow => "33 requests on one row",
            Self::SilentModel => "2,000 calls to a silent model",
            Self::FirstContacts => "48 first contacts at once",
        }
    }
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
}

fn measure(dev: &Dev) -> anyhow::Result<bool> {
    let quiet_runtime = runtime()?;
    let noisy_runtime = runtime()?;
    let node = quiet_runtime.block_on(Node::start(dev, None))?;
    let scene = noisy_runtime.block_on(Scene::new(dev, &node))?;
    quiet_runtime.block_on(scene.quiet.send_steadily())?;
    let idle = Memory::of(node.pid())?.pss;
    println!("\nthe idle node: {idle:.0} MB PSS\n");
    println!(
        "{:<30} {:>10} {:>10} {:>7} {:>9} {:>9}   answers to the noisy tenant",
        "attack", "p99 alone", "beside", "ratio", "peak MB", "after MB"
    );
    let mut met = true;
    let count = match std::env::var("ATTACKS") {
        Ok(text) => text.parse().context("ATTACKS is a number")?,
        Err(_) => Attack::ALL.len(),
    };
    for attack in Attack::ALL.into_iter().take(count) {
        let mut alone = Vec::new();
        let mut beside = Vec::new();
        let answers = Answers::default();
        let peak = Peak::watch(node.pid());
        for _ in 0..ROUNDS {
            alone.extend(quiet_runtime.block_on(scene.quiet.send_steadily())?);
            let stop = CancellationToken::new();
            let round = std::thread::scope(|scope| {
                let noise =
                    scope.spawn(|| noisy_runtime.block_on(scene.attack(attack, &answers, &stop)));
                let round = quiet_runtime.block_on(scene.quiet.send_steadily());
                stop.cancel();
                let noise = noise.join();
                noise.map_err(|_| anyhow::anyhow!("the noise ended badly"))?;
                round
            })?;
            beside.extend(round);
        }
        let peak = peak.end();
        std::thread::sleep(IDLE_TIME);
        let after = Memory::of(node.pid())?.pss;
        let alone = p99(&mut alone);
        let beside = p99(&mut beside);
        let ratio = beside / alone;
        met &= ratio <= GOAL_P99 && peak <= GOAL_PEAK;
        met &= after <= GOAL_AFTER || !attack.attacks_memory();
        println!(
            "{:<30} {alone:>7.2} ms {beside:>7.2} ms {ratio:>7.2} {peak:>9.0} {after:>9.0}   {}",
            attack.name(),
            answers.text()
        );
    }
    let verdict = if met { "met" } else { "missed" };
    println!(
        "\ngoals: p99 at most {GOAL_P99:.0} times its own, memory at most {GOAL_PEAK:.0} MB at its peak and \
         {GOAL_AFTER:.0} MB a minute later: {verdict}"
    );
    Ok(met)
}

fn p99(times: &mut [Duration]) -> f64 {
    times.sort_unstable();
    let index = times.len() * 99 / 100;
    times[index.min(times.len() - 1)].as_secs_f64() * 1000.0
}

/// The peak memory of a process during the measurement.
struct Peak {
    ended: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<f64>,
}

impl Peak {
    fn watch(pid: u32) -> Self {
        let ended = Arc::new(AtomicBool::new(false));
        let is_ended = ended.clone();
        let thread = std::thread::spawn(move || {
            let mut peak: f64 = 0.0;
            while !is_ended.load(Ordering::Relaxed) {
                peak = Memory::of(pid).map_or(peak, |memory| peak.max(memory.pss));
                std::thread::sleep(Duration::from_millis(20));
            }
            peak
        });
        Self { ended, thread }
    }

    fn end(self) -> f64 {
        self.ended.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or(f64::INFINITY)
    }
}

/// The number of answers to the noisy tenant by status; 0 is no answer.
#[derive(Default)]
struct Answers(Mutex<BTreeMap<u16, u64>>);

impl Answers {
    fn count(&self, status: u16) {
        if let Ok(mut counts) = self.0.lock() {
            *counts.entry(status).or_default() += 1;
        }
    }

    fn text(&self) -> String {
        let counts = self.0.lock().map(|counts| counts.clone());
        let counts = counts.unwrap_or_default();
        let each = counts
            .iter()
            .map(|(status, count)| format!("{status}: {count}"));
        each.collect::<Vec<_>>().join("  ")
    }
}

struct Scene {
    client: Client,
    url: String,
    quiet: Quiet,
    noisy_key: String,
    token: String,
    bodies: [Bytes; 2],
    links: Bytes,
}

impl Scene {
    async fn new(dev: &Dev, node: &Node) -> anyhow::Result<Self> {
        let text = |name: &str| dev.ready[name].as_str().map(str::to_owned);
        let operator = text("operator_key").context("no operator key")?;
        let url = format!("http://{}", node.address);
        let client = Client::builder()
            .timeout(Duration::from_secs(30))
            // The node closes them after five seconds.
            .pool_idle_timeout(Duration::from_secs(3))
            .build()?;
        let call = async |method: Method, path: &str, key: &str, body: Value| {
            let request = client.request(method, format!("{url}{path}"));
            let answer = request.bearer_auth(key).json(&body).send().await?;
            anyhow::Ok(answer.error_for_status()?.json::<Value>().await?)
        };
        let mut keys = Vec::new();
        for name in ["quiet", "noisy"] {
            let body = json!({ "name": name });
            let created = call(Method::POST, "/v1/tenants", &operator, body).await?;
            let text_of = |member: &str| created[member].as_str().unwrap_or_default().to_owned();
            keys.push((text_of("id"), text_of("api_key")));
        }
        let [(_, quiet_key), (noisy_id, noisy_key)] = &keys[..] else {
            anyhow::bail!("two tenants were created");
        };
        let issuer =
            json!({"issuer": ISSUER, "platform": "web", "algorithm": "HS256", "secret": SECRET});
        call(Method::PUT, "/v1/issuers/people", noisy_key, issuer).await?;
        let model = json!({"kind": "openai", "base_url": silent_model().await?, "model": "silent"});
        let agent = json!({ "upstream": model });
        call(
            Method::PUT,
            &format!("/v1/agents/{AGENT}"),
            noisy_key,
            agent,
        )
        .await?;
        Ok(Self {
            quiet: Quiet::new(&url, quiet_key)?,
            noisy_key: noisy_key.clone(),
            token: token(noisy_id)?,
            bodies: [worst_body(249_000), worst_body(120_000)],
            links: links(3000),
            client,
            url,
        })
    }

    async fn send(&self, method: Method, path: &str, key: &str, body: Bytes, answers: &Answers) {
        let request = self.client.request(method, format!("{}{path}", self.url));
        let request = request
            .bearer_auth(key)
            .header("content-type", "application/json");
        let status = match request.body(body).send().await {
            Ok(answer) => {
                let status = answer.status().as_u16();
                if answer.bytes().await.is_ok() {
                    status
                } else {
                    0
                }
            }
            Err(_) => 0,
        };
        answers.count(status);
    }

    /// Repeats an attack until `stop`.
    async fn attack(&self, attack: Attack, answers: &Answers, stop: &CancellationToken) {
        while !stop.is_cancelled() {
            let began = Instant::now();
            match attack {
                Attack::TooManyObjects => self.bodies(0, answers).await,
                Attack::ManyObjects => self.bodies(1, answers).await,
                Attack::OneRow => self.one_row(answers).await,
                Attack::SilentModel => {
                    // The calls wait for the model until the end of the round.
                    let _over = stop.run_until_cancelled(self.silent_calls(answers)).await;
                }
                Attack::FirstContacts => self.first_contacts(answers).await,
            }
            // One burst a second at most: limits handle more of them.
            let next = began + Duration::from_secs(1);
            let _over = stop.run_until_cancelled(sleep_until(next.into())).await;
        }
    }

    async fn bodies(&self, which: usize, answers: &Answers) {
        let path = "/v1/chat/completions";
        let body = || self.bodies[which].clone();
        let send = || self.send(Method::POST, path, &self.token, body(), answers);
        join_all((0..BODIES).map(|_| send())).await;
    }

    async fn one_row(&self, answers: &Answers) {
        let key = json!({"name": "k", "scopes": ["bridge"], "platforms": ["telegram"]}).to_string();
        let key = Bytes::from(key);
        let links = self.links.clone();
        let path = "/v1/identity-links";
        let import = self.send(Method::PUT, path, &self.noisy_key, links, answers);
        let make = || {
            self.send(
                Method::POST,
                "/v1/api-keys",
                &self.noisy_key,
                key.clone(),
                answers,
            )
        };
        let keys = join_all((0..32).map(|_| make()));
        futures_util::future::join(import, keys).await;
    }

    async fn silent_calls(&self, answers: &Answers) {
        let body = json!({"model": AGENT, "messages": [{"role": "user", "content": "hi"}]});
        let body = Bytes::from(body.to_string());
        let path = "/v1/chat/completions";
        let send = || self.send(Method::POST, path, &self.noisy_key, body.clone(), answers);
        join_all((0..2000).map(|_| send())).await;
    }

    async fn first_contacts(&self, answers: &Answers) {
        let send = |n: u128| {
            let identity = format!("telegram:{}", nonce() + n);
            let body = json!({"identity": identity, "text": "hello", "agent": "main"});
            let body = Bytes::from(body.to_string());
            self.send(Method::POST, "/v1/inbound", &self.noisy_key, body, answers)
        };
        join_all((0..48).map(send)).await;
    }
}

fn nonce() -> u128 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_nanos())
}

fn token(tenant: &str) -> anyhow::Result<String> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let claims = json!({"iss": ISSUER, "aud": tenant, "sub": "mallory", "exp": now + 3600});
    let key = EncodingKey::from_secret(SECRET.as_bytes());
    Ok(jsonwebtoken::encode(
        &Header::new(Algorithm::HS256),
        &claims,
        &key,
    )?)
}

/// A stateless request of about 2 MB with this number of objects.
fn worst_body(objects: usize) -> Bytes {
    let list = r#"{"a":0},"#.repeat(objects);
    let head =
        r#"{"model":"main","store":false,"messages":[{"role":"user","content":"hi"}],"metadata":["#;
    let padding = BODY_BYTES.saturating_sub(head.len() + list.len() + 20);
    Bytes::from(format!(
        "{head}{list}0],\"x\":\"{}\"}}",
        "x".repeat(padding)
    ))
}

fn links(users: usize) -> Bytes {
    let links: serde_json::Map<String, Value> = (0..users)
        .map(|n| {
            (
                format!("p{n}"),
                json!([format!("feishu:{n}"), format!("wecom:{n}")]),
            )
        })
        .collect();
    Bytes::from(json!({"session": {"identityLinks": links}}).to_string())
}

async fn stay_silent(listener: std::net::TcpListener) -> std::io::Result<()> {
    let listener = TcpListener::from_std(listener)?;
    loop {
        let (mut stream, _) = listener.accept().await?;
        tokio::spawn(async move {
            let mut read = [0; 1024];
            while stream.read(&mut read).await.is_ok_and(|count| count > 0) {}
        });
    }
}

/// Starts a server that accepts requests and never answers; returns its URL.
async fn silent_model() -> anyhow::Result<String> {
    let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    listener.set_nonblocking(true)?;
    // On a thread of its own: the runtime of the attacks does not run all the time.
    std::thread::spawn(move || runtime()?.block_on(stay_silent(listener)));
    Ok(format!("http://{address}/v1"))
}

/// The well-behaved tenant.
struct Quiet {
    client: Client,
    request: reqwest::Request,
}

impl Quiet {
    fn new(url: &str, key: &str) -> anyhow::Result<Self> {
        let idle = Duration::from_secs(3);
        let client = Client::builder().pool_idle_timeout(idle).build()?;
        let request = client
            .get(format!("{url}/v1/agents"))
            .bearer_auth(key)
            .build()?;
        Ok(Self { client, request })
    }

    /// Sends requests for one round; returns the latency of each.
    async fn send_steadily(&self) -> anyhow::Result<Vec<Duration>> {
        let count = QUIET_RATE * ROUND.as_secs() as u32;
        let began = Instant::now();
        let requests = (0..count).map(async |n| {
            sleep_until((began + ROUND * n / count).into()).await;
            let sent = Instant::now();
            let request = self.request.try_clone().context("a GET has no body")?;
            let answer = self.client.execute(request).await?;
            let status = answer.status().as_u16();
            answer.bytes().await?;
            ensure!(status == 200, "the quiet tenant was answered {status}");
            Ok(sent.elapsed())
        });
        futures_util::future::try_join_all(requests).await
    }
}
