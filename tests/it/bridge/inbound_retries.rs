//! Messages and chats that are sent again with the same `Idempotency-Key`: one turn, one answer, also where users
//! were merged in between.

use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::servers::model::Step;
use crate::support::{Fields, Reply, Scene, eventually, real_time};

impl Scene {
    async fn send_with_key(&self, node: usize, key: &str, body: Value) -> Reply {
        let url = self.world.url_on(node, "/v1/inbound");
        let request = self.world.client.post(url).bearer_auth(&self.bridge_key);
        Reply::of(request.header("idempotency-key", key).json(&body)).await
    }

    async fn user_of(&self, identity: &str) -> String {
        let dm = self.world.dm(&self.bridge_key, identity).await;
        dm.text("user_id").to_owned()
    }

    /// Merges the user of one identity into that of another.
    async fn merge(&self, into: &str, from: &str) {
        let into = self.user_of(into).await;
        let from = self.user_of(from).await;
        let path = format!("/v1/users/{into}/merge");
        let body = json!({"from_user_id": from, "reason": "the same person"});
        let merged = self.world.post(&self.tenant.key, &path, body).await;
        merged.expect(200);
    }
}

fn is_replay(reply: &Reply) -> bool {
    reply.headers.contains_key("idempotency-replayed")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_without_an_id_is_one_turn_for_one_idempotency_key() {
    let b = Scene::bridge([]).await;
    b.model.otherwise(Step::echo());
    let body = json!({"identity": "telegram:5", "text": "hello"});
    let first = b.send_with_key(0, "k-1", body.clone()).await;
    let again = b.send_with_key(1, "k-1", body.clone()).await;
    assert_eq!(again.expect(200), first.expect(200));
    assert_eq!(first.expect(200)["duplicate"], false);
    assert_eq!((is_replay(&first), is_replay(&again)), (false, true));
    assert_eq!(b.model.requests().len(), 1);
    let other = json!({"identity": "telegram:5", "text": "something else"});
    let conflict = b.send_with_key(0, "k-1", other).await;
    conflict.expect_problem(409, "idempotency_conflict");
    // The key is the sender's: another one's message is another message.
    let body = json!({"identity": "telegram:6", "text": "hello"});
    let other = b.send_with_key(0, "k-1", body).await;
    assert_ne!(other.expect(200)["turn_id"], first.expect(200)["turn_id"]);
    assert!(!is_replay(&other));
    // Without a key it is said again.
    let body = json!({"identity": "telegram:5", "text": "hello"});
    b.send(body).await.expect(200);
    assert_eq!(b.model.requests().len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_of_a_message_that_is_being_answered_gets_the_same_answer() {
    let b = Scene::bridge([Step::held("half ", "whole")]).await;
    let body = json!({"identity": "telegram:5", "text": "hello"});
    let first = b.send_with_key(0, "k-1", body.clone());
    let again = async {
        let asked = async || !b.model.requests().is_empty();
        eventually("the model is asked", Duration::from_secs(10), asked).await;
        let again = b.send_with_key(1, "k-1", body.clone());
        let release = async {
            let reason = "nothing shows that the second waits for the first";
            real_time(reason, Duration::from_millis(300)).await;
            b.model.release();
        };
        tokio::join!(again, release).0
    };
    let (first, again) = tokio::join!(first, again);
    assert_eq!(first.expect(200)["reply"]["text"], "half whole");
    assert_eq!(again.expect(200), first.expect(200));
    assert!(is_replay(&again));
    assert_eq!(b.model.requests().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_with_an_idempotency_key_is_done_once() {
    let b = Scene::bridge([]).await;
    b.model.otherwise(Step::echo());
    b.reply_to("telegram:5", "hello").await;
    for body in [
        json!({"identity": "telegram:5", "text": "/new"}),
        json!({"identity": "telegram:5", "text": "only said", "mentioned": false,
               "chat": {"type": "group", "id": "g"}}),
    ] {
        let key = body.text("text").replace(' ', "-");
        let first = b.send_with_key(0, &key, body.clone()).await;
        let again = b.send_with_key(1, &key, body).await;
        assert_eq!(again.expect(first.status), first.expect(first.status));
        assert_eq!((is_replay(&first), is_replay(&again)), (false, true));
    }
    let sessions = b.reply_to("telegram:5", "/sessions").await;
    assert!(
        sessions.contains("2. ") && !sessions.contains("3. "),
        "{sessions}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_after_a_merge_is_still_the_same_request() {
    let b = Scene::bridge([]).await;
    b.model.otherwise(Step::echo());
    for who in ["telegram:5", "discord:5"] {
        b.reply_to(who, "hello").await;
    }
    let user = b.user_of("discord:5").await;
    let asked = b.model.requests().len();
    let chat = async |key: &str, user: &str| {
        let body =
            json!({"model": "main", "user": user, "messages": [{"role": "user", "content": "hi"}]});
        let path = "/v1/chat/completions";
        let request = b.world.request(Method::POST, path, &b.bridge_key);
        Reply::of(request.header("idempotency-key", key).json(&body)).await
    };
    let create = async |key: &str| {
        let body = json!({"title": "Once", "user": user});
        let request = b.world.request(Method::POST, "/v1/sessions", &b.tenant.key);
        Reply::of(request.header("idempotency-key", key).json(&body)).await
    };
    let first = chat("k-1", "discord:5").await;
    let made = create("k-2").await;
    b.merge("telegram:5", "discord:5").await;
    let again = chat("k-1", "discord:5").await;
    let made_again = create("k-2").await;
    assert_eq!(
        again.expect(200)["hermes"]["turn_id"],
        first.expect(200)["hermes"]["turn_id"]
    );
    assert!(is_replay(&again));
    assert_eq!(b.model.requests().len(), asked + 1);
    assert_eq!(made_again.expect(201)["id"], made.expect(201)["id"]);
    assert!(is_replay(&made_again));
}
