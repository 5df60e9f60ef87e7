//! Nodes that are lost in the middle of an answer: another one goes on, what was discarded is told, and a
//! node that comes back too late writes nothing. With real processes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::support::chat::{agent_on, answer, line, lines, said, with_model};
use crate::support::conversations::walk;
use crate::support::model::{Model, Step};
use crate::support::nodes::{Nodes, NodesOptions};
use crate::support::sse::{self, Sse, SseEvent};
use crate::support::world::OPERATOR_KEY;
use crate::support::{Reply, eventually};

pub const LEASE: Duration = Duration::from_secs(1);
pub const GRACE: Duration = Duration::from_secs(3);
const PATIENCE: Duration = Duration::from_secs(20);

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
        let key = tenant["api_key"].as_str().unwrap().to_owned();
        let put = nodes.client.put(nodes.url_on(0, "/v1/agents/main"));
        let put = put.bearer_auth(&key).json(&agent_on(&model, json!({})));
        Reply::of(put).await.expect(200);
        Self {
            nodes: Arc::new(nodes),
            model,
            key,
        }
    }

    pub fn saying(&self, node: usize, text: &str, stream: bool) -> reqwest::RequestBuilder {
        self.saying_in(node, "s-1", text, stream)
    }

    pub fn saying_in(
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
            json!({"messages": [said(text)], "stream": stream}),
        ))
    }

    fn get(&self, node: usize, path: &str) -> reqwest::RequestBuilder {
        let request = self.nodes.client.get(self.nodes.url_on(node, path));
        request.bearer_auth(&self.key)
    }

    async fn turn(&self, node: usize, id: &str) -> Value {
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

    async fn events(&self, node: usize, turn: &str) -> Vec<SseEvent> {
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
    async fn rows(&self) -> String {
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

/// What the events of a turn tell that was begun anew once: each attempt's text.
fn attempts(events: &[SseEvent]) -> [String; 2] {
    let names: Vec<&str> = events.iter().map(|event| event.name.as_str()).collect();
    let discarded = names.iter().position(|name| *name == "message.discarded");
    let discarded = discarded.unwrap_or_else(|| panic!("{names:?}"));
    assert_eq!(
        names
            .iter()
            .filter(|name| **name == "message.discarded")
            .count(),
        1
    );
    assert_eq!(names[names.len() - 1], "turn.completed");
    assert_eq!(events[discarded].json()["data"]["discarded_attempt"], 1);
    let text = |events: &[SseEvent], attempt: i64| -> String {
        let deltas = events.iter().filter(|event| event.name == "message.delta");
        let texts = deltas.map(|event| {
            let body = event.json();
            assert_eq!(body["attempt"], attempt, "{body}");
            body["data"]["text"].as_str().unwrap().to_owned()
        });
        texts.collect()
    };
    let (before, after) = events.split_at(discarded);
    [text(before, 1), text(after, 2)]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_whose_node_is_killed_is_finished_by_another() {
    let pair = Pair::new([Step::held("one two ", "three"), Step::say("all of it")]).await;
    let asked = || pair.saying(0, "hi", true).header("idempotency-key", "k-1");
    let mut stream = Sse::open(asked()).await;
    stream.hears("one two ").await;
    let turn = stream.header("x-throughline-turn-id");
    let watching = Sse::open(pair.get(1, &format!("/v1/turns/{turn}/events"))).await;
    let mut watching = watching;
    let mut told = watching.until("message.delta").await;
    let began = Instant::now();
    pair.nodes.kill(0);
    assert!(stream.try_next().await.is_err());
    let ended = pair.completes(1, &turn).await;
    assert!(
        began.elapsed() < LEASE + Duration::from_secs(4),
        "{:?}",
        began.elapsed()
    );
    assert_eq!(ended["attempt"], 2);
    assert_eq!(pair.lost().await, 1);
    assert_eq!(ended["message"]["content"], "all of it");
    told.extend(watching.rest().await);
    assert_eq!(
        attempts(&told),
        ["one two ".to_owned(), "all of it".to_owned()]
    );
    assert_eq!(told, pair.events(1, &turn).await);
    let expected = [line("user", "hi"), line("assistant", "all of it")];
    assert_eq!(pair.lines(1).await, expected);
    // The client's own retry is given that answer, and nothing of the one that is void.
    let again = pair.saying(1, "hi", true).header("idempotency-key", "k-1");
    let mut again = Sse::open(again).await;
    assert_eq!(again.header("idempotency-replayed"), "true");
    assert_eq!(sse::said(&again.rest().await), "all of it");
    let whole = pair.saying(1, "hi", false).header("idempotency-key", "k-2");
    pair.model.push(Step::say("next"));
    assert_eq!(answer(&Reply::of(whole).await), "next");
    assert_eq!(pair.model.requests().len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_slept_beyond_its_lease_writes_nothing() {
    let pair = Pair::new([Step::held("one two ", "three"), Step::say("all of it")]).await;
    let mut stream = Sse::open(pair.saying(0, "hi", true)).await;
    stream.hears("one two ").await;
    let turn = stream.header("x-throughline-turn-id");
    pair.nodes.signal(0, Signal::SIGSTOP);
    let ended = pair.completes(1, &turn).await;
    assert_eq!(
        (&ended["attempt"], &ended["message"]["content"]),
        (&json!(2), &json!("all of it"))
    );
    let before = pair.rows().await;
    pair.model.release();
    pair.nodes.signal(0, Signal::SIGCONT);
    let rest = stream.rest().await;
    let error = rest[rest.len() - 1].json();
    assert_eq!(error["error"]["code"], "turn_restarted", "{error}");
    assert!(
        error["error"]["message"].as_str().unwrap().contains(&turn),
        "{error}"
    );
    // It serves again, and what it shows is what the other wrote.
    assert_eq!(pair.turn(0, &turn).await, pair.turn(1, &turn).await);
    assert_eq!(pair.rows().await, before);
    assert_eq!(attempts(&pair.events(0, &turn).await)[1], "all of it");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_told_to_end_finishes_what_ends_soon() {
    let pair = Pair::new([Step::Echo(Duration::from_millis(100))]).await;
    let mut stream = Sse::open(pair.saying(0, "one two three four five six", true)).await;
    stream.hears("you said ").await;
    let took = pair.nodes.terminate(0).await;
    assert!(took < GRACE + Duration::from_secs(1), "{took:?}");
    let rest = stream.rest().await;
    assert_eq!(sse::said(&rest), "one two three four five six");
    assert_eq!(rest[rest.len() - 1].data, "[DONE]");
    let turn = stream.header("x-throughline-turn-id");
    let turn = pair.turn(1, &turn).await;
    assert_eq!(
        (&turn["state"], &turn["attempt"]),
        (&json!("completed"), &json!(1))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_told_to_end_hands_over_what_does_not() {
    let pair = Pair::new([Step::held("one two ", "three"), Step::say("all of it")]).await;
    let mut stream = Sse::open(pair.saying(0, "hi", true)).await;
    stream.hears("one two ").await;
    let turn = stream.header("x-throughline-turn-id");
    let took = pair.nodes.terminate(0).await;
    assert!(took < GRACE + Duration::from_secs(1), "{took:?}");
    let rest = stream.rest().await;
    let error = rest[rest.len() - 1].json();
    assert_eq!(error["error"]["code"], "turn_restarted", "{error}");
    let ended = pair.completes(1, &turn).await;
    assert_eq!(ended["attempt"], 2);
    assert_eq!(
        pair.lost().await,
        0,
        "a turn that was handed over has lost no node"
    );
    assert_eq!(attempts(&pair.events(1, &turn).await)[1], "all of it");
    let expected = [line("user", "hi"), line("assistant", "all of it")];
    assert_eq!(pair.lines(1).await, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_has_seen_nothing_is_given_the_answer_of_the_node_that_took_over() {
    // Held before its first word: the next call takes the next step.
    let pair = Pair::new([Step::Hold, Step::say("all of it")]).await;
    let asked = tokio::spawn(Reply::of(pair.saying(0, "hi", false)));
    eventually("the model is asked", PATIENCE, async || {
        pair.model.requests().len() == 1
    })
    .await;
    let took = pair.nodes.terminate(0).await;
    assert!(took < GRACE + Duration::from_secs(1), "{took:?}");
    let reply = asked.await.unwrap();
    assert_eq!(answer(&reply), "all of it");
    let turn = pair.turn(1, reply.header("x-throughline-turn-id")).await;
    assert_eq!(turn["attempt"], 2);
    assert_eq!(
        pair.lines(1).await,
        [line("user", "hi"), line("assistant", "all of it")]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn tools_whose_node_was_lost_are_told_as_interrupted() {
    let pair = Pair::new([Step::held("one ", "two"), Step::say("all of it")]).await;
    let mut stream = Sse::open(pair.saying(0, "hi", true)).await;
    stream.hears("one ").await;
    let turn = stream.header("x-throughline-turn-id");
    pair.nodes.kill(0);
    // As if it had stored a call of two tools, and the result of one, before it was lost.
    let step = "
        with place as (
          update sessions s set next_seq = next_seq + 2, message_count = message_count + 2
            from turns t where s.id = t.start_session_id
          returning s.tenant_id, s.id, s.next_seq - 2 as seq, t.id as turn_id),
        stepped as (update turns set steps = steps + 2 returning id)
        insert into messages (tenant_id, session_id, seq, role, kind, content, tool_calls, tool_call_id,
                              token_count, turn_id, step, created_at)
        select tenant_id, id, seq, 'assistant', 'normal', null, $1::json, null, 1, turn_id, 1, now() from place
        union all
        select tenant_id, id, seq + 1, 'tool', 'normal', '\"fine\"'::json, null, 'a', 1, turn_id, 2, now() from place";
    let call = |id: &str| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}});
    sqlx::query(step)
        .bind(json!([call("a"), call("b")]))
        .execute(&mut pair.nodes.superuser().await)
        .await
        .unwrap();
    let ended = pair.completes(1, &turn).await;
    assert_eq!(
        (&ended["attempt"], &ended["message"]["content"]),
        (&json!(2), &json!("all of it"))
    );
    let lines = pair.lines(1).await;
    let roles: Vec<&str> = lines.iter().map(|(role, _)| role.as_str()).collect();
    assert_eq!(roles, ["user", "assistant", "tool", "tool", "assistant"]);
    assert_eq!(lines[2].1, "fine");
    assert!(
        lines[3].1.starts_with("[interrupted: the node"),
        "{}",
        lines[3].1
    );
    let asked = pair.model.requests().pop().unwrap();
    assert_eq!(asked["messages"][3]["tool_call_id"], "b");
}
