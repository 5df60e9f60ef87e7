//! Requests about the same user at the same time: one wins, and the others are told so.

use futures_util::future::join_all;
use reqwest::Method;
use serde_json::{Value, json};
use sqlx::Connection;

use crate::support::linking::bridge;
use crate::support::{Reply, Tenant, World};

/// A user with two identities, and the id of the second.
async fn linked(world: &World, tenant: &Tenant) -> String {
    let key = bridge(world, tenant, &["telegram", "discord"]).await;
    let user = async |who: &str| world.dm(&key, who).await["user_id"].clone();
    let (into, from) = (user("telegram:5").await, user("discord:5").await);
    let path = format!("/v1/users/{}/merge", into.as_str().unwrap());
    let body = json!({"from_user_id": from, "reason": "the same person"});
    world.post(&tenant.key, &path, body).await.expect(200);
    let path = format!("/v1/users/{}/identities", into.as_str().unwrap());
    let listed = world.get(&tenant.key, &path).await.expect(200);
    let identities = listed["data"].as_array().unwrap();
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
    let texts: Vec<&String> = replies.iter().map(|reply| &reply.text).collect();
    assert_eq!(won.len(), 1, "{texts:?}");
    for reply in lost {
        let problem = reply.expect(409);
        let code = problem["code"].as_str().unwrap();
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

#[tokio::test(flavor = "multi_thread")]
async fn an_address_of_whatsapp_is_the_number_in_it() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let key = bridge(&world, &tenant, &["whatsapp"]).await;
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
async fn who_calls_the_responses_api_is_told_what_to_use() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    for path in ["/v1/responses", "/v1/responses/resp_1/cancel"] {
        let reply = world
            .post(&tenant.key, path, json!({"model": "main"}))
            .await;
        let body = reply.expect(404);
        let message = body["error"]["message"].as_str().unwrap();
        assert!(message.contains("/v1/chat/completions"), "{body}");
        assert_eq!(body["error"]["code"], "not_found");
        assert_eq!(reply.header("x-should-retry"), "false");
    }
}
