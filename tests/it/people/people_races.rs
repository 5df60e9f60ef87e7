//! Requests about the same user at the same time: one wins, and the others are told so.

use futures_util::future::join_all;
use reqwest::Method;
use serde_json::{Value, json};
use sqlx::Connection;

use crate::support::people::sign_in;
use crate::support::servers::model::Step;
use crate::support::{Fields, Reply, Scene, Tenant, World};

/// A user with two identities, and the id of the second.
async fn linked(world: &World, tenant: &Tenant) -> String {
    let key = world.bridge_key(tenant, &["telegram", "discord"]).await;
    let user = async |who: &str| world.dm(&key, who).await["user_id"].clone();
    let into = user("telegram:5").await;
    let from = user("discord:5").await;
    let path = format!("/v1/users/{}/merge", into.as_str().unwrap());
    let body = json!({"from_user_id": from, "reason": "the same person"});
    world.post(&tenant.key, &path, body).await.expect(200);
    let path = format!("/v1/users/{}/identities", into.as_str().unwrap());
    let listed = world.get(&tenant.key, &path).await.expect(200);
    let identities = listed.list();
    let second = |one: &&Value| one["identity"] == "discord:5";
    let id = &identities.iter().find(second).unwrap()["id"];
    id.as_str().unwrap().to_owned()
}

/// Sends the same request several times while all users are held.
async fn at_once(world: &World, tenant: &Tenant, method: &Method, path: &str) -> Vec<Reply> {
    let mut superuser = world.superuser().await;
    let mut held = superuser.begin().await.unwrap();
    sqlx::query("select 1 from users for update")
        .execute(&mut *held)
        .await
        .unwrap();
    let requests = join_all((0..4).map(|_| {
        let request = world.request(method.clone(), path, &tenant.key);
        Reply::of(request.json(&json!({})))
    }));
    let release = async {
        world.waiting(4).await;
        held.commit().await.unwrap();
    };
    tokio::join!(requests, release).0
}

fn expect_one_winner(replies: &[Reply], codes: &[&str]) {
    let (won, lost): (Vec<&Reply>, Vec<&Reply>) =
        replies.iter().partition(|reply| reply.status < 300);
    let texts: Vec<&String> = replies.iter().map(|reply| &reply.body).collect();
    assert_eq!(won.len(), 1, "{texts:?}");
    for reply in lost {
        let problem = reply.expect(409);
        let code = problem.text("code");
        assert!(codes.contains(&code), "{problem}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn losers_of_concurrent_unlinks_and_undos_get_a_conflict() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let id = linked(&world, &tenant).await;
    let path = format!("/v1/identities/{id}");
    let unlinks = at_once(&world, &tenant, &Method::DELETE, &path).await;
    expect_one_winner(&unlinks, &["last_identity"]);
    let path = format!("/v1/identities/{id}/undo-unlink");
    let undos = at_once(&world, &tenant, &Method::POST, &path).await;
    expect_one_winner(&undos, &["already_linked", "undo_not_possible"]);
}

/// A conversation that somebody makes in this moment: a copy of another, under another id and name.
const COPY: &str = "insert into conversations
     select (json_populate_record(c, json_build_object('id', gen_random_uuid(), 'client_id', 'notes'))).*
       from conversations c
      where c.client_id = 'other'";

#[tokio::test(flavor = "multi_thread")]
async fn a_merge_that_meets_a_new_session_of_the_same_name_is_a_conflict_and_can_be_repeated() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let survivor = sign_in(&world, &tenant, "survivor").await;
    let leaver = sign_in(&world, &tenant, "leaver").await;
    for (who, id) in [(&survivor, "other"), (&leaver, "notes")] {
        let body = json!({ "id": id });
        world
            .post(&who.token, "/v1/sessions", body)
            .await
            .expect(201);
    }
    let merge = || {
        let path = format!("/v1/users/{}/merge", survivor.user_id);
        let body = json!({"from_user_id": leaver.user_id, "reason": "the same person"});
        let request = world.request(Method::POST, &path, &tenant.key);
        Reply::of(request.json(&body))
    };
    let mut superuser = world.superuser().await;
    let mut making = superuser.begin().await.unwrap();
    sqlx::query(COPY).execute(&mut *making).await.unwrap();
    let release = async {
        world.waiting(1).await;
        making.commit().await.unwrap();
    };
    let (lost, ()) = tokio::join!(merge(), release);
    lost.expect_problem(409, "conflict");
    assert!(!lost.headers.contains_key("x-should-retry"));
    merge().await.expect(200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_delivery_that_is_replayed_while_others_are_fetched_comes_first() {
    let b = Scene::bridge([]).await;
    b.model.otherwise(Step::say("fine"));
    for text in ["one", "two"] {
        b.queue("telegram:5", text).await;
    }
    let first = b.fetch(0, "wait=10").await.remove(0);
    let id = first.text("id");
    let body = json!({"lease": first["lease"], "error": "gone", "retry": false});
    let path = format!("/v1/deliveries/{id}/nack");
    let nacked = b.world.post(&b.bridge_key, &path, body).await;
    assert!(nacked.status < 300, "{}", nacked.body);
    let mut superuser = b.world.superuser().await;
    let mut held = superuser.begin().await.unwrap();
    sqlx::query("select 1 from chats for update")
        .execute(&mut *held)
        .await
        .unwrap();
    let replay = async {
        let path = format!("/v1/deliveries/{id}/replay");
        let request = b.world.request(Method::POST, &path, &b.bridge_key);
        Reply::of(request.json(&json!({}))).await
    };
    let others = async {
        b.world.waiting(1).await;
        // The chat is passed over while somebody works on it.
        assert_eq!(b.fetch(1, "wait=0").await, Vec::<Value>::new());
        held.commit().await.unwrap();
    };
    let (replayed, ()) = tokio::join!(replay, others);
    assert!(replayed.status < 300, "{}", replayed.body);
    let fetched = join_all((0..4).map(|n| b.fetch(n % 2, "wait=0"))).await;
    let ids: Vec<Value> = fetched
        .iter()
        .flatten()
        .map(|one| one["id"].clone())
        .collect();
    assert_eq!(ids, [json!(id)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_of_whatsapp_is_the_number_in_it() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let key = world.bridge_key(&tenant, &["whatsapp"]).await;
    let mut users = Vec::new();
    for who in [
        "whatsapp:4930123",
        "whatsapp:+49 30 123",
        "whatsapp:4930123@s.whatsapp.net",
        "whatsapp:4930123:7@s.whatsapp.net",
    ] {
        users.push(world.dm(&key, who).await["user_id"].clone());
    }
    users.dedup();
    assert_eq!(users.len(), 1);
    let other = world.dm(&key, "whatsapp:4930123@lid").await["user_id"].clone();
    assert_ne!(other, users[0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_of_the_responses_api_are_pointed_to_what_to_use() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    for (method, path) in [
        (Method::POST, "/v1/responses"),
        (Method::POST, "/v1/responses/resp_1/cancel"),
        (Method::GET, "/v1/responses/resp_1"),
        (Method::GET, "/v1/responses/resp_1/input_items"),
        (Method::DELETE, "/v1/responses/resp_1"),
    ] {
        let request = world.request(method, path, &tenant.key);
        let reply = Reply::of(request.json(&json!({"model": "main"}))).await;
        let body = reply.expect(404);
        let message = body.text("/error/message");
        assert!(message.contains("/v1/chat/completions"), "{body}");
        assert_eq!(body["error"]["code"], "not_found");
        assert_eq!(reply.header("x-should-retry"), "false");
    }
}
