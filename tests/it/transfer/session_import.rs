//! Imports: whole or not at all, and nobody brings in words that others did not say.

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::people::{as_bridge, sign_in};
use crate::support::transfer::{exported, imported, lasting, originals, weather};
use crate::support::{Fields, Reply, World};

#[tokio::test(flavor = "multi_thread")]
async fn a_user_imports_their_own_conversation_and_no_changed_one() {
    let world = World::new().await;
    let (tenant, foreign) = (world.tenant("Acme").await, world.tenant("Other").await);
    let ada = sign_in(&world, &tenant, "ada").await;
    let body = json!({"user": ada.user_id, "title": "Ours", "messages": weather()});
    let id = world.session(&tenant.key, body).await.id();
    world
        .compress(&ada.token, &id, json!({"summary": "s", "keep_last": 2}))
        .await
        .expect(201);
    let document = exported(&world, &ada.token, &id).await;
    let tip = imported(&world, &ada.token, &document).await;
    assert_eq!(
        (&tip["user_id"], &tip["title"]),
        (&json!(ada.user_id), &json!("Ours"))
    );
    let again = exported(&world, &ada.token, &tip.id()).await;
    assert_eq!(lasting(&again), lasting(&document));
    // The spelling of JSON does not count, nor do the ids, times and names that an import ignores.
    let mut same = document.clone();
    same["links"][0]["messages"][0]["identity"] = json!("web:mallory");
    same["links"][0]["created_at"] = json!(null);
    same["exported_at"] = json!("2001-01-01T00:00:00Z");
    let text = serde_json::to_string_pretty(&same).unwrap();
    let request = world
        .request(Method::POST, "/v1/sessions/import", &ada.token)
        .header("content-type", "application/json");
    Reply::of(request.body(text)).await.expect(201);
    let refused = async |document: Value, why: &str| {
        let reply = world
            .post(&ada.token, "/v1/sessions/import", document)
            .await;
        let problem = reply.expect_problem(403, "role_not_allowed");
        assert_eq!(problem["errors"][0]["pointer"], "/links/0/messages/0/role");
        assert!(problem.text("detail").contains(why), "{problem}");
    };
    let changes: [fn(&mut Value); 9] = [
        |d| d["links"][0]["messages"][4]["content"] = json!("A cloud! ☁"),
        |d| d["links"][0]["messages"][0]["content"] = json!("Be long."),
        |d| d["links"][0]["messages"][5]["content"] = json!("thanks"),
        |d| d["links"][0]["messages"][2]["tool_calls"][0]["function"]["strict"] = json!(false),
        |d| d["links"][0]["messages"][4]["token_count"] = json!(18),
        |d| d["links"][0]["messages"][4]["role"] = json!("user"),
        |d| d["links"][1]["compression"]["kept"] = json!(9),
        |d| d["title"] = json!("Mine"),
        |d| {
            d["links"].as_array_mut().unwrap().pop();
        },
    ];
    for change in changes {
        let mut changed = document.clone();
        change(&mut changed);
        assert_ne!(changed, document);
        refused(changed, "changed").await;
    }
    let mut bare = document.clone();
    bare.as_object_mut().unwrap().remove("signature");
    refused(bare.clone(), "no signature").await;
    // Signed, but for another tenant.
    let theirs = world
        .session(
            &foreign.key,
            json!({"title": "Ours", "messages": weather()}),
        )
        .await
        .id();
    let theirs = exported(&world, &foreign.key, &theirs).await;
    refused(theirs.clone(), "not exported here").await;
    imported(&world, &tenant.key, &theirs).await;
    imported(&world, &tenant.key, &bare).await;
    // What a person says themselves needs no signature; what the service says does.
    let own = |kind: &str| {
        let message = json!({"seq": 1, "role": "user", "kind": kind, "content": "x"});
        json!({"links": [{"messages": [message]}]})
    };
    for kind in ["normal", "summary"] {
        imported(&world, &ada.token, &own(kind)).await;
    }
    for kind in ["notice", "handoff"] {
        refused(own(kind), "no signature").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bridge_imports_for_the_user_it_names() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let (_, bridge) = world.api_key(&tenant, "bridge").await;
    let id = world
        .session(&tenant.key, json!({"messages": weather()}))
        .await
        .id();
    let document = exported(&world, &tenant.key, &id).await;
    let import = async |identity: &str, document: &Value| {
        let place = (Method::POST, "/v1/sessions/import");
        as_bridge(&world, &bridge, identity, place, Some(document.clone())).await
    };
    let made = import("telegram:1", &document).await.expect(201);
    assert!(made["user_id"].is_string());
    let path = format!("/v1/sessions/{}/messages", made.id());
    let messages = as_bridge(&world, &bridge, "telegram:1", (Method::GET, &path), None)
        .await
        .expect(200);
    assert_eq!(
        messages["data"][1]["identity"],
        json!(null),
        "nobody said it here"
    );
    as_bridge(&world, &bridge, "telegram:2", (Method::GET, &path), None)
        .await
        .expect_problem(404, "session_not_found");
    world
        .post(&bridge, "/v1/sessions/import", document.clone())
        .await
        .expect_problem(403, "identity_required");
    let mut changed = document;
    changed["links"][0]["messages"][4]["content"] = json!("Sun.");
    import("telegram:1", &changed)
        .await
        .expect_problem(403, "role_not_allowed");
}

/// Rows of conversations, sessions, messages and slots.
async fn rows(world: &World) -> i64 {
    sqlx::query_scalar(
        "select (select count(*) from conversations) + (select count(*) from sessions)
              + (select count(*) from messages) + (select count(*) from slots)",
    )
    .fetch_one(&mut world.superuser().await)
    .await
    .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_document_that_breaks_a_rule_is_refused_with_a_pointer_and_nothing_is_made() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let message = |seq: i64| json!({"seq": seq, "role": "user", "content": "x"});
    let with = |messages: Value| json!({"links": [{"messages": messages}]});
    let invalid = (422, "invalid_value");
    let shape = (400, "invalid_request");
    for (document, (status, code), pointer) in [
        (json!({}), shape, ""),
        (
            json!({"links": [], "session_key": "k"}),
            shape,
            "/session_key",
        ),
        (
            json!({"links": [{"messages": [], "more": 1}]}),
            shape,
            "/links/0/more",
        ),
        (json!({"links": [{}]}), shape, "/links/0"),
        (
            json!({"format": "other", "links": [{"messages": []}]}),
            shape,
            "/format",
        ),
        (
            json!({"version": "1", "links": [{"messages": []}]}),
            shape,
            "/version",
        ),
        (
            json!({"title": "a\nb", "links": [{"messages": []}]}),
            shape,
            "/title",
        ),
        (
            json!({"created_at": "today", "links": [{"messages": []}]}),
            shape,
            "/created_at",
        ),
        (
            json!({"signature": "x", "links": [{"messages": []}]}),
            shape,
            "/signature",
        ),
        (
            with(json!([{"seq": 1, "role": "robot", "content": "x"}])),
            shape,
            "/links/0/messages/0/role",
        ),
        (
            with(json!([{"seq": 1, "role": "user", "content": 1}])),
            shape,
            "/links/0/messages/0/content",
        ),
        (
            with(json!([{"seq": 1, "role": "user", "content": "x", "turn_id": null}])),
            shape,
            "/links/0/messages/0/turn_id",
        ),
        (json!({"links": []}), invalid, "/links"),
        (
            json!({"version": 2, "links": [{"messages": []}]}),
            invalid,
            "/version",
        ),
        (
            with(json!([message(2)])),
            invalid,
            "/links/0/messages/0/seq",
        ),
        (
            with(json!([message(1), message(3)])),
            invalid,
            "/links/0/messages/1/seq",
        ),
        (
            with(json!([{"seq": 1, "role": "user"}])),
            invalid,
            "/links/0/messages/0/content",
        ),
        (
            with(json!([{"seq": 1, "role": "tool", "content": "x"}])),
            invalid,
            "/links/0/messages/0/tool_call_id",
        ),
        (
            with(json!([{"seq": 1, "copied_from": {"link": 0, "seq": 1}}])),
            invalid,
            "/links/0/messages/0/copied_from",
        ),
        (
            json!({"links": [{"depth": 1, "messages": []}]}),
            invalid,
            "/links/0/depth",
        ),
        (
            json!({"links": [{"messages": [message(1)]}, {"messages": [message(1)]}]}),
            invalid,
            "/links/1/compression",
        ),
        (
            json!({"links": vec![json!({"messages": []}); 1001]}),
            invalid,
            "/links",
        ),
    ] {
        let reply = world
            .post(&tenant.key, "/v1/sessions/import", document.clone())
            .await;
        let problem = reply.expect_problem(status, code);
        assert_eq!(
            problem["errors"][0]["pointer"], pointer,
            "{document}: {problem}"
        );
    }
    assert_eq!(rows(&world).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_import_that_fails_half_way_leaves_nothing() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let messages: Vec<Value> = (1..=2500)
        .map(|seq| json!({"seq": seq, "role": "assistant", "content": "x"}))
        .collect();
    let document = json!({"links": [{"messages": messages}]});
    let mut superuser = world.superuser().await;
    sqlx::raw_sql(
        "create function refuse() returns trigger language plpgsql as 'begin raise exception ''no''; end';
         create trigger refuse before insert on messages for each row when (new.seq = 2400)
           execute function refuse();",
    )
    .execute(&mut superuser)
    .await
    .unwrap();
    let path = "/v1/sessions/import?session_key=k";
    let import = async || world.post(&tenant.key, path, document.clone()).await;
    import().await.expect_problem(500, "internal");
    assert_eq!(rows(&world).await, 0);
    sqlx::raw_sql("drop trigger refuse on messages")
        .execute(&mut superuser)
        .await
        .unwrap();
    let made = import().await.expect(201);
    assert_eq!(
        (&made["message_count"], &made["current"]),
        (&json!(2500), &json!(true))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_import_uses_the_agent_if_there_is_one_and_obeys_the_key() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let key = &tenant.key;
    let agent = json!({"upstream": {"kind": "demo"}});
    world.put(key, "/v1/agents/helper", agent).await.expect(201);
    let document = |agent: &str| {
        let message = json!({"seq": 1, "role": "user", "content": "x"});
        json!({"agent": agent, "links": [{"messages": [message]}]})
    };
    let import = async |query: &str, agent: &str| {
        let path = format!("/v1/sessions/import{query}");
        world.post(key, &path, document(agent)).await
    };
    for (given, agent) in [("helper", "helper"), ("main", "main"), ("gone", "main")] {
        let made = import("", given).await.expect(201);
        assert_eq!(
            (&made["agent"], &made["session_key"]),
            (&json!(agent), &json!(null))
        );
    }
    let first = import("?session_key=k", "helper").await.expect(201);
    assert_eq!(
        (&first["session_key"], &first["current"]),
        (&json!("k"), &json!(true)),
        "the first session of a new key is its current one"
    );
    let second = import("?session_key=k", "gone").await.expect(201);
    assert_eq!(
        (&second["agent"], &second["current"]),
        (&json!("helper"), &json!(false))
    );
    import("?session_key=k", "main")
        .await
        .expect_problem(409, "agent_mismatch");
    for reserved in ["agent:main:main", "ses_1"] {
        import(&format!("?session_key={reserved}"), "main")
            .await
            .expect_problem(404, "session_key_not_found");
    }
    import("?session_key=a%20b", "main")
        .await
        .expect_problem(400, "invalid_session_key");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retried_import_makes_one_conversation() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    let import = async |node: usize, query: &str| {
        let url = world.url_on(node, &format!("/v1/sessions/import{query}"));
        let request = world
            .client
            .post(url)
            .bearer_auth(&tenant.key)
            .header("idempotency-key", "once");
        let message = json!({"seq": 1, "role": "assistant", "content": "x"});
        Reply::of(request.json(&json!({"links": [{"messages": [message]}]}))).await
    };
    let first = import(0, "").await.expect(201);
    let again = import(1, "").await;
    assert_eq!(again.header("idempotency-replayed"), "true");
    assert_eq!(again.expect(201), first);
    import(0, "?session_key=k")
        .await
        .expect_problem(409, "idempotency_conflict");
    assert_eq!(world.walk(&tenant.key, "/v1/sessions").await.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_import_may_be_sixteen_times_as_large_as_other_bodies() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let document = |texts: usize| {
        let message =
            |seq: usize| json!({"seq": seq, "role": "user", "content": "x".repeat(500_000)});
        let messages: Vec<Value> = (1..=texts).map(message).collect();
        json!({"links": [{"messages": messages}]})
    };
    let tip = imported(&world, &tenant.key, &document(8)).await;
    let again = exported(&world, &tenant.key, &tip.id()).await;
    assert_eq!(originals(&again).len(), 8);
    world
        .post(&tenant.key, "/v1/sessions/import", document(34))
        .await
        .expect_problem(413, "payload_too_large");
    world
        .post(&tenant.key, "/v1/users", document(3))
        .await
        .expect_problem(413, "payload_too_large");
}
