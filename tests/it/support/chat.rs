//! Chat in sessions, in the words of tests: a tenant on several nodes whose agent asks a scripted model.

use std::time::Duration;

use serde_json::{Value, json};

use super::conversations::walk;
use super::model::{Model, Step};
use super::sse::Sse;
use super::world::WorldOptions;
use super::{Reply, Tenant, World, eventually};

/// It has what the keys of providers have, and is nowhere to be seen.
pub const UPSTREAM_KEY: &str = "sk-canary-0123456789abcdef0123";

pub struct Chat {
    pub world: World,
    pub tenant: Tenant,
    pub model: Model,
    pub key: String,
}

impl Chat {
    /// On two nodes.
    pub async fn new(steps: impl IntoIterator<Item = Step>) -> Self {
        Self::with(WorldOptions::default(), json!({}), steps).await
    }

    /// `members` are the agent's, besides its upstream.
    pub async fn with(
        options: WorldOptions,
        members: Value,
        steps: impl IntoIterator<Item = Step>,
    ) -> Self {
        let world = World::with(WorldOptions {
            nodes: options.nodes.max(2),
            private_upstreams: true,
            ..options
        })
        .await;
        let tenant = world.tenant("Acme").await;
        let model = Model::start(steps).await;
        let spec = agent_on(&model, members);
        let put = world.put(&tenant.key, "/v1/agents/main", spec).await;
        put.expect(200);
        let (_, key) = world.api_key(&tenant, "chat").await;
        Self {
            world,
            tenant,
            model,
            key,
        }
    }

    /// A message to a session, to be changed before it is sent.
    pub fn saying(&self, node: usize, session: &str, text: &str) -> reqwest::RequestBuilder {
        self.asking(node, session, json!({"messages": [said(text)]}))
    }

    pub fn asking(&self, node: usize, session: &str, body: Value) -> reqwest::RequestBuilder {
        let url = self.world.url_on(node, "/v1/chat/completions");
        let request = self.world.client.post(url).bearer_auth(&self.key);
        let request = request.header("x-hermes-session-id", session);
        request.json(&with_model(body))
    }

    pub async fn say(&self, node: usize, session: &str, text: &str) -> Reply {
        Reply::of(self.saying(node, session, text)).await
    }

    /// The same as a stream.
    pub async fn open(&self, node: usize, session: &str, text: &str) -> Sse {
        let body = json!({"messages": [said(text)], "stream": true});
        Sse::open(self.asking(node, session, body)).await
    }

    pub async fn events(&self, node: usize, path: &str, after: Option<i64>) -> Sse {
        let request = self.world.client.get(self.world.url_on(node, path));
        let mut request = request.bearer_auth(&self.key);
        if let Some(after) = after {
            request = request.header("last-event-id", after.to_string());
        }
        Sse::open(request).await
    }

    pub async fn cancel(&self, node: usize, turn: &str) -> Reply {
        let path = format!("/v1/turns/{turn}/cancel");
        let request = self.world.client.post(self.world.url_on(node, &path));
        Reply::of(request.bearer_auth(&self.key)).await
    }

    pub async fn turn(&self, id: &str) -> Value {
        let path = format!("/v1/turns/{id}");
        self.world.get(&self.key, &path).await.expect(200)
    }

    /// Those of a session, in the order of acceptance.
    pub async fn turns(&self, session: &str) -> Vec<Value> {
        let url = self.world.url(&format!("/v1/sessions/{session}/turns"));
        let mut turns = walk(&self.world.client, &self.key, &url).await;
        turns.reverse();
        turns
    }

    pub async fn transcript(&self, session: &str) -> Vec<Value> {
        let url = self.world.url(&format!("/v1/sessions/{session}/messages"));
        walk(&self.world.client, &self.key, &url).await
    }

    /// Role and text of each message.
    pub async fn lines(&self, session: &str) -> Vec<(String, String)> {
        lines(&self.transcript(session).await)
    }

    /// Waits until a turn stands so.
    pub async fn becomes(&self, turn: &str, state: &str) -> Value {
        let stands = async || self.turn(turn).await["state"] == state;
        eventually(state, Duration::from_secs(10), stands).await;
        self.turn(turn).await
    }

    /// Waits until so many messages were accepted in a session.
    pub async fn accepted(&self, session: &str, count: usize) -> Vec<Value> {
        let path = format!("/v1/sessions/{session}/turns");
        let are = async || {
            // The first message makes the session.
            let there = self.world.get(&self.key, &path).await.status == 200;
            there && self.turns(session).await.len() == count
        };
        eventually("they are accepted", Duration::from_secs(10), are).await;
        self.turns(session).await
    }
}

pub fn agent_on(model: &Model, mut members: Value) -> Value {
    members["upstream"] = json!({
        "kind": "openai", "base_url": model.base_url, "model": "m-1", "api_key": UPSTREAM_KEY,
    });
    members
}

pub fn with_model(mut body: Value) -> Value {
    body["model"] = json!("main");
    body
}

pub fn said(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

pub fn lines(transcript: &[Value]) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let line = |message: &Value| (text(&message["role"]), text(&message["content"]));
    transcript.iter().map(line).collect()
}

pub fn line(role: &str, text: &str) -> (String, String) {
    (role.to_owned(), text.to_owned())
}

/// What a whole answer says.
#[track_caller]
pub fn answer(reply: &Reply) -> String {
    let body = reply.expect(200);
    let content = &body["choices"][0]["message"]["content"];
    content
        .as_str()
        .unwrap_or_else(|| panic!("{body}"))
        .to_owned()
}

/// An error as clients of OpenAI read it.
#[track_caller]
pub fn expect_error(reply: &Reply, status: u16, code: &str) -> Value {
    let body = reply.expect(status);
    assert_eq!(body["error"]["code"], code, "{body}");
    body["error"].clone()
}

pub fn id_of_turn(turn: &Value) -> String {
    turn["id"].as_str().unwrap().to_owned()
}
