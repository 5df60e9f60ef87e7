//! A scene for one test: nodes, a tenant whose agent `main` asks a scripted model, and keys to talk to it.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::chat::{agent_on, lines, with_model};
use crate::support::conversations::{user_message, walk};
use crate::support::deliveries::Retry;
use crate::support::people::{User, sign_in};
use crate::support::servers::model::{Model, Step};
use crate::support::sse::Sse;
use crate::support::world::WorldOptions;
use crate::support::{Reply, Tenant, World, eventually};

pub struct Scene {
    pub world: World,
    pub tenant: Tenant,
    pub model: Model,
    /// With the scope `chat`.
    pub key: String,
    /// Of a bridge; empty if the scene has none.
    pub bridge_key: String,
}

/// What a scene consists of. Without a model and an agent, `main` is the demo agent.
pub struct SceneBuilder {
    options: WorldOptions,
    tenant: &'static str,
    agent: Option<Value>,
    steps: Vec<Step>,
    otherwise: Option<Step>,
    platforms: &'static [&'static str],
}

impl SceneBuilder {
    pub fn nodes(mut self, count: usize) -> Self {
        self.options.nodes = count;
        self
    }

    /// Everything else about its nodes.
    pub fn options(mut self, options: WorldOptions) -> Self {
        self.options = options;
        self
    }

    pub fn tenant(mut self, name: &'static str) -> Self {
        self.tenant = name;
        self
    }

    /// Members of the agent, besides its upstream.
    pub fn agent(mut self, members: Value) -> Self {
        self.agent = Some(members);
        self
    }

    /// What the agent's model does, in order.
    pub fn model(mut self, steps: impl IntoIterator<Item = Step>) -> Self {
        self.steps.extend(steps);
        self.agent.get_or_insert_with(|| json!({}));
        self
    }

    /// The model repeats each message once its steps are at their end.
    pub fn echo(mut self) -> Self {
        self.otherwise = Some(Step::echo());
        self.model([])
    }

    /// A key that vouches for these platforms.
    pub fn bridge(mut self, platforms: &'static [&'static str]) -> Self {
        self.platforms = platforms;
        self
    }

    pub async fn build(mut self) -> Scene {
        self.options.private_upstreams = true;
        let options = std::mem::take(&mut self.options);
        self.build_in(World::with(options).await).await
    }

    /// In a world that exists; its options are its own.
    pub async fn build_in(self, world: World) -> Scene {
        let tenant = world.tenant(self.tenant).await;
        let model = Model::start(self.steps).await;
        if let Some(step) = self.otherwise {
            model.otherwise(step);
        }
        if let Some(members) = self.agent {
            let agent = agent_on(&model, members);
            let put = world.put(&tenant.key, "/v1/agents/main", agent).await;
            put.expect(200);
        }
        let (_, key) = world.api_key(&tenant, "chat").await;
        let bridge_key = if self.platforms.is_empty() {
            String::new()
        } else {
            world.bridge_key(&tenant, self.platforms).await
        };
        Scene {
            world,
            tenant,
            model,
            key,
            bridge_key,
        }
    }
}

impl Scene {
    pub fn builder() -> SceneBuilder {
        SceneBuilder {
            options: WorldOptions::default(),
            tenant: "Acme",
            agent: None,
            steps: Vec::new(),
            otherwise: None,
            platforms: &[],
        }
    }

    /// For chats on two nodes.
    pub async fn chat(steps: impl IntoIterator<Item = Step>) -> Self {
        Self::builder().nodes(2).model(steps).build().await
    }

    /// For chats on one node whose agent has a prompt of its own.
    pub async fn with_prompt(steps: impl IntoIterator<Item = Step>) -> Self {
        let agent = json!({"system_prompt": "Be brief."});
        Self::builder().agent(agent).model(steps).build().await
    }

    /// For bridges of three platforms on two nodes.
    pub async fn bridge(steps: impl IntoIterator<Item = Step>) -> Self {
        let platforms = &["telegram", "slack", "discord"];
        let scene = Self::builder().nodes(2).model(steps).bridge(platforms);
        scene.build().await
    }

    /// A user of the tenant, with a token.
    pub async fn sign_in(&self, name: &str) -> User {
        sign_in(&self.world, &self.tenant, name).await
    }
}

/// Chats.
impl Scene {
    /// A message to a session, to be changed before it is sent.
    pub fn message_request(
        &self,
        node: usize,
        session: &str,
        text: &str,
    ) -> reqwest::RequestBuilder {
        self.completion_request(node, session, json!({"messages": [user_message(text)]}))
    }

    pub fn completion_request(
        &self,
        node: usize,
        session: &str,
        body: Value,
    ) -> reqwest::RequestBuilder {
        let url = self.world.url_on(node, "/v1/chat/completions");
        let request = self.world.client.post(url).bearer_auth(&self.key);
        let request = request.header("x-hermes-session-id", session);
        request.json(&with_model(body))
    }

    pub async fn say(&self, node: usize, session: &str, text: &str) -> Reply {
        Reply::of(self.message_request(node, session, text)).await
    }

    /// The same as a stream.
    pub async fn open(&self, node: usize, session: &str, text: &str) -> Sse {
        let body = json!({"messages": [user_message(text)], "stream": true});
        Sse::open(self.completion_request(node, session, body)).await
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
    pub async fn reaches(&self, turn: &str, state: &str) -> Value {
        let stands = async || self.turn(turn).await["state"] == state;
        eventually(state, Duration::from_secs(10), stands).await;
        self.turn(turn).await
    }

    /// Waits until so many messages were accepted in a session.
    pub async fn wait_for_turns(&self, session: &str, count: usize) -> Vec<Value> {
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

/// Messages and deliveries of the scene's bridge.
impl Scene {
    pub async fn send(&self, body: Value) -> Reply {
        self.send_on(0, body).await
    }

    pub async fn send_on(&self, node: usize, body: Value) -> Reply {
        let url = self.world.url_on(node, "/v1/inbound");
        let request = self.world.client.post(url).bearer_auth(&self.bridge_key);
        Reply::of(request.json(&body)).await
    }

    /// Sends until the message is accepted, as a bridge does.
    pub async fn send_until_accepted(&self, node: usize, body: Value) -> Reply {
        loop {
            let reply = self.send_on(node, body.clone()).await;
            if !["busy", "unavailable"].contains(&reply.code().as_str()) {
                return reply;
            }
        }
    }

    /// What the service replies to a text in a direct chat.
    pub async fn reply_to(&self, identity: &str, text: &str) -> String {
        let sent = json!({"identity": identity, "text": text});
        let received = self.send(sent).await.expect(200);
        let reply = received["reply"]["text"].as_str();
        reply.unwrap_or_default().to_owned()
    }

    /// Sends a text whose reply becomes a delivery.
    pub async fn queue(&self, identity: &str, text: &str) -> Value {
        self.world.queue(&self.bridge_key, identity, text).await
    }

    pub async fn fetch(&self, node: usize, query: &str) -> Vec<Value> {
        self.world.fetch(node, &self.bridge_key, query).await
    }

    pub async fn ack(&self, delivery: &Value) -> Reply {
        self.world.ack(&self.bridge_key, delivery).await
    }

    pub async fn nack(&self, delivery: &Value, retry: Retry) -> Reply {
        self.world.nack(&self.bridge_key, delivery, retry).await
    }

    /// The messages of a session, as the tenant's admin reads them.
    pub async fn messages(&self, session: &Value) -> Vec<Value> {
        let session = session.as_str().unwrap();
        let path = format!("/v1/sessions/{session}/messages");
        self.world.walk(&self.tenant.key, &path).await
    }
}
