//! Messages that are queued, or arrive, while their identity is unlinked: what one user says is never answered
//! from the conversation of the other. Each race is made deterministic by a lock that the test holds.

use std::time::Duration;

use serde_json::{Value, json};
use sqlx::Connection;

use crate::support::servers::model::Step;
use crate::support::world::OPERATOR_KEY;
use crate::support::{Fields, Reply, Scene, eventually};

const STAYS: &str = "telegram:5";
const LEAVES: &str = "discord:5";

async fn linked(steps: impl IntoIterator<Item = Step>) -> Scene {
    let b = Scene::bridge(steps).await;
    b.model.otherwise(Step::echo());
    b.world.link(&b.bridge_key, STAYS, LEAVES).await;
    b
}

async fn completes(b: &Scene, turn: &Value) -> Value {
    let path = format!("/v1/turns/{}", turn.as_str().unwrap());
    let get = async || b.world.get(&b.tenant.key, &path).await.expect(200);
    eventually("it is answered", Duration::from_secs(20), async || {
        get().await["state"] == "completed"
    })
    .await;
    get().await
}

async fn owner_of(b: &Scene, conversation: &Value) -> Value {
    let path = format!("/v1/sessions/{}", conversation.as_str().unwrap());
    b.world.get(&b.tenant.key, &path).await.expect(200)["user_id"].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_in_which_another_identity_has_a_queued_message_stays() {
    let b = linked([Step::Hold]).await;
    let unwaited =
        |identity: &str, text: &str| json!({"identity": identity, "text": text, "wait": false});
    let first = b.send(unwaited(LEAVES, "of who leaves")).await.expect(202);
    let queued = b.send(unwaited(STAYS, "of who stays")).await.expect(202);
    assert_eq!(first["conversation_id"], queued["conversation_id"]);
    assert!(b.reply_to(LEAVES, "/unlink").await.contains("on its own"));
    b.model.release();
    let turn = completes(&b, &queued["turn_id"]).await;
    assert_eq!(turn["message"]["content"], "you said of who stays");
    let stays = b.world.dm(&b.bridge_key, STAYS).await;
    let leaves = b.world.dm(&b.bridge_key, LEAVES).await;
    assert_ne!(stays["user_id"], leaves["user_id"]);
    assert_eq!(stays["conversation_id"], queued["conversation_id"]);
    assert_ne!(leaves["conversation_id"], queued["conversation_id"]);
    assert_eq!(
        owner_of(&b, &queued["conversation_id"]).await,
        stays["user_id"]
    );
}

/// Unlinks `LEAVES` and does `meanwhile` after the unlink has read everything and before it commits.
async fn during_unlink<T>(b: &Scene, meanwhile: impl Future<Output = T>) -> T {
    let user = b.world.dm(&b.bridge_key, LEAVES).await["user_id"].clone();
    let id = b.world.identity_id(&b.tenant.key, &user, LEAVES).await;
    let mut superuser = b.world.superuser().await;
    let mut held = superuser.begin().await.unwrap();
    // The last row that an unlink locks.
    sqlx::query("select 1 from audit_heads for update")
        .execute(&mut *held)
        .await
        .unwrap();
    let path = format!("/v1/identities/{id}");
    let unlink = async { b.world.delete(&b.tenant.key, &path).await };
    let release = async {
        b.world.waiting(2).await;
        held.commit().await.unwrap();
    };
    let later = async {
        b.world.waiting(1).await;
        meanwhile.await
    };
    let (unlinked, outcome, ()) = tokio::join!(unlink, later, release);
    unlinked.expect(200);
    outcome
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_arrives_during_the_unlink_of_its_identity_goes_to_its_new_user() {
    let b = linked([]).await;
    let before = b
        .send(json!({"identity": STAYS, "text": "the secret"}))
        .await;
    let before = before.expect(200);
    let after = during_unlink(&b, async {
        b.send(json!({"identity": LEAVES, "text": "who am I"}))
            .await
    })
    .await
    .expect(200);
    assert_ne!(after["user_id"], before["user_id"]);
    assert_ne!(after["conversation_id"], before["conversation_id"]);
    let asked = b.model.requests().pop().unwrap().to_string();
    assert!(!asked.contains("the secret"), "{asked}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_named_session_is_not_found_by_an_identity_that_was_unlinked_while_it_waited() {
    let b = linked([]).await;
    let before = b
        .send(json!({"identity": STAYS, "text": "the secret"}))
        .await;
    let before = before.expect(200);
    let session = before.text("session_id").to_owned();
    let ask = || {
        let body = json!({"model": "main", "messages": [{"role": "user", "content": "who am I"}]});
        let url = b.world.url("/v1/chat/completions");
        let request = b.world.client.post(url).bearer_auth(&b.bridge_key);
        let request = request.header("x-throughline-identity", LEAVES);
        request.header("x-hermes-session-id", &session).json(&body)
    };
    let asked = b.model.requests().len();
    let refused = during_unlink(&b, async { Reply::of(ask()).await }).await;
    assert_eq!(refused.expect(404)["error"]["code"], "session_not_found");
    assert_eq!(b.model.requests().len(), asked);
    let path = format!("/v1/sessions/{session}/messages");
    let listed = b.world.get(&b.tenant.key, &path).await;
    assert!(!listed.body.contains("who am I"), "{}", listed.body);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_to_a_group_whose_sender_is_linked_meanwhile_is_answered() {
    let b = Scene::bridge([]).await;
    b.model.otherwise(Step::echo());
    // So few that every start is counted, behind the lock that the test holds.
    let limits = format!("/v1/operator/tenants/{}/limits", b.tenant.id);
    let put = b
        .world
        .put(OPERATOR_KEY, &limits, json!({"concurrent_turns": 2}));
    put.await.expect(200);
    let upstream = json!({"kind": "openai", "base_url": b.model.base_url, "model": "m"});
    let spec = json!({"upstream": upstream, "group_scope": "shared"});
    let put = b.world.put(&b.tenant.key, "/v1/agents/main", spec);
    put.await.expect(200);
    let group = json!({"type": "group", "id": "9"});
    let says =
        |text: &str| json!({"identity": "slack:6", "text": text, "chat": group, "mentioned": true});
    b.send(says("first")).await.expect(200);
    b.world.dm(&b.bridge_key, "telegram:7").await;
    let mut superuser = b.world.superuser().await;
    let mut held = superuser.begin().await.unwrap();
    sqlx::query(
        "select pg_advisory_xact_lock(hashtextextended('turns of ' || id::text, 0)) from tenants",
    )
    .execute(&mut *held)
    .await
    .unwrap();
    let link = async {
        b.world.waiting(1).await;
        let linked = b.world.link(&b.bridge_key, "telegram:7", "slack:6");
        tokio::time::timeout(Duration::from_secs(2), linked)
            .await
            .ok();
        held.commit().await.unwrap();
    };
    let (said, ()) = tokio::join!(b.send(says("second")), link);
    said.expect(200);
}
