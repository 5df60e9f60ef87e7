//! Sessions: making, finding, naming, listing and deleting them, and whose they are.

use crate::support::Fields;
use crate::support::conversations::grant;
use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};
use sqlx::Connection;

use crate::support::conversations::{answered, said};
use crate::support::people::{as_bridge, person};
use crate::support::{Reply, World, eventually};

#[tokio::test(flavor = "multi_thread")]
async fn a_session_is_made_and_shown_as_the_contract_has_it() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let body = json!({"title": "First", "messages": [said("hello"), answered("hi")]});
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
async fn names_that_clients_may_not_give_are_refused() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let long = "x".repeat(257);
    for id in ["", "a b", "a/b", "a\\b", "..", "a..b", "é", "tab\t", &long] {
        let reply = world
            .post(&tenant.key, "/v1/sessions", json!({"id": id}))
            .await;
        let problem = reply.expect_problem(400, "invalid_session_id");
        assert_eq!(problem["errors"][0]["pointer"], "/id", "{id}");
    }
    for key in ["", "a b", "é", "new\nline", &long] {
        let reply = world
            .post(&tenant.key, "/v1/sessions", json!({"session_key": key}))
            .await;
        let problem = reply.expect_problem(400, "invalid_session_key");
        assert_eq!(problem["errors"][0]["pointer"], "/session_key", "{key}");
    }
    for reserved in ["ses_1", "usr_x", "trn_1", "hnd_1", "dlv_1", "agent:main:x"] {
        let path = format!("/v1/sessions/{reserved}");
        world
            .get(&tenant.key, &path)
            .await
            .expect_problem(404, "session_not_found");
        world
            .post(&tenant.key, "/v1/sessions", json!({"id": reserved}))
            .await
            .expect_problem(404, "session_not_found");
    }
    for reserved in ["agent:main:main", "usr_x", "ses_1"] {
        for (path, body) in [
            ("/v1/sessions".to_owned(), json!({"session_key": reserved})),
            (
                format!("/v1/session-keys/{reserved}/messages"),
                json!({"messages": [said("x")]}),
            ),
        ] {
            world
                .post(&tenant.key, &path, body)
                .await
                .expect_problem(404, "session_key_not_found");
        }
        let path = format!("/v1/sessions?session_key={reserved}");
        world
            .get(&tenant.key, &path)
            .await
            .expect_problem(404, "session_key_not_found");
    }
    world
        .get(&tenant.key, "/v1/sessions/a%20b")
        .await
        .expect_problem(400, "invalid_session_id");
    world
        .get(&tenant.key, "/v1/session-keys/a%20b")
        .await
        .expect_problem(400, "invalid_session_key");
    assert_eq!(
        world.walk(&tenant.key, "/v1/sessions").await,
        Vec::<Value>::new()
    );
    assert_eq!(
        world.walk(&tenant.key, "/v1/session-keys").await,
        Vec::<Value>::new()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_s_own_id_is_good_wherever_an_id_is_and_names_the_conversation() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let odd = "chat:1%2F+~";
    let made = world
        .session(&tenant.key, json!({"id": odd, "messages": [said("one")]}))
        .await;
    assert_eq!(
        (&made["id"], &made["conversation_id"]),
        (&json!(odd), &json!(odd))
    );
    let encoded = "chat%3A1%252F%2B~";
    let path = format!("/v1/sessions/{encoded}");
    assert_eq!(world.get(&tenant.key, &path).await.expect(200), made);
    world
        .append(&tenant.key, encoded, json!([said("two")]))
        .await
        .expect(201);
    let done = world
        .compress(
            &tenant.key,
            encoded,
            json!({"summary": "s", "keep_last": 1}),
        )
        .await
        .expect(201);
    assert_eq!(
        (&done["parent_id"], &done["conversation_id"]),
        (&json!(odd), &json!(odd))
    );
    let tip = world.get(&tenant.key, &path).await.expect(200);
    assert_eq!(
        (&tip["id"], &tip["parent_id"]),
        (&done["session_id"], &json!(odd))
    );
    assert_eq!(tip["conversation_id"], odd);
    world
        .post(&tenant.key, "/v1/sessions", json!({"id": odd}))
        .await
        .expect_problem(409, "session_id_taken");
}

#[tokio::test(flavor = "multi_thread")]
async fn names_live_in_their_maker_s_namespace() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let ada = person(&world, &tenant, "ada").await;
    let bob = person(&world, &tenant, "bob").await;
    let (_, chat) = world.api_key(&tenant, "chat").await;
    let of_ada = world
        .session(&ada.token, json!({"id": "same", "title": "ada's"}))
        .await;
    let of_bob = world
        .session(&bob.token, json!({"id": "same", "title": "bob's"}))
        .await;
    let of_chat = world
        .session(&chat, json!({"id": "same", "title": "the service's"}))
        .await;
    for (made, user) in [
        (&of_ada, json!(ada.user_id)),
        (&of_bob, json!(bob.user_id)),
        (&of_chat, json!(null)),
    ] {
        assert_eq!((&made["id"], &made["user_id"]), (&json!("same"), &user));
    }
    for (key, title) in [
        (&ada.token, "ada's"),
        (&bob.token, "bob's"),
        (&chat, "the service's"),
    ] {
        let found = world.get(key, "/v1/sessions/same").await.expect(200);
        assert_eq!(found["title"], title);
        let listed = world.walk(key, "/v1/sessions").await;
        assert_eq!(listed.len(), 1, "{listed:?}");
        assert_eq!(listed[0]["title"], title);
    }
    // The admin sees all three, and each by an id that leads there.
    let listed = world.walk(&tenant.key, "/v1/sessions").await;
    assert_eq!(listed.len(), 3);
    for session in &listed {
        let path = format!("/v1/sessions/{}", session.id());
        assert_eq!(&world.get(&tenant.key, &path).await.expect(200), session);
    }
    // A service name of one's own is found after one's own names.
    let body = json!({"id": "for-ada", "user": ada.user_id});
    world.session(&tenant.key, body).await;
    let found = world
        .get(&ada.token, "/v1/sessions/for-ada")
        .await
        .expect(200);
    assert_eq!(
        (&found["id"], &found["user_id"]),
        (&json!("for-ada"), &json!(ada.user_id))
    );
    for key in [&bob.token, &chat] {
        world
            .get(key, "/v1/sessions/for-ada")
            .await
            .expect_problem(404, "session_not_found");
    }
    world
        .session(
            &ada.token,
            json!({"id": "for-ada", "title": "hides the other"}),
        )
        .await;
    let found = world
        .get(&ada.token, "/v1/sessions/for-ada")
        .await
        .expect(200);
    assert_eq!(found["title"], "hides the other");
    for session in world.walk(&ada.token, "/v1/sessions").await {
        let path = format!("/v1/sessions/{}", session.id());
        assert_eq!(world.get(&ada.token, &path).await.expect(200), session);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bridge_acts_for_the_person_it_names_and_nobody_else() {
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
            json!({"user": "telegram:1", "messages": [said("hi")]}),
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
        Some(json!({"messages": [said("more")]})),
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
        Some(json!({"messages": [answered("not me")]})),
    )
    .await;
    refused.expect_problem(403, "role_not_allowed");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_a_person_s_is_there_for_them_and_for_the_tenant_s_readers() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let ada = person(&world, &tenant, "ada").await;
    let bob = person(&world, &tenant, "bob").await;
    let (_, chat) = world.api_key(&tenant, "chat").await;
    let (_, read) = world.api_key(&tenant, "read").await;
    let id = world
        .session(&ada.token, json!({"messages": [said("private")]}))
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
        ("messages", json!({"messages": [said("x")]})),
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
async fn a_guest_reads_and_speaks_and_does_nothing_else() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let ada = person(&world, &tenant, "ada").await;
    let bob = person(&world, &tenant, "bob").await;
    let id = world
        .session(&ada.token, json!({"messages": [said("come in")]}))
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
        .append(&bob.token, &id, json!([said("thanks")]))
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
    let bob = person(&world, &tenant, "bob").await;
    world
        .get(&bob.token, &path)
        .await
        .expect_problem(404, "session_not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_list_has_tips_newest_first_and_can_be_narrowed() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let ada = person(&world, &tenant, "ada").await;
    let agent = json!({"upstream": {"kind": "demo"}});
    world
        .put(&tenant.key, "/v1/agents/helper", agent)
        .await
        .expect(201);
    let mut ids = Vec::new();
    for body in [
        json!({"title": "0", "messages": [said("x"), answered("y")]}),
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
        .session(&tenant.key, json!({"messages": [said("x")]}))
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
async fn a_deleted_conversation_is_gone_with_all_its_ids_for_good() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let body = json!({"id": "mine", "session_key": "k", "messages": [said("secret")]});
    world.session(&tenant.key, body).await;
    let child = world
        .compress(&tenant.key, "mine", json!({"summary": "s"}))
        .await
        .expect(201);
    let branch = world
        .post(&tenant.key, "/v1/sessions/mine/branch", json!({}))
        .await
        .expect(201);
    let child = child.text("session_id").to_owned();
    let before = world
        .get(&tenant.key, "/v1/session-keys/k")
        .await
        .expect(200);
    world
        .delete(&tenant.key, "/v1/sessions/mine")
        .await
        .expect(204);
    let after = world
        .get(&tenant.key, "/v1/session-keys/k")
        .await
        .expect(200);
    assert_eq!(
        (&after["session_id"], &after["conversation_id"]),
        (&json!(null), &json!(null))
    );
    assert!(after["generation"].as_i64() > before["generation"].as_i64());
    let gone = async || {
        for id in ["mine", &child] {
            let path = format!("/v1/sessions/{id}");
            for query in ["", "?exact=true", "/messages", "/tip"] {
                let reply = world.get(&tenant.key, &format!("{path}{query}")).await;
                reply.expect_problem(404, "session_not_found");
            }
            let reply = world.append(&tenant.key, id, json!([said("again")])).await;
            reply.expect_problem(404, "session_not_found");
            world
                .delete(&tenant.key, &path)
                .await
                .expect_problem(404, "session_not_found");
        }
        let again = world
            .post(&tenant.key, "/v1/sessions", json!({"id": "mine"}))
            .await;
        again.expect_problem(409, "session_id_taken");
    };
    gone().await;
    let rows = async || -> i64 {
        sqlx::query_scalar(
            "select (select count(*) from messages where content::text like '%secret%' and session_id <> $1)
                  + (select count(*) from conversations where client_id = 'mine')",
        )
        .bind(crate::support::conversations::uuid_of_session(&branch.id()))
        .fetch_one(&mut world.superuser().await)
        .await
        .unwrap()
    };
    eventually("its rows are gone", Duration::from_secs(10), async || {
        throughline::jobs::tick(world.app()).await.unwrap();
        rows().await == 0
    })
    .await;
    gone().await;
    // A branch is a conversation of its own; where it came from is no longer told.
    let path = format!("/v1/sessions/{}", branch.id());
    let branch = world.get(&tenant.key, &path).await.expect(200);
    assert_eq!(
        (&branch["parent_id"], &branch["edge"]),
        (&json!(null), &json!("branch"))
    );
    let audit = world.get(&tenant.key, "/v1/audit").await.expect(200);
    assert_eq!(audit["data"][0]["action"], "conversation.delete");
    // The key goes on with a fresh session.
    let next = world
        .post(
            &tenant.key,
            "/v1/session-keys/k/messages",
            json!({"messages": [said("hi")]}),
        )
        .await
        .expect(201);
    assert_eq!(
        (&next["created"], &next["reset"]),
        (&json!(true), &json!(null))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_a_deletion_overtakes_is_refused() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let id = world.session(&tenant.key, json!({})).await.id();
    // Who deletes waits for the audit's head, with everything else done.
    let mut superuser = world.superuser().await;
    let mut head = superuser.begin().await.unwrap();
    sqlx::query("select seq from audit_heads for update")
        .execute(&mut *head)
        .await
        .unwrap();
    let path = format!("/v1/sessions/{id}");
    let delete = world.delete(&tenant.key, &path);
    let append = async {
        world.waiting(1).await;
        world.append(&tenant.key, &id, json!([said("late")])).await
    };
    let release = async {
        world.waiting(2).await;
        head.commit().await.unwrap();
    };
    let (deleted, appended, ()) = tokio::join!(delete, append, release);
    deleted.expect(204);
    appended.expect_problem(404, "session_not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retried_creation_makes_one_session_for_each_person() {
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
