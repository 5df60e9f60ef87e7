//! One person on several platforms: linking by code, unlinking, and taking that back.

use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::conversations::said;
use crate::support::people::{Person, as_bridge, person};
use crate::support::{Fields, Reply, Tenant, World, eventually};

/// Someone on Telegram and on the web, who has spoken on both, apart; the web was last.
struct Apart {
    world: World,
    tenant: Tenant,
    bridge: String,
    ada: Person,
    telegram: Value,
    web: Value,
}

async fn apart() -> Apart {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    let bridge = world.bridge_key(&tenant, &["telegram"]).await;
    let ada = person(&world, &tenant, "ada").await;
    let telegram = world.say(&bridge, "telegram:5", "from the train").await;
    world.clock.advance(Duration::from_secs(60));
    let web = world.resolve(&ada.token, json!({})).await.expect(200);
    let session = web.text("session_id");
    world
        .append(&ada.token, session, json!([said("from the desk")]))
        .await
        .expect(201);
    Apart {
        world,
        tenant,
        bridge,
        ada,
        telegram,
        web,
    }
}

impl Apart {
    /// The web account brings a code that Telegram showed.
    async fn link(&self) -> Value {
        let code = self.world.mint(&self.bridge, "telegram:5").await;
        self.world
            .redeem(&self.ada.token, &code, "web:ada")
            .await
            .expect(200)
    }

    async fn on_telegram(&self, method: Method, path: &str) -> Reply {
        as_bridge(
            &self.world,
            &self.bridge,
            "telegram:5",
            (method, path),
            None,
        )
        .await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn linked_by_code_both_old_keys_lead_to_the_shared_one() {
    let apart = apart().await;
    let Apart {
        world,
        tenant,
        telegram,
        web,
        ..
    } = &apart;
    let linked = apart.link().await;
    assert_eq!(linked["user_id"], telegram["user_id"]);
    assert_eq!(linked["merged_user_id"], web["user_id"]);
    let shared = json!(format!("agent:main:user:{}", linked.text("user_id")));
    assert_eq!(linked["session_key"], shared);
    assert_eq!(
        linked["session_id"], web["session_id"],
        "the newer session is the current one"
    );
    for old in [&telegram["session_key"], &web["session_key"], &shared] {
        let slot = world.slot(&tenant.key, old).await;
        assert_eq!(slot["session_key"], shared);
        assert_eq!(slot["session_id"], web["session_id"]);
        for (key, viewer) in [(&apart.ada.token, "web"), (&tenant.key, "admin")] {
            let found = world.slot(key, old).await;
            assert_eq!(found["session_id"], web["session_id"], "{viewer}");
        }
    }
    for (key, identity) in [(&apart.bridge, "telegram:5"), (&apart.ada.token, "web:ada")] {
        let resolved = world.dm(key, identity).await;
        assert_eq!(resolved["session_key"], shared);
        assert_eq!(resolved["session_id"], web["session_id"]);
        assert_eq!(
            (&resolved["linked"], &resolved["created"]),
            (&json!(true), &json!(false))
        );
    }
    // The older one is listed under every name, and can be taken up again.
    let path = format!("/v1/sessions?session_key={}", shared.as_str().unwrap());
    let listed = world.walk(&apart.ada.token, &path).await;
    let current: Vec<(&Value, &Value)> = listed
        .iter()
        .map(|one| (&one["id"], &one["current"]))
        .collect();
    assert_eq!(current.len(), 2);
    assert!(current.contains(&(&web["session_id"], &json!(true))));
    assert!(current.contains(&(&telegram["session_id"], &json!(false))));
    assert!(listed.iter().all(|one| one["session_key"] == shared));
    let path = format!("/v1/session-keys/{}/switch", telegram.text("session_key"));
    let body = json!({"session_id": telegram["session_id"]});
    let switched = world.post(&apart.ada.token, &path, body).await.expect(200);
    assert_eq!(switched["session_id"], telegram["session_id"]);
    assert_eq!(
        world.dm(&apart.bridge, "telegram:5").await["session_id"],
        telegram["session_id"]
    );
    let path = format!("/v1/users/{}/presence", linked.text("user_id"));
    let presence = world.get(&apart.ada.token, &path).await.expect(200);
    for heard in presence.list() {
        assert_eq!(heard["session_key"], shared);
        assert_eq!(heard["session_id"], telegram["session_id"]);
    }
    // One slot is listed for both; the old id of the person answers as the survivor.
    let keys = world.walk(&apart.ada.token, "/v1/session-keys").await;
    assert_eq!(
        keys.iter()
            .map(|one| &one["session_key"])
            .collect::<Vec<_>>(),
        [&shared]
    );
    let old = format!("/v1/users/{}", web.text("user_id"));
    for key in [&tenant.key, &apart.ada.token] {
        assert_eq!(
            world.get(key, &old).await.expect(200)["id"],
            linked["user_id"]
        );
    }
    let filtered = format!("/v1/sessions?user_id={}", web.text("user_id"));
    assert_eq!(world.walk(&tenant.key, &filtered).await.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unlinked_account_reaches_nothing_of_the_other_and_undo_joins_them_again() {
    let apart = apart().await;
    let Apart {
        world,
        tenant,
        telegram,
        web,
        ada,
        bridge,
    } = &apart;
    let linked = apart.link().await;
    let shared = linked.text("session_key");
    // Said after the link: by both in one, by Telegram alone in another.
    world.say(bridge, "telegram:5", "both spoke here").await;
    let path = format!("/v1/session-keys/{shared}/reset");
    apart.on_telegram(Method::POST, &path).await.expect(200);
    let alone = world.say(bridge, "telegram:5", "only telegram").await;
    let pending = world.mint(bridge, "telegram:5").await;
    let web_id = world
        .identity_id(&tenant.key, &linked["user_id"], "web:ada")
        .await;
    let telegram_id = world
        .identity_id(&tenant.key, &linked["user_id"], "telegram:5")
        .await;
    // The web account came later: it may not throw Telegram out.
    world
        .delete(&ada.token, &format!("/v1/identities/{telegram_id}"))
        .await
        .expect_problem(403, "older_identity");
    let parted = apart
        .on_telegram(Method::DELETE, &format!("/v1/identities/{web_id}"))
        .await
        .expect(200);
    assert_eq!(parted["previous_user_id"], linked["user_id"]);
    assert_ne!(parted["user_id"], linked["user_id"]);

    let me = world.get(&ada.token, "/v1/users/me").await.expect(200);
    assert_eq!(
        (&me["id"], &me["linked"]),
        (&parted["user_id"], &json!(false))
    );
    let user = linked.text("user_id");
    for foreign in [
        format!("/v1/users/{user}"),
        format!("/v1/users/{}", web.text("user_id")),
        format!("/v1/users/{user}/identities"),
        format!("/v1/session-keys/{shared}"),
        format!("/v1/session-keys/{}", telegram.text("session_key")),
        format!("/v1/sessions/{}", telegram.text("session_id")),
        format!("/v1/sessions/{}/messages", web.text("session_id")),
        format!("/v1/sessions/{}", alone.text("session_id")),
    ] {
        assert_eq!(
            world.get(&ada.token, &foreign).await.status,
            404,
            "{foreign}"
        );
    }
    let listed = world.walk(&ada.token, "/v1/sessions").await;
    assert_eq!(
        listed,
        Vec::<Value>::new(),
        "nothing in which only the web account spoke is left"
    );
    let own = world.resolve(&ada.token, json!({})).await.expect(200);
    assert_eq!(own["session_key"], web["session_key"]);
    assert_eq!(own["created"], true);
    // The person who stays has all of it, still under the shared key.
    let there = world.dm(bridge, "telegram:5").await;
    assert_eq!(
        (&there["session_key"], &there["session_id"]),
        (&json!(shared), &alone["session_id"])
    );
    let stayed = apart
        .on_telegram(Method::GET, &format!("/v1/sessions?session_key={shared}"))
        .await
        .expect(200);
    assert_eq!(stayed.list().len(), 3);
    assert_eq!(
        apart
            .on_telegram(
                Method::GET,
                &format!("/v1/session-keys/{}", web.text("session_key"))
            )
            .await
            .status,
        404
    );
    // A code that was shown before is good for the one who showed it, and joins them only by their will.
    world
        .append(
            &ada.token,
            own.text("session_id"),
            json!([said("on my own")]),
        )
        .await
        .expect(201);
    let undo = format!("/v1/identities/{web_id}/undo-unlink");
    world
        .post(&ada.token, &undo, json!({}))
        .await
        .expect_problem(403, "proof_required");
    world
        .post(&ada.token, &undo, json!({"code": "ABCDEFGH"}))
        .await
        .expect_problem(404, "code_not_found");
    let undone = world
        .post(&ada.token, &undo, json!({ "code": pending }))
        .await
        .expect(200);
    assert_eq!(undone["user_id"], linked["user_id"]);
    let me = world.get(&ada.token, "/v1/users/me").await.expect(200);
    assert_eq!(me["id"], linked["user_id"]);
    assert_eq!(
        world.slot(&tenant.key, &web["session_key"]).await["session_key"],
        shared
    );
    let everything = world
        .walk(&ada.token, &format!("/v1/sessions?session_key={shared}"))
        .await;
    assert_eq!(everything.len(), 4);
    world
        .post(&tenant.key, &undo, json!({}))
        .await
        .expect_problem(409, "undo_not_possible");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_only_one_account_said_goes_with_it_and_an_admin_takes_it_back() {
    let apart = apart().await;
    let Apart {
        world,
        tenant,
        telegram,
        web,
        ada,
        bridge,
    } = &apart;
    let linked = apart.link().await;
    // A conversation under a key of the web account's own, and one in a group on Telegram.
    let mine = json!({"session_key": "mine", "id": "draft", "messages": [said("mine")]});
    world.session(&ada.token, mine).await;
    let group = json!({"identity": "telegram:5", "chat": {"type": "group", "id": "7"}});
    let group = world.resolve(bridge, group).await.expect(200);
    let web_id = world
        .identity_id(&tenant.key, &linked["user_id"], "web:ada")
        .await;
    let parted = world
        .delete(&tenant.key, &format!("/v1/identities/{web_id}"))
        .await
        .expect(200);
    assert_eq!(parted["conversations"], 2);
    // Both accounts go on where they were before they were linked.
    let own = world.resolve(&ada.token, json!({})).await.expect(200);
    assert_eq!(
        (&own["session_key"], &own["session_id"]),
        (&web["session_key"], &web["session_id"])
    );
    assert_eq!(
        world
            .get(&ada.token, "/v1/sessions/draft")
            .await
            .expect(200)["session_key"],
        "mine"
    );
    assert_eq!(
        world
            .get(&ada.token, "/v1/session-keys/mine")
            .await
            .expect(200)["session_id"],
        "draft"
    );
    let there = world.dm(bridge, "telegram:5").await;
    assert_eq!(there["session_id"], telegram["session_id"]);
    assert_eq!(
        there["session_key"], linked["session_key"],
        "also with one identity left"
    );
    let in_group = format!("/v1/session-keys/{}", group.text("session_key"));
    apart.on_telegram(Method::GET, &in_group).await.expect(200);
    assert_eq!(world.get(&ada.token, &in_group).await.status, 404);
    assert_eq!(
        apart
            .on_telegram(Method::GET, "/v1/session-keys/mine")
            .await
            .status,
        404
    );
    world
        .delete(&tenant.key, &format!("/v1/identities/{web_id}"))
        .await
        .expect_problem(409, "last_identity");

    world.clock.advance(Duration::from_secs(29 * 24 * 3600));
    let ada = person(world, tenant, "ada").await;
    let undo = format!("/v1/identities/{web_id}/undo-unlink");
    world.post(&tenant.key, &undo, json!({})).await.expect(200);
    assert_eq!(ada.user_id, parted.text("user_id"));
    let me = world.get(&ada.token, "/v1/users/me").await.expect(200);
    assert_eq!(me["id"], linked["user_id"]);
    assert_eq!(
        world
            .get(&ada.token, "/v1/sessions/draft")
            .await
            .expect(200)["user_id"],
        linked["user_id"]
    );
    world
        .delete(&tenant.key, &format!("/v1/identities/{web_id}"))
        .await
        .expect(200);
    world.clock.advance(Duration::from_secs(31 * 24 * 3600));
    world
        .post(&tenant.key, &undo, json!({}))
        .await
        .expect_problem(409, "undo_not_possible");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_shows_who_would_be_joined_and_leaves_the_code() {
    let apart = apart().await;
    let Apart {
        world,
        tenant,
        telegram,
        ada,
        ..
    } = &apart;
    let code = world.mint(&apart.bridge, "telegram:5").await;
    let body = json!({"code": code, "dry_run": true});
    for _ in 0..2 {
        let shown = world
            .post(&ada.token, "/v1/link-codes/redeem", body.clone())
            .await
            .expect(200);
        assert_eq!(shown["dry_run"], true);
        assert_eq!(shown["user_id"], telegram["user_id"]);
        assert_eq!(shown["identities"], json!(["web:ada"]));
        assert_eq!(shown["moved"]["conversations"], 1);
    }
    assert_eq!(world.walk(&tenant.key, "/v1/users").await.len(), 2);
    world.redeem(&ada.token, &code, "web:ada").await.expect(200);
    let again = world.mint(&apart.bridge, "telegram:5").await;
    world
        .redeem(&ada.token, &again, "web:ada")
        .await
        .expect_problem(409, "already_linked");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_other_account_is_told() {
    let apart = apart().await;
    let Apart {
        world,
        tenant,
        bridge,
        ..
    } = &apart;
    world.link(bridge, "telegram:5", "telegram:6").await;
    apart.link().await;
    let told: Vec<(String, String, Value)> = sqlx::query_as(
        "select platform, chat_ref, payload
           from deliveries
          where tenant_id = $1
            and kind = 'security'
            and state = 'pending'
          order by created_at, platform, chat_ref",
    )
    .bind(tenant.uuid())
    .fetch_all(&mut world.superuser().await)
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
    let actions: Vec<Value> = world
        .walk(&tenant.key, "/v1/audit")
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
async fn two_people_with_logins_are_merged_by_an_admin_alone() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let ada = person(&world, &tenant, "ada").await;
    let eve = person(&world, &tenant, "eve").await;
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
async fn a_person_has_at_most_a_hundred_accounts_and_twenty_merges_a_day() {
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
    let apart = apart().await;
    let Apart {
        world,
        tenant,
        telegram,
        web,
        ada,
        bridge,
    } = &apart;
    let spec = |linked: &str| json!({"upstream": {"kind": "demo"}, "linked_sessions": linked});
    world
        .put(&tenant.key, "/v1/agents/main", spec("separate"))
        .await
        .expect(200);
    apart.link().await;
    let resolve = async || {
        (
            world.dm(bridge, "telegram:5").await,
            world.dm(&ada.token, "web:ada").await,
        )
    };
    let (on_telegram, on_web) = resolve().await;
    assert_eq!(on_telegram["user_id"], on_web["user_id"]);
    assert_eq!(
        (&on_telegram["session_key"], &on_telegram["session_id"]),
        (&telegram["session_key"], &telegram["session_id"])
    );
    assert_eq!(
        (&on_web["session_key"], &on_web["session_id"]),
        (&web["session_key"], &web["session_id"])
    );
    world
        .put(&tenant.key, "/v1/agents/main", spec("shared"))
        .await
        .expect(200);
    let (on_telegram, on_web) = resolve().await;
    assert_eq!(on_telegram["session_key"], on_web["session_key"]);
    assert_eq!(on_telegram["session_id"], web["session_id"]);
    assert_eq!(
        world.slot(&tenant.key, &telegram["session_key"]).await["session_key"],
        on_web["session_key"]
    );
    world
        .put(&tenant.key, "/v1/agents/main", spec("separate"))
        .await
        .expect(200);
    let (on_telegram, on_web) = resolve().await;
    assert_eq!(on_telegram["session_key"], telegram["session_key"]);
    assert_eq!(on_web["session_key"], web["session_key"]);
    assert_eq!(on_telegram["created"], false);
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_that_is_said_while_accounts_are_linked_and_parted_is_lost() {
    let apart = apart().await;
    let Apart {
        world,
        tenant,
        bridge,
        ada,
        telegram,
        ..
    } = &apart;
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
    let key = format!("/v1/session-keys/{}/messages", telegram.text("session_key"));
    let by_id = format!("/v1/sessions/{}/messages", telegram.text("session_id"));
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
                    let resolved = world.resolve(&ada.token, json!({})).await;
                    if [429, 503].contains(&resolved.status) {
                        continue;
                    }
                    let session = resolved.expect(200)["session_id"].clone();
                    asked = format!("/v1/sessions/{}/messages", session.as_str().unwrap());
                    &asked
                }
            };
            let text = format!("{name} {n}");
            let body = json!({"messages": [said(&text)]});
            let request = world.client.post(world.url_on(n % 2, path)).json(&body);
            let request = match name {
                "web" => request.bearer_auth(&ada.token),
                _ => request
                    .bearer_auth(bridge)
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
            let linked = apart.link().await;
            more().await;
            let id = world
                .identity_id(&tenant.key, &linked["user_id"], "web:ada")
                .await;
            let path = format!("/v1/identities/{id}");
            world.delete(&tenant.key, &path).await.expect(200);
            more().await;
        }
        apart.link().await;
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    };
    let (by_key, by_id, by_web, ()) = tokio::join!(
        talk("key", Some(&key)),
        talk("id", Some(&by_id)),
        talk("web", None),
        link_and_part()
    );
    let mut stored = Vec::new();
    for session in world.walk(&tenant.key, "/v1/sessions").await {
        let path = format!("/v1/sessions/{}/messages", session.text("id"));
        stored.extend(world.contents(&tenant.key, &path).await);
    }
    for told in [by_key, by_id, by_web] {
        assert!(told.len() > 5, "hardly anything was said: {told:?}");
        for text in told {
            let times = stored.iter().filter(|there| **there == text).count();
            assert_eq!(times, 1, "{text}");
        }
    }
    let owners: i64 = sqlx::query_scalar("select count(distinct user_id) from conversations")
        .fetch_one(&mut world.superuser().await)
        .await
        .unwrap();
    assert_eq!(
        owners, 1,
        "everything belongs to the one person that is left"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parting_is_not_taken_back_over_the_head_of_a_third() {
    let apart = apart().await;
    let Apart { world, tenant, .. } = &apart;
    let linked = apart.link().await;
    let web_id = world
        .identity_id(&tenant.key, &linked["user_id"], "web:ada")
        .await;
    let path = format!("/v1/identities/{web_id}");
    world.delete(&tenant.key, &path).await.expect(200);
    // Somebody else took it in since.
    world.link(&tenant.key, "discord:7", "web:ada").await;
    let undo = world
        .post(&tenant.key, &format!("{path}/undo-unlink"), json!({}))
        .await;
    undo.expect_problem(409, "undo_not_possible");
    let third = world.dm(&tenant.key, "discord:7").await;
    assert_ne!(third["user_id"], linked["user_id"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_merge_into_an_old_id_counts_for_the_survivor() {
    let apart = apart().await;
    let Apart {
        world, tenant, web, ..
    } = &apart;
    let linked = apart.link().await;
    let old = format!("/v1/users/{}/merge", web.text("user_id"));
    // With the link above, twenty.
    for n in 0..20 {
        let other = world.dm(&tenant.key, &format!("discord:{n}")).await;
        let body = json!({"from_user_id": other["user_id"], "reason": "one person"});
        let merged = world.post(&tenant.key, &old, body).await;
        match n {
            19 => merged.expect_problem(429, "too_many_merges"),
            _ => merged.expect(200),
        };
    }
    let path = format!("/v1/users/{}/identities", linked.text("user_id"));
    let accounts = world.get(&tenant.key, &path).await.expect(200);
    assert_eq!(accounts.list().len(), 21);
}
