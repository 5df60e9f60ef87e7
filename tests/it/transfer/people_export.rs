//! A person's export: everything of theirs, for them or an admin, whole or broken off.

use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};
use throughline::ids::IdentityId;

use crate::support::conversations::{user_message, uuid_of_session};
use crate::support::data::whole_user::{SECRET, TELEGRAM, WholeUser, whole_user};
use crate::support::people::sign_in;
use crate::support::transfer::{exported, finish, imported, lasting};
use crate::support::{Fields, Tenant, World};

async fn export(world: &World, key: &str, user: &str) -> Value {
    world
        .get(key, &format!("/v1/users/{user}/export"))
        .await
        .expect(200)
}

async fn actions(world: &World, tenant: &Tenant, action: &str) -> usize {
    let entries = world.walk(&tenant.key, "/v1/audit").await;
    let named = entries.iter().filter(|entry| entry["action"] == action);
    named.count()
}

fn list<'a>(document: &'a Value, member: &str) -> &'a Vec<Value> {
    document.items(member)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_export_has_everything_of_a_user_and_no_secret() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let whole = whole_user(&world, &tenant).await;
    let WholeUser { ada, .. } = &whole;
    let read_before = actions(&world, &tenant, "conversation.read").await;
    for key in [&tenant.key, &ada.token] {
        let document = export(&world, key, &ada.user_id).await;
        assert_eq!(document["format"], "throughline.person");
        assert_eq!(document["version"], 1);
        assert_eq!(document["user"]["id"], json!(ada.user_id));
        assert_eq!(document["user"]["external_id"], "external-ada-to-erase");
        let accounts = list(&document, "identities");
        let names: Vec<&Value> = accounts.iter().map(|one| &one["identity"]).collect();
        assert_eq!(names, ["web:ada-to-erase", TELEGRAM]);
        let mut merged: Vec<&str> = list(&document, "merged_user_ids")
            .iter()
            .map(|id| id.as_str().unwrap())
            .collect();
        let mut expected: Vec<&str> = whole.merged.iter().map(String::as_str).collect();
        merged.sort_unstable();
        expected.sort_unstable();
        assert_eq!(merged, expected);
        assert_eq!(list(&document, "home_channels")[0]["identity"], TELEGRAM);
        assert_eq!(list(&document, "presence").len(), 2);
        let keys = list(&document, "session_keys");
        let names: Vec<&Value> = keys.iter().flat_map(|one| list(one, "names")).collect();
        for session_key in &whole.session_keys {
            assert!(names.contains(&&json!(session_key)), "{session_key}");
        }
        let granted: Vec<&Value> = list(&document, "grants")
            .iter()
            .map(|one| &one["user_id"])
            .collect();
        assert_eq!(granted.len(), 2);
        assert!(granted.contains(&&json!(ada.user_id)));
        assert!(granted.contains(&&json!(whole.bob.user_id)));
        assert_eq!(list(&document, "codes").len(), 2);
        assert!(!list(&document, "moves").is_empty());
        assert!(!list(&document, "deliveries").is_empty());
        let usage = list(&document, "usage");
        let turns: i64 = usage.iter().map(|one| one.number("turns")).sum();
        assert_eq!(turns, 8);
        let conversations = list(&document, "conversations");
        assert_eq!(conversations.len(), whole.sessions.len());
        let elsewhere = list(&document, "messages_elsewhere");
        assert_eq!(elsewhere.len(), whole.in_thread + 1);
        assert!(
            elsewhere
                .iter()
                .all(|one| one["content"].to_string().contains(SECRET))
        );
        let text = document.to_string();
        assert!(!text.contains("digest") && !text.contains("of Bob") && !text.contains("come in"));
    }
    // Every conversation as its own export gives it, and good to be imported as it is.
    let document = export(&world, &ada.token, &ada.user_id).await;
    for conversation in list(&document, "conversations") {
        let id = conversation.text("conversation_id");
        let mut own = exported(&world, &ada.token, id).await;
        own["exported_at"] = conversation["exported_at"].clone();
        assert_eq!(&own, conversation);
        for key in [&ada.token, &tenant.key] {
            let made = imported(&world, key, conversation).await;
            let again = exported(&world, key, &made.id()).await;
            assert_eq!(lasting(&again), lasting(conversation));
        }
    }
    assert_eq!(actions(&world, &tenant, "user.export").await, 1);
    let read = actions(&world, &tenant, "conversation.read").await;
    // By the two requests above, and by none of the exports of the person.
    assert!(read >= read_before);
    let old = export(&world, &tenant.key, &whole.merged[0]).await;
    assert_eq!(old["user"]["id"], json!(ada.user_id));
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_user_and_an_admin_export_them() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let ada = sign_in(&world, &tenant, "ada").await;
    let bob = sign_in(&world, &tenant, "bob").await;
    let path = format!("/v1/users/{}/export", ada.user_id);
    world.get(&ada.token, &path).await.expect(200);
    assert_eq!(actions(&world, &tenant, "user.export").await, 0);
    world.get(&tenant.key, &path).await.expect(200);
    assert_eq!(actions(&world, &tenant, "user.export").await, 1);
    world
        .get(&bob.token, &path)
        .await
        .expect_problem(404, "not_found");
    for scope in ["read", "chat", "bridge"] {
        let (_, key) = world.api_key(&tenant, scope).await;
        let request = world
            .request(Method::GET, &path, &key)
            .header("x-throughline-identity", "telegram:1");
        crate::support::Reply::of(request)
            .await
            .expect_problem(403, "missing_scope");
    }
}

/// A conversation of a person with `count` messages of `size` characters.
async fn seed(world: &World, tenant: &Tenant, id: &str, identity: &str, count: i64, size: i32) {
    sqlx::query(
        "with put as (
           insert into messages (tenant_id, session_id, seq, role, kind, content, identity_id, platform,
                                 token_count, created_at)
           select $1, $2, n, 'user', 'normal', to_json(lpad(n::text, $4, 'x')), $5, 'web', 1, now()
             from generate_series(1, $3) n
         )
         update sessions
            set next_seq = $3 + 1, message_count = $3, token_count = $3
          where tenant_id = $1
            and id = $2",
    )
    .bind(tenant.uuid())
    .bind(uuid_of_session(id))
    .bind(count)
    .bind(size)
    .bind(identity.parse::<IdentityId>().unwrap())
    .execute(&mut world.superuser().await)
    .await
    .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_export_is_streamed_and_what_goes_meanwhile_is_not_in_it() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let ada = sign_in(&world, &tenant, "ada").await;
    let bob = sign_in(&world, &tenant, "bob").await;
    let identity = world
        .identity_id(&tenant.key, &json!(ada.user_id), "web:ada")
        .await;
    let mut own = Vec::new();
    for _ in 0..4 {
        own.push(world.session(&ada.token, json!({})).await.id());
        world.clock.advance(Duration::from_millis(5));
    }
    seed(&world, &tenant, &own[0], &identity, 300, 10).await;
    seed(&world, &tenant, &own[1], &identity, 5000, 4000).await;
    world
        .append(&ada.token, &own[3], json!([user_message("the last")]))
        .await
        .expect(201);
    let bobs = world.session(&bob.token, json!({})).await.id();
    seed(&world, &tenant, &bobs, &identity, 450, 10).await;
    sqlx::query(
        "with chat as (
           insert into chats (tenant_id, platform, scope, chat_ref) values ($1, 'web', '', 'dm:ada')
         )
         insert into deliveries (tenant_id, id, platform, scope, chat_ref, seq, kind, identity_id, payload,
                                 visible_at, created_at)
         select $1, gen_random_uuid(), 'web', '', 'dm:ada', n, 'notice', $2, '{\"text\": \"hi\"}', now(), now()
           from generate_series(1, 450) n",
    )
    .bind(tenant.uuid())
    .bind(identity.parse::<IdentityId>().unwrap())
    .execute(&mut world.superuser().await)
    .await
    .unwrap();

    let path = format!("/v1/users/{}/export", ada.user_id);
    for deleted in [false, true] {
        let mut response = world
            .request(Method::GET, &path, &ada.token)
            .send()
            .await
            .unwrap();
        assert_eq!(response.status(), 200);
        let mut text = response.chunk().await.unwrap().unwrap().to_vec();
        if deleted {
            // One that is still to come, and the one that is being written.
            for id in [&own[2], &own[1]] {
                world
                    .delete(&tenant.key, &format!("/v1/sessions/{id}"))
                    .await
                    .expect(204);
            }
        }
        while let Some(chunk) = response.chunk().await.unwrap() {
            text.extend_from_slice(&chunk);
        }
        let document: Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(list(&document, "deliveries").len(), 450);
        let elsewhere = list(&document, "messages_elsewhere");
        assert_eq!(elsewhere.len(), 450);
        for (message, seq) in elsewhere.iter().zip(1..) {
            assert_eq!(message["seq"], seq);
        }
        let conversations = list(&document, "conversations");
        let find = |id: &String| {
            conversations
                .iter()
                .find(|one| one["conversation_id"] == *id)
        };
        let length = |one: &Value| list(&one["links"][0], "messages").len();
        let first = find(&own[0]).unwrap();
        let last = find(&own[3]).unwrap();
        assert_eq!((length(first), length(last)), (300, 1));
        assert!(first["signature"].is_string() && last["signature"].is_string());
        if deleted {
            assert!(find(&own[2]).is_none());
            let cut = find(&own[1]).expect("it was begun");
            assert!(cut["signature"].is_null() && length(cut) < 5000);
        } else {
            assert_eq!(conversations.len(), 4);
            assert_eq!(length(find(&own[1]).unwrap()), 5000);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_export_breaks_off_when_its_user_is_erased() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let ada = sign_in(&world, &tenant, "ada").await;
    let identity = world
        .identity_id(&tenant.key, &json!(ada.user_id), "web:ada")
        .await;
    let own = world.session(&ada.token, json!({})).await.id();
    seed(&world, &tenant, &own, &identity, 5000, 4000).await;
    let path = format!("/v1/users/{}/export", ada.user_id);
    let mut exports = Vec::new();
    for key in [&tenant.key, &ada.token] {
        let request = world.request(Method::GET, &path, key);
        let mut response = request.send().await.unwrap();
        assert_eq!(response.status(), 200);
        let begun = response.chunk().await.unwrap().unwrap().to_vec();
        exports.push((response, begun));
    }
    let path = format!("/v1/users/{}", ada.user_id);
    world.delete(&tenant.key, &path).await.expect(202);
    for (response, begun) in exports {
        let broken = finish(response, begun).await.unwrap_err();
        assert!(!String::from_utf8_lossy(&broken).contains("messages_elsewhere"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_export_breaks_off_when_the_identity_that_reads_it_is_unlinked() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let ada = sign_in(&world, &tenant, "ada").await;
    let linked = world.link(&tenant.key, "telegram:5", "web:ada").await;
    let user = linked.text("user_id");
    let telegram = world
        .identity_id(&tenant.key, &linked["user_id"], "telegram:5")
        .await;
    let own = world.session(&ada.token, json!({})).await.id();
    // What the other account said.
    seed(&world, &tenant, &own, &telegram, 5000, 4000).await;
    let mut exports = Vec::new();
    for path in [
        format!("/v1/users/{user}/export"),
        format!("/v1/sessions/{own}/export"),
    ] {
        let request = world.request(Method::GET, &path, &ada.token);
        let mut response = request.send().await.unwrap();
        assert_eq!(response.status(), 200);
        let begun = response.chunk().await.unwrap().unwrap().to_vec();
        exports.push((response, begun));
    }
    let web = world
        .identity_id(&tenant.key, &linked["user_id"], "web:ada")
        .await;
    let path = format!("/v1/identities/{web}");
    world.delete(&tenant.key, &path).await.expect(200);
    for (response, begun) in exports {
        finish(response, begun).await.unwrap_err();
    }
}
