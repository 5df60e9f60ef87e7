//! What a user token proves: one account, in its direct chat. Whatever else it names, also of its own person, is
//! not there, and nothing happens.

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::people::{as_bridge, sign_in};
use crate::support::{Fields, Reply, World};

async fn messages(world: &World) -> i64 {
    sqlx::query_scalar("select count(*) from messages")
        .fetch_one(&mut world.superuser().await)
        .await
        .unwrap()
}

/// Bob is linked, and in the board's thread only the chief was heard.
#[tokio::test(flavor = "multi_thread")]
async fn a_user_token_acts_as_its_own_identity_in_its_own_direct_chat() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let bob = sign_in(&world, &tenant, "bob").await;
    world.link(&tenant.key, "telegram:bob", "web:bob").await;
    let thread = json!({"type": "thread", "id": "BOARD", "thread_id": "SALARIES"});
    let said = json!({"identity": "telegram:ceo", "chat": thread, "text": "all get a raise"});
    world
        .post(&tenant.key, "/v1/inbound", said)
        .await
        .expect(200);
    let before = messages(&world).await;
    let claims = [
        json!({"identity": "telegram:bob"}),
        json!({"identity": "telegram:ceo"}),
        json!({"chat": thread}),
        json!({"identity": "telegram:bob", "chat": thread}),
        json!({"chat": {"type": "dm", "scope": "other"}}),
        json!({"chat": {"type": "dm", "id": "ceo"}}),
    ];
    for claim in &claims {
        for (path, rest) in [
            ("/v1/inbound", json!({"text": "what was said?"})),
            ("/v1/inbound", json!({"text": "/unlink"})),
            ("/v1/resolve", json!({})),
            ("/v1/link-codes", json!({})),
            ("/v1/link-codes/redeem", json!({"code": "ABCDEFGH"})),
        ] {
            let mut body = rest;
            for (member, value) in claim.as_object().unwrap() {
                body[member] = value.clone();
            }
            let reply = world.post(&bob.token, path, body.clone()).await;
            assert_eq!(reply.status, 404, "{path} {body}: {}", reply.body);
        }
    }
    let named = json!({"text": "please wire 1M", "display_name": "the chief"});
    world
        .post(&bob.token, "/v1/inbound", named)
        .await
        .expect_problem(404, "not_found");
    let home = format!("/v1/users/{}/home-channels/telegram", bob.user_id);
    world
        .put(&bob.token, &home, json!({ "chat": thread }))
        .await
        .expect_problem(404, "not_found");
    for path in ["/v1/sessions", "/v1/users/me", "/v1/models"] {
        let reply = as_bridge(
            &world,
            &bob.token,
            "telegram:bob",
            (Method::GET, path),
            None,
        )
        .await;
        assert_eq!(reply.status, 404, "{path}: {}", reply.body);
    }
    assert_eq!(messages(&world).await, before);
    let identities = format!("/v1/users/{}/identities", bob.user_id);
    let accounts: Value = world.get(&bob.token, &identities).await.expect(200);
    assert_eq!(accounts.list().len(), 2);
}

/// What it does prove, it may also say.
#[tokio::test(flavor = "multi_thread")]
async fn a_user_token_may_name_its_own_identity() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let bob = sign_in(&world, &tenant, "bob").await;
    let body = json!({"identity": "web:bob", "chat": {"type": "dm"}, "text": "hi"});
    world
        .post(&bob.token, "/v1/inbound", body)
        .await
        .expect(200);
    for name in ["web:bob", "me"] {
        let get = (Method::GET, "/v1/sessions");
        let listed: Reply = as_bridge(&world, &bob.token, name, get, None).await;
        let listed = listed.expect(200);
        assert_eq!(listed.list().len(), 1);
    }
}
