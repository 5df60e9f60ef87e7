//! The service's side: a node in this process, called over HTTP by clients that resolve identities sequentially.

use std::time::Instant;

use anyhow::{Context, ensure};
use futures_util::future::try_join_all;
use reqwest::Client;
use serde_json::{Value, json};
use throughline::app::App;
use throughline::clock::Clock;
use throughline::config::Config;
use throughline::server::Node;

use crate::dev::Dev;
use crate::figures::{Part, Sample, Times};
use crate::random::next;
use crate::users::identity;

pub struct Service {
    node: Node,
    caller: Caller,
}

#[derive(Clone)]
struct Caller {
    http: Client,
    url: String,
    key: String,
    users: u64,
}

impl Service {
    /// Starts a node with one connection to Postgres for each client.
    pub async fn start(dev: &Dev, users: u32, clients: u32) -> anyhow::Result<Self> {
        let lookup = |name: &str| match name {
            "THROUGHLINE_DATABASE_POOL" => Some(clients.to_string()),
            "THROUGHLINE_LISTEN" => Some("127.0.0.1:0".to_owned()),
            name => dev.ready["env"][name].as_str().map(str::to_owned),
        };
        let app = App::build(Config::from_lookup(&lookup)?, Clock::system()).await?;
        let node = Node::start(app, None).await?;
        let key = dev.ready["api_key"].as_str().context("no api_key")?;
        let caller = Caller {
            http: Client::new(),
            url: format!("http://{}/v1/resolve", node.address),
            key: key.to_owned(),
            users: users.into(),
        };
        Ok(Self { node, caller })
    }

    pub async fn stop(self) {
        self.node.stop().await;
    }

    pub async fn run(&self, clients: u32, times: Times) -> anyhow::Result<Part> {
        let began = Instant::now();
        let end = times.warm_up + times.measured;
        let working = (1..=u64::from(clients)).map(|number| {
            let caller = self.caller.clone();
            tokio::spawn(async move {
                let mut samples = Vec::new();
                let mut random = number;
                loop {
                    random = next(random);
                    let sent = Instant::now();
                    caller.resolve(1 + random % caller.users).await?;
                    let ended = began.elapsed();
                    let took = sent.elapsed();
                    samples.push(Sample {
                        task: 0,
                        took,
                        ended,
                    });
                    if ended > end {
                        return anyhow::Ok(samples);
                    }
                }
            })
        });
        let done = try_join_all(working).await?;
        let samples = done.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
        Part::new(&samples.concat(), 1, times.warm_up..end)
    }
}

impl Caller {
    async fn resolve(&self, number: u64) -> anyhow::Result<()> {
        let body = json!({ "identity": identity(number) });
        let request = self.http.post(&self.url).bearer_auth(&self.key).json(&body);
        let answer: Value = request.send().await?.error_for_status()?.json().await?;
        let key = format!("agent:main:telegram:dm:{number}");
        ensure!(
            answer["session_key"] == key && answer["created"] == false,
            "a wrong answer: {answer}"
        );
        Ok(())
    }
}
