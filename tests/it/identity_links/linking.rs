//! One person on several platforms: linking by code, unlinking, and taking that back.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::data::two_platforms::TwoPlatforms;
use crate::support::people::sign_in;
use crate::support::{Fields, World};

#[tokio::test(flavor = "multi_thread")]
async fn linked_by_code_both_old_keys_lead_to_the_shared_one() {
    let two = TwoPlatforms::new().await;
    let linked = two.link().await;
    assert_eq!(linked["user_id"], two.telegram["user_id"]);
    assert_eq!(linked["merged_user_id"], two.web["user_id"]);
    let shared = json!(format!("agent:main:user:{}", linked.text("user_id")));
    assert_eq!(linked["session_key"], shared);
    assert_eq!(
        linked["session_id"], two.web["session_id"],
        "the newer session is the current one"
    );
    for old in [
        &two.telegram["session_key"],
        &two.web["session_key"],
        &shared,
    ] {
        let slot = two.slot(old).await;
        assert_eq!(slot["session_key"], shared);
        assert_eq!(slot["session_id"], two.web["session_id"]);
        for (key, viewer) in [(&two.ada.token, "web"), (&two.tenant.key, "admin")] {
            let found = two.world.slot(key, old).await;
            assert_eq!(found["session_id"], two.web["session_id"], "{viewer}");
        }
    }
    for (key, identity) in [(&two.bridge_key, "telegram:5"), (&two.ada.token, "web:ada")] {
        let resolved = two.world.dm(key, identity).await;
        assert_eq!(resolved["session_key"], shared);
        assert_eq!(resolved["session_id"], two.web["session_id"]);
        assert_eq!(
            (&resolved["linked"], &resolved["created"]),
            (&json!(true), &json!(false))
        );
    }
    // The older one is listed under every name, and can be taken up again.
    let path = format!("/v1/sessions?session_key={}", shared.as_str().unwrap());
    let listed = two.world.walk(&two.ada.token, &path).await;
    let current: Vec<(&Value, &Value)> = listed
        .iter()
        .map(|one| (&one["id"], &one["current"]))
        .collect();
    assert_eq!(current.len(), 2);
    assert!(current.contains(&(&two.web["session_id"], &json!(true))));
    assert!(current.contains(&(&two.telegram["session_id"], &json!(false))));
    assert!(listed.iter().all(|one| one["session_key"] == shared));
    let path = format!(
        "/v1/session-keys/{}/switch",
        two.telegram.text("session_key")
    );
    let body = json!({"session_id": two.telegram["session_id"]});
    let switched = two
        .world
        .post(&two.ada.token, &path, body)
        .await
        .expect(200);
    assert_eq!(switched["session_id"], two.telegram["session_id"]);
    assert_eq!(
        two.dm_on_telegram().await["session_id"],
        two.telegram["session_id"]
    );
    let path = format!("/v1/users/{}/presence", linked.text("user_id"));
    let presence = two.on_web(&path).await.expect(200);
    for heard in presence.list() {
        assert_eq!(heard["session_key"], shared);
        assert_eq!(heard["session_id"], two.telegram["session_id"]);
    }
    // One slot is listed for both; the old id of the person answers as the survivor.
    let keys = two.world.walk(&two.ada.token, "/v1/session-keys").await;
    assert_eq!(
        keys.iter()
            .map(|one| &one["session_key"])
            .collect::<Vec<_>>(),
        [&shared]
    );
    let old = format!("/v1/users/{}", two.web.text("user_id"));
    for key in [&two.tenant.key, &two.ada.token] {
        assert_eq!(
            two.world.get(key, &old).await.expect(200)["id"],
            linked["user_id"]
        );
    }
    let filtered = format!("/v1/sessions?user_id={}", two.web.text("user_id"));
    assert_eq!(two.world.walk(&two.tenant.key, &filtered).await.len(), 2);
}

/// To ask where a message would go makes a session, in which nothing was written.
#[tokio::test(flavor = "multi_thread")]
async fn a_newer_session_without_messages_does_not_become_the_shared_one() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let bridge = world.bridge_key(&tenant, &["telegram", "slack"]).await;
    let written = world
        .write_dm(&bridge, "telegram:1", "my boat is called Argo")
        .await;
    let empty = world.dm(&bridge, "slack:1").await;
    assert_ne!(empty["session_id"], written["session_id"]);
    let linked = world.link(&bridge, "telegram:1", "slack:1").await;
    assert_eq!(linked["session_id"], written["session_id"]);
    let next = world.dm(&bridge, "slack:1").await;
    assert_eq!(next["session_id"], written["session_id"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_shows_who_would_be_merged_and_leaves_the_code() {
    let two = TwoPlatforms::new().await;
    let code = two.world.mint(&two.bridge_key, "telegram:5").await;
    let body = json!({"code": code, "dry_run": true});
    for _ in 0..2 {
        let shown = two
            .world
            .post(&two.ada.token, "/v1/link-codes/redeem", body.clone())
            .await
            .expect(200);
        assert_eq!(shown["dry_run"], true);
        assert_eq!(shown["user_id"], two.telegram["user_id"]);
        assert_eq!(shown["identities"], json!(["web:ada"]));
        assert_eq!(shown["moved"]["conversations"], 1);
    }
    assert_eq!(two.world.walk(&two.tenant.key, "/v1/users").await.len(), 2);
    two.world
        .redeem(&two.ada.token, &code, "web:ada")
        .await
        .expect(200);
    let again = two.world.mint(&two.bridge_key, "telegram:5").await;
    two.world
        .redeem(&two.ada.token, &again, "web:ada")
        .await
        .expect_problem(409, "already_linked");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_other_identity_is_notified() {
    let two = TwoPlatforms::new().await;
    two.world
        .link(&two.bridge_key, "telegram:5", "telegram:6")
        .await;
    two.link().await;
    let told: Vec<(String, String, Value)> = sqlx::query_as(
        "select platform, chat_ref, payload
           from deliveries
          where tenant_id = $1
            and kind = 'security'
            and state = 'pending'
          order by created_at, platform, chat_ref",
    )
    .bind(two.tenant.uuid())
    .fetch_all(&mut two.world.superuser().await)
    .await
    .unwrap();
    let chats: Vec<(&str, &str)> = told
        .iter()
        .map(|(platform, chat, _)| (&**platform, &**chat))
        .collect();
    // The one that redeems is told by the answer; the first link told the first account.
    assert_eq!(
        chats,
        [
            ("telegram", "dm:5"),
            ("telegram", "dm:5"),
            ("telegram", "dm:6")
        ]
    );
    assert!(told[1].2.text("text").contains("web:ada"));
    let actions: Vec<Value> = two
        .world
        .walk(&two.tenant.key, "/v1/audit")
        .await
        .iter()
        .map(|entry| entry["action"].clone())
        .collect();
    assert_eq!(
        actions
            .iter()
            .filter(|action| **action == "user.merge")
            .count(),
        2
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn two_users_with_logins_are_merged_by_an_admin_alone() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let ada = sign_in(&world, &tenant, "ada").await;
    let eve = sign_in(&world, &tenant, "eve").await;
    let code = world.mint(&ada.token, "web:ada").await;
    world
        .redeem(&eve.token, &code, "web:eve")
        .await
        .expect_problem(409, "merge_required");
    let path = format!("/v1/users/{}/merge", ada.user_id);
    let body = |reason: &str, dry_run: bool| json!({"from_user_id": eve.user_id, "reason": reason, "dry_run": dry_run});
    world
        .post(&tenant.key, &path, body(" ", false))
        .await
        .expect_problem(422, "invalid_value");
    let shown = world
        .post(&tenant.key, &path, body("one person", true))
        .await
        .expect(200);
    assert_eq!(
        (&shown["dry_run"], &shown["moved"]["identities"]),
        (&json!(true), &json!(1))
    );
    assert_eq!(
        world.get(&eve.token, "/v1/users/me").await.expect(200)["id"],
        json!(eve.user_id)
    );
    world
        .post(&tenant.key, &path, body("one person", false))
        .await
        .expect(200);
    assert_eq!(
        world.get(&eve.token, "/v1/users/me").await.expect(200)["id"],
        json!(ada.user_id)
    );
    world
        .post(&tenant.key, &path, body("again", false))
        .await
        .expect_problem(409, "already_linked");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_has_at_most_a_hundred_identities_and_twenty_merges_a_day() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let accounts: Vec<String> = (0..79).map(|n| format!("irc@net:a{n}")).collect();
    let made = world
        .post(&tenant.key, "/v1/users", json!({ "identities": accounts }))
        .await
        .expect(201);
    let into = made.text("id");
    let merge = async |from: &str| {
        let body = json!({"from_user_id": from, "reason": "one person"});
        world
            .post(&tenant.key, &format!("/v1/users/{into}/merge"), body)
            .await
    };
    for n in 0..20 {
        let other = world.dm(&tenant.key, &format!("telegram:{n}")).await;
        merge(other.text("user_id")).await.expect(200);
    }
    let other = world.dm(&tenant.key, "telegram:98").await;
    let refused = merge(other.text("user_id")).await;
    refused.expect_problem(429, "too_many_merges");
    world.clock.advance(Duration::from_secs(24 * 3600 + 1));
    merge(other.text("user_id")).await.expect(200);
    let other = world.dm(&tenant.key, "telegram:99").await;
    merge(other.text("user_id"))
        .await
        .expect_problem(409, "too_many_identities");
}

#[tokio::test(flavor = "multi_thread")]
async fn separate_sessions_stay_apart_and_the_agent_may_change_its_mind() {
    let two = TwoPlatforms::new().await;
    two.set_linked_sessions("separate").await;
    two.link().await;
    let resolve = async || {
        (
            two.dm_on_telegram().await,
            two.world.dm(&two.ada.token, "web:ada").await,
        )
    };
    let (on_telegram, on_web) = resolve().await;
    assert_eq!(on_telegram["user_id"], on_web["user_id"]);
    assert_eq!(
        (&on_telegram["session_key"], &on_telegram["session_id"]),
        (&two.telegram["session_key"], &two.telegram["session_id"])
    );
    assert_eq!(
        (&on_web["session_key"], &on_web["session_id"]),
        (&two.web["session_key"], &two.web["session_id"])
    );
    two.set_linked_sessions("shared").await;
    let (on_telegram, on_web) = resolve().await;
    assert_eq!(on_telegram["session_key"], on_web["session_key"]);
    assert_eq!(on_telegram["session_id"], two.web["session_id"]);
    assert_eq!(
        two.slot(&two.telegram["session_key"]).await["session_key"],
        on_web["session_key"]
    );
    two.set_linked_sessions("separate").await;
    let (on_telegram, on_web) = resolve().await;
    assert_eq!(on_telegram["session_key"], two.telegram["session_key"]);
    assert_eq!(on_web["session_key"], two.web["session_key"]);
    assert_eq!(on_telegram["created"], false);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_merge_into_an_old_id_counts_for_the_survivor() {
    let two = TwoPlatforms::new().await;
    let linked = two.link().await;
    let old = format!("/v1/users/{}/merge", two.web.text("user_id"));
    // With the link above, twenty.
    for n in 0..20 {
        let other = two.world.dm(&two.tenant.key, &format!("discord:{n}")).await;
        let body = json!({"from_user_id": other["user_id"], "reason": "one person"});
        let merged = two.world.post(&two.tenant.key, &old, body).await;
        match n {
            19 => merged.expect_problem(429, "too_many_merges"),
            _ => merged.expect(200),
        };
    }
    let path = format!("/v1/users/{}/identities", linked.text("user_id"));
    let accounts = two.world.get(&two.tenant.key, &path).await.expect(200);
    assert_eq!(accounts.list().len(), 21);
}
