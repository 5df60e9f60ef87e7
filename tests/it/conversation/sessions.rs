//! Sessions: making, finding, naming, listing and deleting them, and whose they are.

use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::conversations::{assistant_message, grant, user_message};
use crate::support::people::{as_bridge, sign_in};
use crate::support::{Fields, Reply, World};

#[tokio::test(flavor = "multi_thread")]
async fn a_session_is_made_and_shown_as_the_contract_has_it() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let body =
        json!({"title": "First", "messages": [user_message("hello"), assistant_message("hi")]});
    let made = world.session(&tenant.key, body).await;
    let id = made.id();
    assert!(id.starts_with("ses_"));
    let expected = json!({
        "id": id, "session_key": null, "user_id": null, "agent": "main", "conversation_id": id,
        "parent_id": null, "edge": null, "state": "open", "end_reason": null, "title": "First", "depth": 0,
        "current": false, "message_count": 2, "token_count": made["token_count"],
        "created_at": made["created_at"], "last_active_at": made["created_at"], "ended_at": null,
        "archived": false, "pinned": false,
    });
    assert_eq!(made, expected);
    let shown = world.get(&tenant.key, &format!("/v1/sessions/{id}")).await;
    assert_eq!(shown.expect(200), made);
    assert_eq!(shown.header("etag"), "\"2\"");
    let messages = world
        .walk(&tenant.key, &format!("/v1/sessions/{id}/messages"))
        .await;
    let message = json!({
        "session_id": id, "seq": 1, "role": "user", "kind": "normal", "content": "hello",
        "tool_calls": null, "tool_call_id": null, "name": null, "reasoning_content": null, "identity": null,
        "platform": null, "token_count": messages[0]["token_count"], "turn_id": null, "undone_at": null,
        "copied_from": null,
        "created_at": made["created_at"],
    });
    assert_eq!(messages[0], message);
    assert_eq!(messages[1]["seq"], 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bridge_acts_for_the_user_it_names_and_no_other() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let (_, bridge) = world.api_key(&tenant, "bridge").await;
    world
        .get(&bridge, "/v1/sessions")
        .await
        .expect_problem(403, "identity_required");
    world
        .post(&bridge, "/v1/sessions", json!({}))
        .await
        .expect_problem(403, "identity_required");
    let list = (Method::GET, "/v1/sessions");
    as_bridge(&world, &bridge, "slack:1", list, None)
        .await
        .expect_problem(403, "platform_not_allowed");
    as_bridge(
        &world,
        &bridge,
        "nonsense",
        (Method::GET, "/v1/sessions"),
        None,
    )
    .await
    .expect_problem(400, "invalid_request");
    let made = world
        .session(
            &bridge,
            json!({"user": "telegram:1", "messages": [user_message("hi")]}),
        )
        .await;
    let id = made.id();
    let user = made["user_id"].clone();
    assert!(user.as_str().unwrap().starts_with("usr_"));
    let path = format!("/v1/sessions/{id}/messages");
    let messages = as_bridge(&world, &bridge, "telegram:1", (Method::GET, &path), None)
        .await
        .expect(200);
    assert_eq!(messages["data"][0]["identity"], "telegram:1");
    assert_eq!(messages["data"][0]["platform"], "telegram");
    let appended = as_bridge(
        &world,
        &bridge,
        "telegram:1",
        (Method::POST, &path),
        Some(json!({"messages": [user_message("more")]})),
    )
    .await
    .expect(201);
    assert_eq!(appended["messages"][0]["identity"], "telegram:1");
    let other = as_bridge(&world, &bridge, "telegram:2", (Method::GET, &path), None).await;
    other.expect_problem(404, "session_not_found");
    let by_id = json!({"user": user, "title": "named by id"});
    assert_eq!(world.session(&bridge, by_id).await["user_id"], user);
    world
        .post(
            &bridge,
            "/v1/sessions",
            json!({"user": "usr_01a1e2373db47013a539524902c63338"}),
        )
        .await
        .expect_problem(404, "not_found");
    let refused = as_bridge(
        &world,
        &bridge,
        "telegram:1",
        (Method::POST, &path),
        Some(json!({"messages": [assistant_message("not me")]})),
    )
    .await;
    refused.expect_problem(403, "role_not_allowed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_users_sessions_are_there_for_them_and_for_the_tenants_readers() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let ada = sign_in(&world, &tenant, "ada").await;
    let bob = sign_in(&world, &tenant, "bob").await;
    let (_, chat) = world.api_key(&tenant, "chat").await;
    let (_, read) = world.api_key(&tenant, "read").await;
    let id = world
        .session(&ada.token, json!({"messages": [user_message("private")]}))
        .await
        .id();
    let paths =
        ["", "/messages", "/tip", "/lineage"].map(|part| format!("/v1/sessions/{id}{part}"));
    for path in &paths {
        for key in [&bob.token, &chat] {
            world
                .get(key, path)
                .await
                .expect_problem(404, "session_not_found");
        }
        for key in [&ada.token, &tenant.key, &read] {
            world.get(key, path).await.expect(200);
        }
    }
    for (part, body) in [
        ("messages", json!({"messages": [user_message("x")]})),
        ("compress", json!({"summary": "x"})),
        ("uncompress", json!({})),
        ("branch", json!({})),
    ] {
        for key in [&bob.token, &chat] {
            let path = format!("/v1/sessions/{id}/{part}");
            let reply = world.post(key, &path, body.clone()).await;
            reply.expect_problem(404, "session_not_found");
        }
        let path = format!("/v1/sessions/{id}/{part}");
        world
            .post(&read, &path, body)
            .await
            .expect_problem(403, "missing_scope");
    }
    world
        .delete(&bob.token, &paths[0])
        .await
        .expect_problem(404, "session_not_found");
    world
        .patch(&bob.token, &paths[0], json!({"pinned": true}))
        .await
        .expect(404);
    let of_bob = format!("/v1/sessions?user_id={}", bob.user_id);
    world
        .get(&ada.token, &of_bob)
        .await
        .expect_problem(404, "not_found");
    // Each reading of a person's words by someone else is an entry, one a minute, and holds none of them.
    let audit = world.get(&tenant.key, "/v1/audit?limit=200").await;
    let entries = audit.list();
    let reads = entries
        .iter()
        .filter(|entry| entry["action"] == "conversation.read");
    assert_eq!(reads.clone().count(), 2, "{entries:?}");
    for entry in reads {
        assert_eq!(entry["target"], id);
        assert_eq!(entry["detail"]["user_id"], ada.user_id);
    }
    assert!(!audit.body.contains("private"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_reads_and_writes_and_does_nothing_else() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let ada = sign_in(&world, &tenant, "ada").await;
    let bob = sign_in(&world, &tenant, "bob").await;
    let id = world
        .session(&ada.token, json!({"messages": [user_message("come in")]}))
        .await
        .id();
    let path = format!("/v1/sessions/{id}");
    world.get(&bob.token, &path).await.expect(404);
    grant(&world, &tenant, &id, &bob.user_id).await;
    world.get(&bob.token, &path).await.expect(200);
    assert_eq!(
        world
            .contents(&bob.token, &format!("{path}/messages"))
            .await,
        ["come in"]
    );
    let said_by_bob = world
        .append(&bob.token, &id, json!([user_message("thanks")]))
        .await
        .expect(201);
    assert_eq!(said_by_bob["messages"][0]["identity"], "web:bob");
    for part in ["compress", "uncompress", "branch"] {
        let body = if part == "compress" {
            json!({"summary": "x"})
        } else {
            json!({})
        };
        let reply = world
            .post(&bob.token, &format!("{path}/{part}"), body)
            .await;
        reply.expect_problem(403, "guest_not_allowed");
    }
    world
        .delete(&bob.token, &path)
        .await
        .expect_problem(403, "guest_not_allowed");
    world
        .patch(&bob.token, &path, json!({"title": "mine now"}))
        .await
        .expect_problem(403, "guest_not_allowed");
    assert_eq!(
        world.walk(&bob.token, "/v1/sessions").await,
        Vec::<Value>::new()
    );
    world.clock.advance(Duration::from_secs(8 * 24 * 3600));
    let bob = sign_in(&world, &tenant, "bob").await;
    world
        .get(&bob.token, &path)
        .await
        .expect_problem(404, "session_not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_list_has_tips_newest_first_and_can_be_narrowed() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let ada = sign_in(&world, &tenant, "ada").await;
    let agent = json!({"upstream": {"kind": "demo"}});
    world
        .put(&tenant.key, "/v1/agents/helper", agent)
        .await
        .expect(201);
    let mut ids = Vec::new();
    for body in [
        json!({"title": "0", "messages": [user_message("x"), assistant_message("y")]}),
        json!({"title": "1", "session_key": "k1"}),
        json!({"title": "2", "agent": "helper"}),
        json!({"title": "3", "user": ada.user_id}),
        json!({"title": "4", "session_key": "k1"}),
    ] {
        ids.push(world.session(&tenant.key, body).await.id());
    }
    let archived = format!("/v1/sessions/{}", ids[4]);
    world
        .patch(&tenant.key, &archived, json!({"archived": true}))
        .await
        .expect(200);
    world
        .compress(&tenant.key, &ids[0], json!({"summary": "s"}))
        .await
        .expect(201);
    let titles = async |query: &str| -> Vec<String> {
        let listed = world
            .walk(&tenant.key, &format!("/v1/sessions{query}"))
            .await;
        let title = |session: &Value| session.text("title").to_owned();
        listed.iter().map(title).collect()
    };
    for (query, expected) in [
        ("", vec!["0", "4", "3", "2", "1"]),
        ("?limit=2", vec!["0", "4", "3", "2", "1"]),
        ("?session_key=k1", vec!["4", "1"]),
        ("?session_key=nothing-yet", vec![]),
        ("?agent=helper", vec!["2"]),
        ("?archived=true", vec!["4"]),
        ("?archived=false&limit=1", vec!["0", "3", "2", "1"]),
        ("?state=ended", vec![]),
        ("?state=open&agent=main&archived=false", vec!["0", "3", "1"]),
    ] {
        assert_eq!(titles(query).await, expected, "{query}");
    }
    assert_eq!(titles(&format!("?user_id={}", ada.user_id)).await, ["3"]);
    let under_key = world.walk(&tenant.key, "/v1/sessions?session_key=k1").await;
    let current: Vec<_> = under_key
        .iter()
        .map(|session| session["current"].clone())
        .collect();
    assert_eq!(
        current,
        [json!(false), json!(true)],
        "the first session of a new key is its current one"
    );
    let page = world
        .get(&tenant.key, "/v1/sessions?limit=1")
        .await
        .expect(200);
    let cursor = page.text("next_cursor");
    let elsewhere = format!("/v1/sessions?limit=1&archived=false&cursor={cursor}");
    world
        .get(&tenant.key, &elsewhere)
        .await
        .expect_problem(400, "invalid_cursor");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_title_an_archive_and_a_pin_hold_for_the_whole_chain() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let first = world
        .session(&tenant.key, json!({"messages": [user_message("x")]}))
        .await
        .id();
    let done = world
        .compress(&tenant.key, &first, json!({"summary": "s"}))
        .await
        .expect(201);
    let path = format!("/v1/sessions/{first}");
    let changed = world
        .patch(
            &tenant.key,
            &path,
            json!({"title": "Named", "archived": true, "pinned": true}),
        )
        .await
        .expect(200);
    assert_eq!(changed["id"], done["session_id"]);
    for query in ["", "?exact=true"] {
        let shown = world
            .get(&tenant.key, &format!("{path}{query}"))
            .await
            .expect(200);
        assert_eq!(
            (&shown["title"], &shown["archived"]),
            (&json!("Named"), &json!(true))
        );
        assert_eq!(shown["pinned"], true);
    }
    let changed = world
        .patch(&tenant.key, &path, json!({"pinned": false}))
        .await
        .expect(200);
    assert_eq!(
        (&changed["title"], &changed["pinned"]),
        (&json!("Named"), &json!(false))
    );
    let changed = world
        .patch(&tenant.key, &path, json!({"title": null}))
        .await
        .expect(200);
    assert_eq!(
        (&changed["title"], &changed["archived"]),
        (&json!(null), &json!(true))
    );
    for wrong in [
        json!({"title": ""}),
        json!({"title": "a\nb"}),
        json!({"title": "x".repeat(101)}),
    ] {
        world
            .patch(&tenant.key, &path, wrong)
            .await
            .expect_problem(400, "invalid_request");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retried_creation_makes_one_session_for_each_user() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    let (_, bridge) = world.api_key(&tenant, "bridge").await;
    let create = async |node: usize, user: &str| {
        let request = world
            .client
            .post(world.url_on(node, "/v1/sessions"))
            .bearer_auth(&bridge)
            .header("idempotency-key", "once")
            .header("x-throughline-identity", user);
        Reply::of(request.json(&json!({"title": "made once"}))).await
    };
    let first = create(0, "telegram:1").await.expect(201);
    let again = create(1, "telegram:1").await;
    assert_eq!(again.header("idempotency-replayed"), "true");
    assert_eq!(again.expect(201), first);
    let other = create(1, "telegram:2").await.expect(201);
    assert_ne!(other["id"], first["id"]);
    assert_ne!(other["user_id"], first["user_id"]);
}
