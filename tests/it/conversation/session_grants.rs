//! Grants: seen and revoked by whom the conversation belongs to.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::conversations::{grant, user_message};
use crate::support::people::{User, sign_in};
use crate::support::{Fields, Tenant, World};

async fn opened(world: &World, tenant: &Tenant, guests: &[&User]) -> (User, String) {
    let ada = sign_in(world, tenant, "ada").await;
    let made = world
        .session(&ada.token, json!({"messages": [user_message("come in")]}))
        .await;
    let id = made.id();
    for guest in guests {
        grant(world, tenant, &id, &guest.user_id).await;
    }
    (ada, id)
}

async fn revocations(world: &World, tenant: &Tenant) -> Vec<Value> {
    let entries = world.walk(&tenant.key, "/v1/audit").await;
    let revokes = |entry: &Value| entry["action"] == "grant.revoke";
    entries.into_iter().filter(revokes).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn grants_are_listed_newest_first_and_page_by_page() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let bob = sign_in(&world, &tenant, "bob").await;
    let eve = sign_in(&world, &tenant, "eve").await;
    let (ada, id) = opened(&world, &tenant, &[&bob, &eve]).await;
    let (_, read) = world.api_key(&tenant, "read").await;
    let path = format!("/v1/sessions/{id}/grants");
    for key in [&ada.token, &tenant.key, &read] {
        let listed = world.walk(key, &path).await;
        let users: Vec<&Value> = listed.iter().map(|grant| &grant["user_id"]).collect();
        assert_eq!(users, [&json!(eve.user_id), &json!(bob.user_id)]);
        let paged = world.walk(key, &format!("{path}?limit=1")).await;
        assert_eq!(paged, listed);
        let first = &listed[0];
        let expected = json!({
            "user_id": eve.user_id, "via": "continuation", "created_at": first["created_at"],
            "expires_at": first["expires_at"], "revoked_at": null,
        });
        assert_eq!(first, &expected);
    }
    // By any id of the chain.
    let done = world
        .compress(&ada.token, &id, json!({"summary": "s"}))
        .await
        .expect(201);
    let tip = done.text("session_id");
    let listed = world
        .walk(&ada.token, &format!("/v1/sessions/{tip}/grants"))
        .await;
    assert_eq!(listed.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_guest_finds_nothing_at_once_and_the_others_stay() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    let bob = sign_in(&world, &tenant, "bob").await;
    let eve = sign_in(&world, &tenant, "eve").await;
    let (ada, id) = opened(&world, &tenant, &[&bob, &eve]).await;
    let path = format!("/v1/sessions/{id}");
    for guest in [&bob, &eve] {
        world.get(&guest.token, &path).await.expect(200);
    }
    let of_bob = format!("{path}/grants?user_id={}", bob.user_id);
    world.delete(&ada.token, &of_bob).await.expect(204);
    world
        .get_on(1, &bob.token, &path)
        .await
        .expect_problem(404, "session_not_found");
    world
        .append(&bob.token, &id, json!([user_message("still here?")]))
        .await
        .expect_problem(404, "session_not_found");
    world.get(&eve.token, &path).await.expect(200);
    let before = world.walk(&ada.token, &format!("{path}/grants")).await;
    let entries = revocations(&world, &tenant).await;
    assert_eq!(entries.len(), 1);
    assert_eq!(
        (&entries[0]["target"], &entries[0]["detail"]["user_id"]),
        (&json!(id), &json!(bob.user_id))
    );
    // Again, and for someone who has none: nothing changes.
    world.clock.advance(Duration::from_secs(60));
    let nobody = format!("{path}/grants?user_id={}", ada.user_id);
    for path in [&of_bob, &nobody] {
        world.delete(&ada.token, path).await.expect(204);
    }
    let after = world.walk(&ada.token, &format!("{path}/grants")).await;
    assert_eq!(after, before);
    assert_eq!(revocations(&world, &tenant).await.len(), 1);
    // Everyone's, by an admin.
    let all = format!("{path}/grants");
    world.delete(&tenant.key, &all).await.expect(204);
    world.get(&eve.token, &path).await.expect(404);
    assert_eq!(revocations(&world, &tenant).await.len(), 2);
    for grant in world.walk(&ada.token, &all).await {
        assert!(grant["revoked_at"].is_string(), "{grant}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_and_a_stranger_neither_see_nor_revoke_grants() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let bob = sign_in(&world, &tenant, "bob").await;
    let eve = sign_in(&world, &tenant, "eve").await;
    let (_, id) = opened(&world, &tenant, &[&bob]).await;
    let (_, chat) = world.api_key(&tenant, "chat").await;
    let (_, read) = world.api_key(&tenant, "read").await;
    let path = format!("/v1/sessions/{id}/grants");
    for (key, status, code) in [
        (&bob.token, 403, "guest_not_allowed"),
        (&eve.token, 404, "session_not_found"),
        (&chat, 404, "session_not_found"),
    ] {
        world.get(key, &path).await.expect_problem(status, code);
        world.delete(key, &path).await.expect_problem(status, code);
    }
    world
        .delete(&read, &path)
        .await
        .expect_problem(403, "missing_scope");
    for query in ["?user_id=bob", "?user=x"] {
        world
            .delete(&tenant.key, &format!("{path}{query}"))
            .await
            .expect_problem(400, "invalid_request");
    }
    let listed = world.walk(&tenant.key, &path).await;
    assert_eq!(listed[0]["revoked_at"], json!(null));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_grant_stays_listed_and_opens_nothing() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let bob = sign_in(&world, &tenant, "bob").await;
    let (_, id) = opened(&world, &tenant, &[&bob]).await;
    world.clock.advance(Duration::from_secs(8 * 24 * 3600));
    let bob = sign_in(&world, &tenant, "bob").await;
    let path = format!("/v1/sessions/{id}");
    world
        .get(&bob.token, &path)
        .await
        .expect_problem(404, "session_not_found");
    let listed = world.walk(&tenant.key, &format!("{path}/grants")).await;
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0]["revoked_at"], json!(null));
    assert!(listed[0]["expires_at"].as_str() < Some(&world.clock.now().to_rfc3339()));
}
