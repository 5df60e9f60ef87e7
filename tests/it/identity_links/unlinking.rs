//! Unlinking identities, and undoing it: what goes with an identity, and what stays.

use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::conversations::user_message;
use crate::support::data::two_platforms::TwoPlatforms;
use crate::support::people::sign_in;
use crate::support::{Fields, Reply, eventually};

#[tokio::test(flavor = "multi_thread")]
async fn an_unlinked_identity_reaches_nothing_of_the_other_and_undo_merges_them_again() {
    let two = TwoPlatforms::new().await;
    let linked = two.link().await;
    let shared = linked.text("session_key");
    // Said after the link: by both in one, by Telegram alone in another.
    two.world
        .write_dm(&two.bridge_key, "telegram:5", "both spoke here")
        .await;
    let path = format!("/v1/session-keys/{shared}/reset");
    two.on_telegram(Method::POST, &path).await.expect(200);
    let alone = two
        .world
        .write_dm(&two.bridge_key, "telegram:5", "only telegram")
        .await;
    let pending = two.world.mint(&two.bridge_key, "telegram:5").await;
    let web_id = two.web_id(&linked).await;
    let telegram_id = two
        .world
        .identity_id(&two.tenant.key, &linked["user_id"], "telegram:5")
        .await;
    // The web account came later: it may not throw Telegram out.
    two.world
        .delete(&two.ada.token, &format!("/v1/identities/{telegram_id}"))
        .await
        .expect_problem(403, "older_identity");
    let parted = two
        .on_telegram(Method::DELETE, &format!("/v1/identities/{web_id}"))
        .await
        .expect(200);
    assert_eq!(parted["previous_user_id"], linked["user_id"]);
    assert_ne!(parted["user_id"], linked["user_id"]);

    let me = two.user_on_web().await;
    assert_eq!(
        (&me["id"], &me["linked"]),
        (&parted["user_id"], &json!(false))
    );
    let user = linked.text("user_id");
    for foreign in [
        format!("/v1/users/{user}"),
        format!("/v1/users/{}", two.web.text("user_id")),
        format!("/v1/users/{user}/identities"),
        format!("/v1/session-keys/{shared}"),
        format!("/v1/session-keys/{}", two.telegram.text("session_key")),
        format!("/v1/sessions/{}", two.telegram.text("session_id")),
        format!("/v1/sessions/{}/messages", two.web.text("session_id")),
        format!("/v1/sessions/{}", alone.text("session_id")),
    ] {
        assert_eq!(two.on_web(&foreign).await.status, 404, "{foreign}");
    }
    let listed = two.world.walk(&two.ada.token, "/v1/sessions").await;
    assert_eq!(
        listed,
        Vec::<Value>::new(),
        "nothing in which only the web account spoke is left"
    );
    let own = two.dm_on_web().await;
    assert_eq!(own["session_key"], two.web["session_key"]);
    assert_eq!(own["created"], true);
    // The person who stays has all of it, still under the shared key.
    let there = two.dm_on_telegram().await;
    assert_eq!(
        (&there["session_key"], &there["session_id"]),
        (&json!(shared), &alone["session_id"])
    );
    let stayed = two
        .on_telegram(Method::GET, &format!("/v1/sessions?session_key={shared}"))
        .await
        .expect(200);
    assert_eq!(stayed.list().len(), 3);
    assert_eq!(
        two.on_telegram(
            Method::GET,
            &format!("/v1/session-keys/{}", two.web.text("session_key"))
        )
        .await
        .status,
        404
    );
    // A code that was shown before is good for the one who showed it, and joins them only by their will.
    two.world
        .append(
            &two.ada.token,
            own.text("session_id"),
            json!([user_message("on my own")]),
        )
        .await
        .expect(201);
    let undo = format!("/v1/identities/{web_id}/undo-unlink");
    two.world
        .post(&two.ada.token, &undo, json!({}))
        .await
        .expect_problem(403, "proof_required");
    two.world
        .post(&two.ada.token, &undo, json!({"code": "ABCDEFGH"}))
        .await
        .expect_problem(404, "code_not_found");
    let undone = two
        .world
        .post(&two.ada.token, &undo, json!({ "code": pending }))
        .await
        .expect(200);
    assert_eq!(undone["user_id"], linked["user_id"]);
    let me = two.user_on_web().await;
    assert_eq!(me["id"], linked["user_id"]);
    assert_eq!(
        two.slot(&two.web["session_key"]).await["session_key"],
        shared
    );
    let everything = two
        .world
        .walk(
            &two.ada.token,
            &format!("/v1/sessions?session_key={shared}"),
        )
        .await;
    assert_eq!(everything.len(), 4);
    two.undo(&web_id)
        .await
        .expect_problem(409, "undo_not_possible");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_identity_keeps_what_only_it_said_and_an_admin_undoes_the_unlinking() {
    let mut two = TwoPlatforms::new().await;
    let linked = two.link().await;
    // A conversation under a key of the web account's own, and one in a group on Telegram.
    let mine = json!({"session_key": "mine", "id": "draft", "messages": [user_message("mine")]});
    two.world.session(&two.ada.token, mine).await;
    let group = json!({"identity": "telegram:5", "chat": {"type": "group", "id": "7"}});
    let group = two.world.resolve(&two.bridge_key, group).await.expect(200);
    let web_id = two.web_id(&linked).await;
    let parted = two.unlink(&web_id).await.expect(200);
    assert_eq!(parted["conversations"], 2);
    // Both accounts go on where they were before they were linked.
    let own = two.dm_on_web().await;
    assert_eq!(
        (&own["session_key"], &own["session_id"]),
        (&two.web["session_key"], &two.web["session_id"])
    );
    assert_eq!(
        two.on_web("/v1/sessions/draft").await.expect(200)["session_key"],
        "mine"
    );
    assert_eq!(
        two.on_web("/v1/session-keys/mine").await.expect(200)["session_id"],
        "draft"
    );
    let there = two.dm_on_telegram().await;
    assert_eq!(there["session_id"], two.telegram["session_id"]);
    assert_eq!(
        there["session_key"], linked["session_key"],
        "also with one identity left"
    );
    let in_group = format!("/v1/session-keys/{}", group.text("session_key"));
    two.on_telegram(Method::GET, &in_group).await.expect(200);
    assert_eq!(two.on_web(&in_group).await.status, 404);
    assert_eq!(
        two.on_telegram(Method::GET, "/v1/session-keys/mine")
            .await
            .status,
        404
    );
    two.unlink(&web_id)
        .await
        .expect_problem(409, "last_identity");

    two.world.clock.advance(Duration::from_secs(29 * 24 * 3600));
    two.ada = sign_in(&two.world, &two.tenant, "ada").await;
    two.undo(&web_id).await.expect(200);
    assert_eq!(two.ada.user_id, parted.text("user_id"));
    let me = two.user_on_web().await;
    assert_eq!(me["id"], linked["user_id"]);
    assert_eq!(
        two.on_web("/v1/sessions/draft").await.expect(200)["user_id"],
        linked["user_id"]
    );
    two.unlink(&web_id).await.expect(200);
    two.world.clock.advance(Duration::from_secs(31 * 24 * 3600));
    two.undo(&web_id)
        .await
        .expect_problem(409, "undo_not_possible");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_message_is_lost_while_identities_are_linked_and_unlinked() {
    let two = TwoPlatforms::new().await;
    let stop = std::sync::atomic::AtomicBool::new(false);
    let sent = std::sync::atomic::AtomicUsize::new(0);
    // Some more is said.
    let more = async || {
        let before = sent.load(std::sync::atomic::Ordering::Relaxed);
        let three_more = async || sent.load(std::sync::atomic::Ordering::Relaxed) >= before + 3;
        eventually("more is said", Duration::from_secs(20), three_more).await;
    };
    let stopped = || stop.load(std::sync::atomic::Ordering::Relaxed);
    // Through a key, through an id, and by asking where to: each as often as it can.
    let key = format!(
        "/v1/session-keys/{}/messages",
        two.telegram.text("session_key")
    );
    let by_id = format!("/v1/sessions/{}/messages", two.telegram.text("session_id"));
    let talk = async |name: &str, path: Option<&str>| {
        let mut told = Vec::new();
        for n in 0.. {
            if stopped() {
                break;
            }
            let asked;
            let path = match path {
                Some(path) => path,
                None => {
                    let resolved = two.world.resolve(&two.ada.token, json!({})).await;
                    if [429, 503].contains(&resolved.status) {
                        continue;
                    }
                    let session = resolved.expect(200)["session_id"].clone();
                    asked = format!("/v1/sessions/{}/messages", session.as_str().unwrap());
                    &asked
                }
            };
            let text = format!("{name} {n}");
            let body = json!({"messages": [user_message(&text)]});
            let request = two
                .world
                .client
                .post(two.world.url_on(n % 2, path))
                .json(&body);
            let request = match name {
                "web" => request.bearer_auth(&two.ada.token),
                _ => request
                    .bearer_auth(&two.bridge_key)
                    .header("x-throughline-identity", "telegram:5"),
            };
            let reply = Reply::of(request).await;
            match reply.status {
                201 => {
                    sent.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    told.push(text);
                }
                // Refused, and so not said: the client tries again.
                429 | 503 => {}
                // A session that went to the other side between the two calls.
                404 if name == "web" => {}
                status => panic!("{name}: {status} {}", reply.body),
            }
        }
        told
    };
    let link_and_part = async || {
        for _ in 0..6 {
            let linked = two.link().await;
            more().await;
            let id = two.web_id(&linked).await;
            let path = format!("/v1/identities/{id}");
            two.world.delete(&two.tenant.key, &path).await.expect(200);
            more().await;
        }
        two.link().await;
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    };
    let (by_key, by_id, by_web, ()) = tokio::join!(
        talk("key", Some(&key)),
        talk("id", Some(&by_id)),
        talk("web", None),
        link_and_part()
    );
    let mut stored = Vec::new();
    for session in two.world.walk(&two.tenant.key, "/v1/sessions").await {
        let path = format!("/v1/sessions/{}/messages", session.text("id"));
        stored.extend(two.world.contents(&two.tenant.key, &path).await);
    }
    for told in [by_key, by_id, by_web] {
        assert!(told.len() > 5, "hardly anything was said: {told:?}");
        for text in told {
            let times = stored.iter().filter(|there| **there == text).count();
            assert_eq!(times, 1, "{text}");
        }
    }
    let owners: i64 = sqlx::query_scalar("select count(distinct user_id) from conversations")
        .fetch_one(&mut two.world.superuser().await)
        .await
        .unwrap();
    assert_eq!(
        owners, 1,
        "everything belongs to the one person that is left"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unlinking_is_not_undone_after_a_third_user_linked_the_identity() {
    let two = TwoPlatforms::new().await;
    let linked = two.link().await;
    let web_id = two.web_id(&linked).await;
    let path = format!("/v1/identities/{web_id}");
    two.world.delete(&two.tenant.key, &path).await.expect(200);
    // Somebody else took it in since.
    two.world
        .link(&two.tenant.key, "discord:7", "web:ada")
        .await;
    let undo = two
        .world
        .post(&two.tenant.key, &format!("{path}/undo-unlink"), json!({}))
        .await;
    undo.expect_problem(409, "undo_not_possible");
    let third = two.world.dm(&two.tenant.key, "discord:7").await;
    assert_ne!(third["user_id"], linked["user_id"]);
}
