//! Two node processes on a scripted model: for turns whose node is lost.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::chat::{agent_on, lines, with_model};
use crate::support::conversations::{user_message, walk};
use crate::support::servers::model::{Model, Step};
use crate::support::servers::nodes::{Nodes, NodesOptions};
use crate::support::sse::{Sse, SseEvent};
use crate::support::world::OPERATOR_KEY;
use crate::support::{Fields, Reply, eventually};

const PATIENCE: Duration = Duration::from_secs(20);

pub const LEASE: Duration = Duration::from_secs(1);
pub const GRACE: Duration = Duration::from_secs(3);

/// Two processes, and a model that is held in the middle of its first answer.
pub struct Pair {
    pub nodes: Arc<Nodes>,
    pub model: Model,
    pub key: String,
}

impl Pair {
    pub async fn new(steps: impl IntoIterator<Item = Step>) -> Self {
        Self::with(NodesOptions::default(), steps).await
    }

    pub async fn with(options: NodesOptions, steps: impl IntoIterator<Item = Step>) -> Self {
        let nodes = Nodes::with(NodesOptions {
            count: 2,
            private_upstreams: true,
            turn_lease: Some(LEASE),
            grace: Some(GRACE),
            ..options
        })
        .await;
        let model = Model::start(steps).await;
        let tenant = nodes.client.post(nodes.url_on(0, "/v1/tenants"));
        let tenant = tenant
            .bearer_auth(OPERATOR_KEY)
            .json(&json!({"name": "Acme"}));
        let tenant = Reply::of(tenant).await.expect(201);
        let key = tenant.text("api_key").to_owned();
        let put = nodes.client.put(nodes.url_on(0, "/v1/agents/main"));
        let put = put.bearer_auth(&key).json(&agent_on(&model, json!({})));
        Reply::of(put).await.expect(200);
        Self {
            nodes: Arc::new(nodes),
            model,
            key,
        }
    }

    pub fn message_request(
        &self,
        node: usize,
        text: &str,
        stream: bool,
    ) -> reqwest::RequestBuilder {
        self.message_request_in(node, "s-1", text, stream)
    }

    pub fn message_request_in(
        &self,
        node: usize,
        session: &str,
        text: &str,
        stream: bool,
    ) -> reqwest::RequestBuilder {
        let url = self.nodes.url_on(node, "/v1/chat/completions");
        let request = self.nodes.client.post(url).bearer_auth(&self.key);
        let request = request.header("x-hermes-session-id", session);
        request.json(&with_model(
            json!({"messages": [user_message(text)], "stream": stream}),
        ))
    }

    pub fn get(&self, node: usize, path: &str) -> reqwest::RequestBuilder {
        let request = self.nodes.client.get(self.nodes.url_on(node, path));
        request.bearer_auth(&self.key)
    }

    pub async fn turn(&self, node: usize, id: &str) -> Value {
        Reply::of(self.get(node, &format!("/v1/turns/{id}")))
            .await
            .expect(200)
    }

    pub async fn completes(&self, node: usize, id: &str) -> Value {
        let completed = async || self.turn(node, id).await["state"] == "completed";
        eventually("the turn is completed", PATIENCE, completed).await;
        self.turn(node, id).await
    }

    pub async fn lines(&self, node: usize) -> Vec<(String, String)> {
        let url = self.nodes.url_on(node, "/v1/sessions/s-1/messages");
        lines(&walk(&self.nodes.client, &self.key, &url).await)
    }

    pub async fn events(&self, node: usize, turn: &str) -> Vec<SseEvent> {
        Sse::open(self.get(node, &format!("/v1/turns/{turn}/events")))
            .await
            .rest()
            .await
    }

    /// How many nodes were lost with the turns.
    pub async fn lost(&self) -> i64 {
        sqlx::query_scalar("select sum(lost)::bigint from turns")
            .fetch_one(&mut self.nodes.superuser().await)
            .await
            .unwrap()
    }

    /// Everything that a turn can write, as text.
    pub async fn rows(&self) -> String {
        let query = "select json_build_object(
              'turns', (select json_agg(t order by t.id) from turns t),
              'events', (select json_agg(e order by e.conversation_id, e.seq) from events e),
              'messages', (select json_agg(m order by m.session_id, m.seq) from messages m),
              'sessions', (select json_agg(s order by s.id) from sessions s),
              'conversations', (select json_agg(c order by c.id) from conversations c))::text";
        let mut database = self.nodes.superuser().await;
        sqlx::query_scalar(query)
            .fetch_one(&mut database)
            .await
            .unwrap()
    }
}
