//! Callers who wait for an answer without a stream are checked again: an unlinked identity, a revoked key and a
//! suspended tenant get an error and not the text.

use std::time::{Duration, Instant};

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::servers::model::{self, Step};
use crate::support::world::OPERATOR_KEY;
use crate::support::{Fields, Reply, Scene, eventually};

const STAYS: &str = "telegram:5";
const LEAVES: &str = "discord:5";
const PATIENCE: Duration = Duration::from_secs(10);

/// Two identities of one user who has spoken through the one that stays; the next question is held.
async fn linked() -> (Scene, Value) {
    let b = Scene::bridge([]).await;
    b.model.otherwise(Step::echo());
    b.world.link(&b.bridge_key, STAYS, LEAVES).await;
    let first = b.send(json!({"identity": STAYS, "text": "hello"})).await;
    let first = first.expect(200);
    b.model.push(Step::Hold);
    (b, first)
}

impl Scene {
    fn completion(&self, key: &str, user: &str, text: &str) -> reqwest::RequestBuilder {
        let body = json!({
            "model": "main", "user": user, "messages": [{"role": "user", "content": text}],
        });
        let request = self
            .world
            .request(Method::POST, "/v1/chat/completions", key);
        request.json(&body)
    }

    async fn unlink(&self, user_id: &Value, identity: &str) {
        let world = &self.world;
        let admin = &self.tenant.key;
        let id = world.identity_id(admin, user_id, identity).await;
        let path = format!("/v1/identities/{id}");
        world.delete(admin, &path).await.expect(200);
    }

    /// A second bridge key and its id.
    async fn other_key(&self) -> (String, String) {
        let body = json!({"name": "other", "scopes": ["bridge"], "platforms": ["telegram"]});
        let made = self
            .world
            .post(&self.tenant.key, "/v1/api-keys", body)
            .await;
        let made = made.expect(201);
        let text = |member: &str| made.text(member).to_owned();
        (text("id"), text("key"))
    }

    /// Revokes a key, and waits until this node knows.
    async fn revoke(&self, id: &str, key: &str) {
        let world = &self.world;
        let admin = &self.tenant.key;
        let path = format!("/v1/api-keys/{id}");
        world.delete(admin, &path).await.expect(204);
        let refused = async || world.get(key, "/v1/sessions").await.status == 401;
        eventually("the key is refused", PATIENCE, refused).await;
    }
}

fn expect_refusal(reply: &Reply, status: u16, text: &str) {
    reply.expect(status);
    assert!(!reply.body.contains(text), "{}", reply.body);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chat_of_an_identity_that_was_unlinked_meanwhile_gets_no_answer() {
    let (b, first) = linked().await;
    let waiting = tokio::spawn(Reply::of(b.completion(
        &b.bridge_key,
        LEAVES,
        "what did I say",
    )));
    b.model.called(2).await;
    b.unlink(&first["user_id"], LEAVES).await;
    b.model.release();
    expect_refusal(&waiting.await.unwrap(), 404, "you said");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chat_with_a_key_that_was_revoked_meanwhile_gets_no_answer() {
    let (b, _) = linked().await;
    let (id, key) = b.other_key().await;
    let waiting = tokio::spawn(Reply::of(b.completion(&key, STAYS, "more")));
    b.model.called(2).await;
    b.revoke(&id, &key).await;
    b.model.release();
    expect_refusal(&waiting.await.unwrap(), 401, "you said");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_for_a_silent_model_is_refused_while_it_is_silent() {
    let (b, first) = linked().await;
    let chat = tokio::spawn(Reply::of(b.completion(
        &b.bridge_key,
        LEAVES,
        "what did I say",
    )));
    b.model.called(2).await;
    let body = json!({"identity": LEAVES, "text": "and this"});
    let path = b.world.url("/v1/inbound");
    let request = b
        .world
        .client
        .post(path)
        .bearer_auth(&b.bridge_key)
        .json(&body);
    let inbound = tokio::spawn(Reply::of(request));
    let session = first.text("session_id");
    let turns = format!("/v1/sessions/{session}/turns");
    let queued = async || {
        let turns = b.world.get(&b.tenant.key, &turns).await.expect(200);
        turns.list().len() == 3
    };
    eventually("both are accepted", PATIENCE, queued).await;
    let since = Instant::now();
    b.unlink(&first["user_id"], LEAVES).await;
    expect_refusal(&chat.await.unwrap(), 404, "you said");
    expect_refusal(&inbound.await.unwrap(), 404, "you said");
    assert!(since.elapsed() < Duration::from_secs(8), "{since:?}");
    b.model.release();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chat_of_a_tenant_that_was_suspended_meanwhile_is_refused() {
    let (b, _) = linked().await;
    let waiting = tokio::spawn(Reply::of(b.completion(&b.bridge_key, STAYS, "more")));
    b.model.called(2).await;
    let path = format!("/v1/tenants/{}/suspend", b.tenant.id);
    b.world
        .post(OPERATOR_KEY, &path, json!({}))
        .await
        .expect(200);
    let refused = async || {
        let reply = b.world.get(&b.bridge_key, "/v1/sessions").await;
        reply.body.contains("tenant_suspended")
    };
    eventually("the key is refused", PATIENCE, refused).await;
    b.model.release();
    expect_refusal(&waiting.await.unwrap(), 403, "you said");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_inbound_message_of_an_identity_that_was_unlinked_gets_an_error() {
    let (b, first) = linked().await;
    let body = json!({"identity": LEAVES, "text": "what did I say"});
    let request = b.world.request(Method::POST, "/v1/inbound", &b.bridge_key);
    let waiting = tokio::spawn(Reply::of(request.json(&body)));
    b.model.called(2).await;
    b.unlink(&first["user_id"], LEAVES).await;
    b.model.release();
    let reply = waiting.await.unwrap();
    expect_refusal(&reply, 404, "you said");
    let session = first.text("session_id");
    assert!(!reply.body.contains(session), "{}", reply.body);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_a_revoked_key_waited_for_becomes_a_delivery() {
    let (b, _) = linked().await;
    let (id, key) = b.other_key().await;
    let body = json!({"identity": STAYS, "text": "more"});
    let request = b.world.request(Method::POST, "/v1/inbound", &key);
    let waiting = tokio::spawn(Reply::of(request.json(&body)));
    b.model.called(2).await;
    b.revoke(&id, &key).await;
    b.model.release();
    expect_refusal(&waiting.await.unwrap(), 401, "you said");
    let third = b.world.bridge_key(&b.tenant, &["telegram"]).await;
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        assert!(Instant::now() < until, "there is no delivery");
        let given = b.world.fetch(0, &third, "wait=2").await;
        for one in &given {
            b.world.ack(&third, one).await.expect(204);
        }
        if given
            .iter()
            .any(|one| one["text"] == model::echo_of("more"))
        {
            break;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_who_was_merged_while_waiting_still_gets_the_answer() {
    let b = Scene::bridge([Step::Hold, Step::echo()]).await;
    let own = b.world.dm(&b.bridge_key, LEAVES).await;
    let waiting = tokio::spawn(Reply::of(b.completion(&b.bridge_key, LEAVES, "still me")));
    b.model.called(1).await;
    let other = b.world.dm(&b.bridge_key, STAYS).await;
    let path = format!("/v1/users/{}/merge", other.text("user_id"));
    let body = json!({"from_user_id": own["user_id"], "reason": "the same person"});
    b.world.post(&b.tenant.key, &path, body).await.expect(200);
    b.model.release();
    let answer = waiting.await.unwrap().expect(200);
    let said = &answer["choices"][0]["message"]["content"];
    assert_eq!(said, &json!(model::echo_of("still me")));
}
