//! Nodes are restarted one after the other behind a balancer that only knows what `/readyz` says, under load:
//! nobody's request fails.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::json;

use crate::support::chat::agent_on;
use crate::support::conversations::user_message;
use crate::support::servers::balancer::Balancer;
use crate::support::servers::model::{Model, Step, echo_of};
use crate::support::servers::nodes::{Nodes, NodesOptions};
use crate::support::sse::{self, Sse};
use crate::support::world::OPERATOR_KEY;
use crate::support::{Fields, Reply, real_time};

const CLIENTS: usize = 20;
const LOOKED_AT: Duration = Duration::from_millis(300);
/// In proportion to that as five seconds are to one, about.
const DRAIN: Duration = Duration::from_millis(1500);

/// Somebody in a session of their own, who asks again and again over connections that are kept alive.
struct Client {
    number: usize,
    client: reqwest::Client,
    url: String,
    key: String,
}

impl Client {
    async fn asks_until(self, over: Arc<AtomicBool>) -> (usize, Vec<String>) {
        let mut asked = 0;
        let mut failures = Vec::new();
        while !over.load(Ordering::SeqCst) {
            let text = format!("this is message {asked} of client {}", self.number);
            let outcome = match self.number % 2 {
                0 => self.asks(&text).await,
                _ => self.streams(&text).await,
            };
            asked += 1;
            if let Err(failure) = outcome {
                failures.push(format!("client {}: {failure}", self.number));
            }
        }
        (asked, failures)
    }

    fn message_request(&self, text: &str, stream: bool) -> reqwest::RequestBuilder {
        let body = json!({"model": "main", "messages": [user_message(text)], "stream": stream});
        let request = self.client.post(&self.url).bearer_auth(&self.key);
        let session = format!("session-{}", self.number);
        request.header("x-hermes-session-id", session).json(&body)
    }

    async fn asks(&self, text: &str) -> Result<(), String> {
        let reply = Reply::try_of(self.message_request(text, false)).await;
        let reply = reply.map_err(|error| format!("{error:?}"))?;
        let body: serde_json::Value = serde_json::from_str(&reply.body).unwrap_or_default();
        if body["choices"][0]["message"]["content"] == echo_of(text) {
            Ok(())
        } else {
            Err(format!("{}: {}", reply.status, reply.body))
        }
    }

    async fn streams(&self, text: &str) -> Result<(), String> {
        let response = self.message_request(text, true).send().await;
        let response = response.map_err(|error| format!("{error:?}"))?;
        let status = response.status();
        let mut stream = Sse::of(response);
        let mut chunks = Vec::new();
        loop {
            match stream.try_next().await {
                Ok(Some(chunk)) => chunks.push(chunk),
                Ok(None) => break,
                Err(error) => return Err(format!("{status}: {error:?} after {chunks:?}")),
            }
        }
        let whole = chunks.last().is_some_and(|last| last.data == "[DONE]");
        if whole && sse::text_of(&chunks) == echo_of(text) {
            Ok(())
        } else {
            Err(format!("{status}: {chunks:?}"))
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nobodys_request_fails_while_nodes_are_restarted_one_after_the_other() {
    let nodes = Arc::new(
        Nodes::with(NodesOptions {
            count: 3,
            private_upstreams: true,
            drain: Some(DRAIN),
            ..NodesOptions::default()
        })
        .await,
    );
    let model = Model::start([]).await;
    // Eight words: an answer takes about 0.8 s.
    model.otherwise(Step::Echo(Duration::from_millis(90)));
    let post = |path: &str, key: &str, body| {
        let request = nodes.client.post(nodes.url_on(0, path));
        Reply::of(request.bearer_auth(key).json(&body))
    };
    let made = post("/v1/tenants", OPERATOR_KEY, json!({"name": "Acme"})).await;
    let admin = made.expect(201).text("api_key").to_owned();
    let put = nodes.client.put(nodes.url_on(0, "/v1/agents/main"));
    let put = put.bearer_auth(&admin).json(&agent_on(&model, json!({})));
    Reply::of(put).await.expect(200);
    let chat = json!({"name": "chat", "scopes": ["chat"]});
    let chat = post("/v1/api-keys", &admin, chat).await.expect(201);
    let urls = (0..nodes.count()).map(|node| nodes.url_on(node, ""));
    let balancer = Balancer::start(urls.collect(), LOOKED_AT).await;
    for node in 0..nodes.count() {
        balancer.wait_until_ready(node).await;
    }

    let over = Arc::new(AtomicBool::new(false));
    let asking = (0..CLIENTS).map(|number| {
        let client = Client {
            number,
            client: reqwest::Client::new(),
            url: format!("http://{}/v1/chat/completions", balancer.address),
            key: chat.text("key").to_owned(),
        };
        client.asks_until(over.clone())
    });
    let asking = join_all(asking);
    let restarting = async {
        let mut ends = Vec::new();
        for node in 0..nodes.count() {
            real_time("clients ask all nodes", LOOKED_AT).await;
            ends.push(nodes.terminate(node).await);
            nodes.revive(node).await;
            balancer.wait_until_ready(node).await;
        }
        real_time("clients ask all nodes", LOOKED_AT).await;
        over.store(true, Ordering::SeqCst);
        ends
    };
    let (outcomes, ends) = tokio::join!(asking, restarting);
    let asked: usize = outcomes.iter().map(|(asked, _)| asked).sum();
    let failures: Vec<&String> = outcomes.iter().flat_map(|(_, failed)| failed).collect();
    println!(
        "{asked} requests, {} failures; ends took {ends:?}",
        failures.len()
    );
    assert!(
        failures.is_empty(),
        "{} of {asked}: {failures:#?}",
        failures.len()
    );
    assert!(asked > 3 * CLIENTS, "{asked}");
    let in_time = |took: &Duration| *took > DRAIN && *took < DRAIN + Duration::from_secs(5);
    assert!(ends.iter().all(in_time), "{ends:?}");
}
