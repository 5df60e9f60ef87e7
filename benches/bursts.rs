//! Bursts: forty messages at once on two nodes, of a new user, after a minute of silence, through two linked
//! identities, in a DM and a group, and chat with a new user token. Prints the time until a message's answer, beside
//! a burst to an existing idle conversation. Fails over the goal, or if a message is refused.
//!
//! `ROUNDS` sets the number of each. Rounds alternate, so that other load of the machine affects all of them.

#![allow(
    clippy::disallowed_methods,
    reason = "it calls the service from outside, as its clients do"
)]

use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, ensure};
use futures_util::future::try_join_all;
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use reqwest::Client;
use serde_json::{Value, json};

#[allow(dead_code, reason = "other benches seed rows of the tenant")]
mod database;
mod dev;
#[allow(dead_code, reason = "other benches need the process")]
mod node;
#[allow(dead_code, reason = "other benches measure the model too")]
mod upstream;

use dev::Dev;
use node::Node;
use upstream::Upstream;

/// The agent of the bench.
const AGENT: &str = "bench";
const BURST: usize = 40;
/// The p99 of a burst, relative to a burst to an idle conversation.
const GOAL: f64 = 5.0;
const SECRET: &str = "a secret of the people of a bench, 32 bytes";
const ISSUER: &str = "https://people.example";

fn main() -> anyhow::Result<ExitCode> {
    if std::env::args().nth(1).as_deref() == Some(upstream::ARGUMENT) {
        upstream::serve()?;
        return Ok(ExitCode::SUCCESS);
    }
    if cfg!(debug_assertions) {
        println!("Only a release build gives useful figures: cargo bench --bench bursts");
        return Ok(ExitCode::SUCCESS);
    }
    let rounds = match std::env::var("ROUNDS") {
        Ok(text) => text.parse().context("ROUNDS is a number")?,
        Err(_) => 20,
    };
    println!(
        "$ cargo bench --bench bursts   # {BURST} messages at once on two nodes, {rounds} times; ms"
    );
    let dev = Dev::start("bursts")?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let outcome = runtime.block_on(measure(&dev, rounds));
    dev.stop()?;
    Ok(if outcome? {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The kind of a burst.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Case {
    Idle,
    New,
    Silence,
    Linked,
    DmAndGroup,
    IdleChat,
    NewToken,
}

impl Case {
    const ALL: [Self; 7] = [
        Self::Idle,
        Self::New,
        Self::Silence,
        Self::Linked,
        Self::DmAndGroup,
        Self::IdleChat,
        Self::NewToken,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Idle => "an idle conversation",
            Self::New => "a new user",
            Self::Silence => "after a minute's silence",
            Self::Linked => "two linked identities",
            Self::DmAndGroup => "a DM and a group at once",
            Self::IdleChat => "chat, an idle conversation",
            Self::NewToken => "chat, a new user token",
        }
    }

    /// The burst that it is compared with.
    fn base(self) -> Self {
        match self {
            Self::Idle | Self::New | Self::Silence | Self::Linked | Self::DmAndGroup => Self::Idle,
            Self::IdleChat | Self::NewToken => Self::IdleChat,
        }
    }
}

async fn measure(dev: &Dev, rounds: usize) -> anyhow::Result<bool> {
    let upstream = Upstream::start()?;
    let node = Node::start(dev, None).await?;
    node.make_agent(dev, &upstream).await?;
    let service = Service::new(dev, &node).await?;
    let mut latencies: Vec<Vec<Duration>> = vec![Vec::new(); Case::ALL.len()];
    // The first round opens connections, and is not counted.
    for round in 0..=rounds {
        for (index, case) in Case::ALL.into_iter().enumerate() {
            let took = service.burst(case, round).await?;
            if round > 0 {
                latencies[index].extend(took);
            }
        }
    }
    let p99 = |case: Case| {
        let index = Case::ALL.iter().position(|one| *one == case).unwrap_or(0);
        quantile(&latencies[index], 0.99)
    };
    println!(
        "\n{:<28} {:>8} {:>8} {:>8}",
        "a burst of", "p50", "p99", "ratio"
    );
    let mut met = true;
    for (index, case) in Case::ALL.into_iter().enumerate() {
        let ratio = p99(case) / p99(case.base());
        met &= ratio <= GOAL;
        let median = quantile(&latencies[index], 0.5);
        println!(
            "{:<28} {median:>8.1} {:>8.1} {ratio:>8.2}",
            case.name(),
            p99(case)
        );
    }
    let verdict = if met { "goal met" } else { "over the goal" };
    println!("\ngoal: a p99 of at most {GOAL} times that of an idle conversation: {verdict}");
    node.stop()?;
    Ok(met)
}

fn quantile(latencies: &[Duration], share: f64) -> f64 {
    let mut sorted = latencies.to_vec();
    sorted.sort_unstable();
    let index = ((sorted.len() as f64 * share).ceil() as usize).clamp(1, sorted.len());
    sorted[index - 1].as_secs_f64() * 1000.0
}

/// A client of both nodes.
struct Service<'a> {
    dev: &'a Dev,
    client: Client,
    urls: [String; 2],
    key: String,
    tenant: String,
}

impl<'a> Service<'a> {
    async fn new(dev: &'a Dev, node: &Node) -> anyhow::Result<Self> {
        let text = |name: &str| dev.ready[name].as_str().context("not ready");
        let service = Self {
            dev,
            client: Client::new(),
            urls: [text("url")?.to_owned(), format!("http://{}", node.address)],
            key: node.key.clone(),
            tenant: text("tenant_id")?.to_owned(),
        };
        let issuer =
            json!({"issuer": ISSUER, "platform": "web", "algorithm": "HS256", "secret": SECRET});
        let url = format!("{}/v1/issuers/people", service.urls[0]);
        let put = service
            .client
            .put(url)
            .bearer_auth(&service.key)
            .json(&issuer);
        put.send().await?.error_for_status()?;
        Ok(service)
    }

    /// Sends a burst; returns the time until each message's answer.
    async fn burst(&self, case: Case, round: usize) -> anyhow::Result<Vec<Duration>> {
        let own = format!("telegram:{round}");
        match case {
            Case::Idle => {
                self.send_message(&own, 0).await?;
                self.send_all(|index| self.send_message(&own, index)).await
            }
            Case::New => {
                let new = format!("telegram:9{round}");
                self.send_all(|index| self.send_message(&new, index)).await
            }
            Case::Silence => {
                let sql = "update identity_presence set last_seen_at = now() - interval '61 s'";
                let mut superuser = database::superuser(self.dev).await?;
                sqlx::query(sql).execute(&mut superuser).await?;
                self.send_all(|index| self.send_message(&own, index)).await
            }
            Case::Linked => {
                let other = format!("slack:{round}");
                self.link(&own, &other).await?;
                let names = [own, other];
                self.send_all(|index| self.send_message(&names[index / 2 % 2], index))
                    .await
            }
            Case::DmAndGroup => {
                self.send_all(|index| {
                    let mut body = message(&own, index);
                    if index / 2 % 2 == 1 {
                        body["chat"] = json!({"type": "group", "id": round.to_string()});
                    }
                    self.post("/v1/inbound", &self.key, body, index)
                })
                .await
            }
            Case::IdleChat => {
                let token = self.token("existing")?;
                self.chat(&token, 0).await?;
                self.send_all(|index| self.chat(&token, index)).await
            }
            Case::NewToken => {
                let token = self.token(&format!("new-{round}"))?;
                self.send_all(|index| self.chat(&token, index)).await
            }
        }
    }

    async fn send_all<F, W>(&self, send: F) -> anyhow::Result<Vec<Duration>>
    where
        F: Fn(usize) -> W,
        W: Future<Output = anyhow::Result<Value>>,
    {
        let timed = async |request: W| {
            let began = Instant::now();
            request.await?;
            anyhow::Ok(began.elapsed())
        };
        try_join_all((0..BURST).map(|index| timed(send(index)))).await
    }

    async fn send_message(&self, identity: &str, index: usize) -> anyhow::Result<Value> {
        self.post("/v1/inbound", &self.key, message(identity, index), index)
            .await
    }

    async fn chat(&self, token: &str, index: usize) -> anyhow::Result<Value> {
        let user_message = json!({"role": "user", "content": format!("message {index}")});
        let body = json!({"model": AGENT, "user": "me", "messages": [user_message]});
        self.post("/v1/chat/completions", token, body, index).await
    }

    async fn link(&self, first: &str, second: &str) -> anyhow::Result<()> {
        let code = self
            .post("/v1/link-codes", &self.key, json!({"identity": first}), 0)
            .await?;
        let body = json!({"code": code["code"], "identity": second});
        self.post("/v1/link-codes/redeem", &self.key, body, 0)
            .await?;
        Ok(())
    }

    /// Sends a request to one of the nodes, by its index in the burst.
    async fn post(
        &self,
        path: &str,
        key: &str,
        body: Value,
        index: usize,
    ) -> anyhow::Result<Value> {
        let url = format!("{}{path}", self.urls[index % 2]);
        let request = self.client.post(url).bearer_auth(key).json(&body);
        let answer = request.send().await?;
        let status = answer.status();
        let text = answer.text().await?;
        ensure!(
            status.is_success() && status != 202,
            "POST {path}: {status} {text}"
        );
        Ok(serde_json::from_str(&text)?)
    }

    fn token(&self, name: &str) -> anyhow::Result<String> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
        let claims =
            json!({"iss": ISSUER, "aud": self.tenant, "sub": name, "exp": now + 20 * 3600});
        let key = EncodingKey::from_secret(SECRET.as_bytes());
        Ok(jsonwebtoken::encode(
            &Header::new(Algorithm::HS256),
            &claims,
            &key,
        )?)
    }
}

fn message(identity: &str, index: usize) -> Value {
    json!({"identity": identity, "agent": AGENT, "text": format!("message {index}"), "wait": true})
}
