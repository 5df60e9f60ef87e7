//! The measured node: `serve` from a copy of the program, so that it shares no memory with `dev`, with the
//! Postgres and Redis of `dev`.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use throughline::dev::servers::free_port;

use crate::AGENT;
use crate::dev::{Dev, PROGRAM};
use crate::upstream::Upstream;

const POLL: Duration = Duration::from_millis(5);
const WAIT: Duration = Duration::from_secs(20);

/// A node, killed when it is dropped by a failed measurement.
pub struct Node {
    child: Child,
    pub address: SocketAddr,
    pub key: String,
}

impl Node {
    /// Starts a node with this number of connections to Postgres, or the default.
    pub async fn start(dev: &Dev, pool: Option<u32>) -> anyhow::Result<Self> {
        let copy = dev.dir.join("throughline");
        if !copy.exists() {
            fs::copy(PROGRAM, &copy)?;
        }
        let address = loopback(free_port()?);
        let mut command = Command::new(&copy);
        command.arg("serve");
        for (name, value) in dev.ready["env"].as_object().context("no env")? {
            command.env(name, value.as_str().unwrap_or_default());
        }
        command
            .env("THROUGHLINE_LISTEN", address.to_string())
            .env(
                "THROUGHLINE_METRICS_LISTEN",
                loopback(free_port()?).to_string(),
            )
            .env("THROUGHLINE_ALLOW_PRIVATE_UPSTREAMS", "true")
            .env("THROUGHLINE_DRAIN_MS", "0")
            .env("THROUGHLINE_LOG", "warn");
        if let Some(pool) = pool {
            command.env("THROUGHLINE_DATABASE_POOL", pool.to_string());
        }
        let key = dev.ready["api_key"].as_str().context("no api_key")?;
        let mut node = Self {
            child: command.spawn().context("cannot start a node")?,
            address,
            key: key.to_owned(),
        };
        let began = Instant::now();
        let http = reqwest::Client::new();
        let url = format!("http://{address}/readyz");
        loop {
            let answer = http.get(&url).send().await;
            if answer.is_ok_and(|answer| answer.status().is_success()) {
                return Ok(node);
            }
            if let Some(status) = node.child.try_wait()? {
                bail!("a node ended before it was ready: {status}");
            }
            ensure!(began.elapsed() < WAIT, "a node is not getting ready");
            tokio::time::sleep(POLL).await;
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Creates the agent with the model `upstream`, and raises the tenant's limits.
    pub async fn make_agent(&self, dev: &Dev, upstream: &Upstream) -> anyhow::Result<()> {
        let base_url = format!("http://{}/v1", upstream.address);
        let agent = json!({
            "upstream": {"kind": "openai", "base_url": base_url, "model": "bench"},
            "context_window": 10_000_000,
            "compression": {"enabled": false},
        });
        self.put(&format!("/v1/agents/{AGENT}"), &self.key, agent)
            .await?;
        let limits = json!({
            "requests_per_minute": 10_000_000, "requests_per_minute_per_key": 10_000_000,
            "tokens_per_minute": 1_000_000_000, "concurrent_turns": 100_000, "concurrent_calls": 100_000, "open_streams": 1_000_000,
        });
        let tenant = dev.ready["tenant_id"].as_str().context("no tenant_id")?;
        let operator = dev.ready["operator_key"].as_str();
        let path = format!("/v1/operator/tenants/{tenant}/limits");
        self.put(&path, operator.context("no operator_key")?, limits)
            .await
    }

    async fn put(&self, path: &str, key: &str, body: Value) -> anyhow::Result<()> {
        let url = format!("http://{}{path}", self.address);
        let request = reqwest::Client::new().put(url).bearer_auth(key).json(&body);
        let answer = request.send().await?;
        let status = answer.status();
        let text = answer.text().await?;
        ensure!(status.is_success(), "PUT {path}: {status} {text}");
        Ok(())
    }

    pub fn stop(mut self) -> anyhow::Result<()> {
        kill(
            Pid::from_raw(i32::try_from(self.child.id())?),
            Signal::SIGTERM,
        )?;
        let status = self.child.wait()?;
        ensure!(status.success(), "a node failed on SIGTERM: {status}");
        Ok(())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn loopback(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, port))
}
