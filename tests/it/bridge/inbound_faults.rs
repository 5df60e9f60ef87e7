//! Nodes that are lost while somebody waits for an answer from a platform: the answer comes once, as a delivery or
//! to who asks again, whenever it happens. With real processes.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use nix::sys::signal::Signal;
use reqwest::Method;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::support::servers::model::{Step, echo_of};
use crate::support::servers::pair::Pair;
use crate::support::{Fields, Reply};

/// Longer than a turn's lease and what a sweeper waits after its end.
const QUIET: &str = "wait=9";

fn sign_in(number: usize) -> Value {
    json!({"identity": format!("telegram:{number}"), "text": format!("I am {number}"), "message_id": "m-1"})
}

impl Pair {
    fn request(&self, method: Method, node: usize, path: &str) -> reqwest::RequestBuilder {
        let request = self
            .nodes
            .client
            .request(method, self.nodes.url_on(node, path));
        request.bearer_auth(&self.key)
    }

    fn bringing(&self, node: usize, body: &Value) -> reqwest::RequestBuilder {
        let request = self.request(Method::POST, node, "/v1/inbound");
        request.json(body)
    }

    /// Brings a message and waits for the answer, until the model was asked once more.
    async fn wait_for_answer(
        &self,
        node: usize,
        body: &Value,
    ) -> JoinHandle<reqwest::Result<Reply>> {
        let asked = self.model.requests().len();
        let waiting = tokio::spawn(Reply::try_of(self.bringing(node, body)));
        self.model.called(asked + 1).await;
        waiting
    }

    /// What is given out next, acknowledged.
    async fn given(&self, node: usize, query: &str) -> Vec<Value> {
        let path = format!("/v1/deliveries?{query}");
        let given = Reply::of(self.request(Method::GET, node, &path)).await;
        let given = given.list();
        for one in &given {
            let path = format!("/v1/deliveries/{}/ack", one.text("id"));
            let ack = self.request(Method::POST, node, &path);
            let ack = ack.json(&json!({"lease": one["lease"]}));
            Reply::of(ack).await.expect(204);
        }
        given
    }

    async fn given_once(&self, node: usize, text: &str) -> Value {
        let given = self.given(node, "wait=30").await;
        let texts: Vec<&Value> = given.iter().map(|one| &one["text"]).collect();
        assert_eq!(texts, [text]);
        given[0].clone()
    }

    async fn gives_no_more(&self, node: usize) {
        assert_eq!(self.given(node, QUIET).await, Vec::<Value>::new());
    }

    async fn count(&self, query: &'static str) -> i64 {
        let mut database = self.nodes.superuser().await;
        sqlx::query_scalar(query)
            .fetch_one(&mut database)
            .await
            .unwrap()
    }
}

const TURNS: &str = "select count(*) from turns";

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_on_a_node_that_was_killed_has_one_delivery() {
    let pair = Pair::new([Step::held("one two ", "three"), Step::say("all of it")]).await;
    let waiting = pair.wait_for_answer(0, &sign_in(1)).await;
    pair.nodes.kill(0);
    assert!(waiting.await.unwrap().is_err());
    let given = pair.given_once(1, "all of it").await;
    assert_eq!(
        (&given["kind"], &given["in_reply_to"], &given["identity"]),
        (&json!("reply"), &json!("m-1"), &json!("telegram:1"))
    );
    // Brought again it is the same turn, whose answer was on its way: never both.
    let again = Reply::of(pair.bringing(1, &sign_in(1))).await.expect(202);
    assert_eq!(
        (&again["turn_id"], &again["duplicate"], &again["reply"]),
        (&given["turn_id"], &json!(true), &Value::Null)
    );
    pair.gives_no_more(1).await;
    assert_eq!(pair.count(TURNS).await, 1);
    assert_eq!(pair.model.requests().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_on_another_node_gets_the_answer_and_no_delivery() {
    let pair = Pair::new([Step::held("one two ", "three"), Step::say("all of it")]).await;
    let waiting = pair.wait_for_answer(0, &sign_in(1)).await;
    pair.nodes.kill(0);
    assert!(waiting.await.unwrap().is_err());
    let again = Reply::of(pair.bringing(1, &sign_in(1))).await.expect(200);
    assert_eq!(
        (&again["reply"]["text"], &again["duplicate"]),
        (&json!("all of it"), &json!(true))
    );
    pair.gives_no_more(1).await;
    assert_eq!(pair.count(TURNS).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_on_a_node_that_slept_has_one_delivery_and_no_answer_when_it_wakes() {
    let pair = Pair::new([Step::held("one two ", "three"), Step::say("all of it")]).await;
    let waiting = pair.wait_for_answer(0, &sign_in(1)).await;
    pair.nodes.signal(0, Signal::SIGSTOP);
    let given = pair.given_once(1, "all of it").await;
    pair.model.release();
    pair.nodes.signal(0, Signal::SIGCONT);
    let late = waiting.await.unwrap().unwrap().expect(202);
    assert_eq!(
        (&late["turn_id"], &late["reply"]),
        (&given["turn_id"], &Value::Null)
    );
    pair.gives_no_more(0).await;
    assert_eq!(pair.count(TURNS).await, 1);
}

/// Many wait, each a little longer than the one before, and the node is killed when half of them have waited too
/// long: some have just been told so, some are told in that moment, and the others never are.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_killed_when_a_wait_ends_leaves_one_delivery_to_each() {
    const PEOPLE: usize = 12;
    let pair = Pair::new(std::iter::repeat_n(Step::Hold, PEOPLE)).await;
    pair.model.otherwise(Step::Echo(Duration::ZERO));
    let mut waiting = Vec::new();
    for number in 0..PEOPLE {
        waiting.push(pair.wait_for_answer(0, &sign_in(number)).await);
    }
    // As if nearly all of their 55 seconds had passed; for who asks again that is what counts.
    let nearly = "with old as (
          update turns t
             set created_at = clock_timestamp() - interval '54 seconds' + place.number * interval '30 milliseconds'
            from (select id, row_number() over (order by id) as number from turns) place
           where place.id = t.id
       returning 1)
       select count(*) from old";
    assert_eq!(pair.count(nearly).await, PEOPLE as i64);
    let again = |number| Reply::try_of(pair.bringing(0, &sign_in(number)));
    let mut again: FuturesUnordered<_> = (0..PEOPLE).map(again).collect();
    for _ in 0..PEOPLE / 2 {
        let flipped = again.next().await.unwrap().unwrap().expect(202);
        assert_eq!(
            (&flipped["duplicate"], &flipped["reply"]),
            (&json!(true), &Value::Null)
        );
    }
    pair.nodes.kill(0);
    for waiting in waiting {
        assert!(waiting.await.unwrap().is_err());
    }
    while let Some(told) = again.next().await {
        assert!(told.is_err() || told.is_ok_and(|told| told.status == 202));
    }
    let mut given = BTreeSet::new();
    while given.len() < PEOPLE {
        let more = pair.given(1, "wait=30").await;
        assert!(!more.is_empty(), "only {given:?}");
        for one in more {
            assert!(given.insert(one.text("text").to_owned()));
        }
    }
    let expected = (0..PEOPLE).map(|number| echo_of(&format!("I am {number}")));
    assert_eq!(given, expected.collect());
    pair.gives_no_more(1).await;
    assert_eq!(pair.count(TURNS).await, PEOPLE as i64);
    let deliveries = "select count(*) from deliveries";
    assert_eq!(pair.count(deliveries).await, PEOPLE as i64);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_was_lost_with_its_nodes_too_often_is_one_notice() {
    let pair = Pair::new([Step::Hold]).await;
    let mut body = sign_in(1);
    body["wait"] = json!(false);
    let waiting = pair.wait_for_answer(0, &body).await;
    waiting.await.unwrap().unwrap().expect(202);
    let often = "with lost as (update turns set attempt = 5 returning 1) select count(*) from lost";
    assert_eq!(pair.count(often).await, 1);
    pair.nodes.kill(0);
    let given = pair.given(1, "wait=20").await;
    assert_eq!(given.len(), 1);
    assert_eq!(
        (&given[0]["kind"], &given[0]["in_reply_to"]),
        (&json!("notice"), &json!("m-1"))
    );
    pair.gives_no_more(1).await;
}
