//! Names of sessions: which are allowed, and whose they are.

use serde_json::{Value, json};

use crate::support::conversations::user_message;
use crate::support::people::sign_in;
use crate::support::{Fields, World};

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
                json!({"messages": [user_message("x")]}),
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
        .session(
            &tenant.key,
            json!({"id": odd, "messages": [user_message("one")]}),
        )
        .await;
    assert_eq!(
        (&made["id"], &made["conversation_id"]),
        (&json!(odd), &json!(odd))
    );
    let encoded = "chat%3A1%252F%2B~";
    let path = format!("/v1/sessions/{encoded}");
    assert_eq!(world.get(&tenant.key, &path).await.expect(200), made);
    world
        .append(&tenant.key, encoded, json!([user_message("two")]))
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
    let ada = sign_in(&world, &tenant, "ada").await;
    let bob = sign_in(&world, &tenant, "bob").await;
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
