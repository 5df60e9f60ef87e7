//! Session keys: stable names, what moves their current session and what does not, and reset policies.

use std::sync::Arc;

use reqwest::Method;
use serde_json::json;

use crate::support::conversations::{append_to_key, get_session, slot_of_key, user_message};
use crate::support::people::sign_in;
use crate::support::{Fields, Reply, World};

#[tokio::test(flavor = "multi_thread")]
async fn a_key_leads_to_its_first_session_until_it_is_moved() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let first = world
        .session(&tenant.key, json!({"session_key": "k"}))
        .await
        .id();
    let second = world
        .session(&tenant.key, json!({"session_key": "k"}))
        .await
        .id();
    let shown = world.get(&tenant.key, "/v1/session-keys/k").await;
    let expected = json!({
        "session_key": "k", "session_id": first, "conversation_id": first, "user_id": null, "agent": "main",
        "generation": 1, "last_active_at": shown.expect(200)["last_active_at"],
    });
    assert_eq!(shown.expect(200), expected);
    assert_eq!(shown.header("etag"), "\"1\"");
    world
        .append(&tenant.key, &second, json!([user_message("x")]))
        .await
        .expect(201);
    assert_eq!(
        slot_of_key(&world, &tenant.key, "k").await["session_id"],
        first,
        "naming an id moves nothing"
    );
    let done = world
        .compress(&tenant.key, &second, json!({"summary": "s"}))
        .await
        .expect(201);
    assert_eq!(
        append_to_key(&world, &tenant.key, "k", "hello").await["session_id"],
        first
    );
    let done_first = world
        .compress(&tenant.key, &first, json!({"summary": "s"}))
        .await
        .expect(201);
    let moved = slot_of_key(&world, &tenant.key, "k").await;
    assert_eq!(
        (&moved["session_id"], &moved["generation"]),
        (&done_first["session_id"], &json!(1))
    );
    assert_eq!(
        moved["conversation_id"], first,
        "compression moves nothing but the tip"
    );
    let listed = world.walk(&tenant.key, "/v1/sessions?session_key=k").await;
    let shown: Vec<_> = listed
        .iter()
        .map(|s| (s["id"].clone(), s["current"].clone()))
        .collect();
    assert_eq!(
        shown,
        [
            (done_first["session_id"].clone(), json!(true)),
            (done["session_id"].clone(), json!(false))
        ]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_switch_leads_only_to_one_s_own_of_the_same_agent() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let ada = sign_in(&world, &tenant, "ada").await;
    let bob = sign_in(&world, &tenant, "bob").await;
    world
        .put(
            &tenant.key,
            "/v1/agents/helper",
            json!({"upstream": {"kind": "demo"}}),
        )
        .await
        .expect(201);
    let current = append_to_key(&world, &ada.token, "k", "hi").await["session_id"].clone();
    let of_bob = world.session(&bob.token, json!({})).await.id();
    let of_helper = world
        .session(&ada.token, json!({"agent": "helper"}))
        .await
        .id();
    let gone = world.session(&ada.token, json!({})).await.id();
    world
        .delete(&ada.token, &format!("/v1/sessions/{gone}"))
        .await
        .expect(204);
    let switch = async |key: &str, session: &str, condition: &str| {
        let request = world
            .request(Method::POST, "/v1/session-keys/k/switch", key)
            .header("if-match", condition);
        Reply::of(request.json(&json!({ "session_id": session }))).await
    };
    switch(&ada.token, &of_bob, "*")
        .await
        .expect_problem(404, "session_not_found");
    switch(&ada.token, &gone, "*")
        .await
        .expect_problem(404, "session_not_found");
    switch(&ada.token, &of_helper, "*")
        .await
        .expect_problem(409, "agent_mismatch");
    switch(&ada.token, current.as_str().unwrap(), "7")
        .await
        .expect_problem(412, "precondition_failed");
    switch(&ada.token, "a b", "*")
        .await
        .expect_problem(400, "invalid_session_id");
    switch(&bob.token, &of_bob, "*")
        .await
        .expect_problem(404, "session_key_not_found");
    let same = switch(&ada.token, current.as_str().unwrap(), "1")
        .await
        .expect(200);
    assert_eq!(
        (&same["session_id"], &same["generation"]),
        (&current, &json!(1)),
        "it leads there already"
    );
    let other_agent = json!({"session_key": "k", "agent": "helper"});
    world
        .post(&ada.token, "/v1/sessions", other_agent)
        .await
        .expect_problem(409, "agent_mismatch");
    let no_agent = json!({"session_key": "new", "agent": "nobody"});
    let problem = world
        .post(&ada.token, "/v1/sessions", no_agent)
        .await
        .expect_problem(422, "invalid_value");
    assert_eq!(problem["errors"][0]["pointer"], "/agent");
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_are_names_in_their_maker_s_namespace_and_no_rights() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let ada = sign_in(&world, &tenant, "ada").await;
    let bob = sign_in(&world, &tenant, "bob").await;
    let (_, chat) = world.api_key(&tenant, "chat").await;
    let sessions = [
        append_to_key(&world, &ada.token, "same", "ada").await,
        append_to_key(&world, &bob.token, "same", "bob").await,
        append_to_key(&world, &chat, "same", "service").await,
    ];
    assert!(
        sessions[0]["session_id"] != sessions[1]["session_id"]
            && sessions[1]["session_id"] != sessions[2]["session_id"]
    );
    for (key, expected) in [(&ada.token, 0), (&bob.token, 1), (&chat, 2)] {
        assert_eq!(
            slot_of_key(&world, key, "same").await["session_id"],
            sessions[expected]["session_id"]
        );
        assert_eq!(world.walk(key, "/v1/session-keys").await.len(), 1);
    }
    assert_eq!(world.walk(&tenant.key, "/v1/session-keys").await.len(), 3);
    // A service key that was made for a person is theirs: not another's, not the chat key's.
    let body = json!({"messages": [user_message("hi")], "user": ada.user_id});
    let path = "/v1/session-keys/for-ada/messages";
    let made = world.post(&tenant.key, path, body).await.expect(201);
    assert_eq!(
        slot_of_key(&world, &ada.token, "for-ada").await["session_id"],
        made["session_id"]
    );
    assert_eq!(
        slot_of_key(&world, &ada.token, "for-ada").await["user_id"],
        ada.user_id
    );
    for key in [&bob.token, &chat] {
        let found = world.get(key, "/v1/session-keys/for-ada").await;
        found.expect_problem(404, "session_key_not_found");
    }
    world
        .post(&chat, path, json!({"messages": [user_message("x")]}))
        .await
        .expect_problem(404, "session_key_not_found");
    // Bob's own of that name is another key.
    assert_ne!(
        append_to_key(&world, &bob.token, "for-ada", "mine").await["session_id"],
        made["session_id"]
    );
    // What a path cannot hold can be asked for, and what it can hold only encoded is decoded.
    let odd = "a/b?c=%25 ..#".replace(' ', "+");
    world.session(&chat, json!({"session_key": odd})).await;
    let encoded: String = odd.bytes().map(|byte| format!("%{byte:02X}")).collect();
    let asked = world
        .get(&chat, &format!("/v1/session-keys?session_key={encoded}"))
        .await
        .expect(200);
    assert_eq!(asked["session_key"], odd);
    assert_eq!(slot_of_key(&world, &chat, &encoded).await, asked);
    world
        .get(&chat, "/v1/session-keys?session_key=unknown")
        .await
        .expect_problem(404, "session_key_not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_first_words_to_a_key_make_one_session() {
    let world = Arc::new(World::with_nodes(2).await);
    let tenant = world.tenant("Acme").await;
    let mut speakers = Vec::new();
    for place in 0..24 {
        let world = world.clone();
        let key = tenant.key.clone();
        speakers.push(tokio::spawn(async move {
            let url = world.url_on(place % 2, "/v1/session-keys/new/messages");
            let request = world.client.post(url).bearer_auth(&key);
            let reply =
                Reply::of(request.json(&json!({"messages": [user_message(&place.to_string())]})))
                    .await
                    .expect(201);
            (reply["session_id"].clone(), reply["created"] == true)
        }));
    }
    let mut ids = Vec::new();
    let mut created = 0;
    for sender in speakers {
        let (id, made) = sender.await.unwrap();
        ids.push(id);
        created += usize::from(made);
    }
    ids.dedup();
    assert_eq!((ids.len(), created), (1, 1));
    let session = get_session(&world, &tenant.key, ids[0].as_str().unwrap()).await;
    assert_eq!(session["message_count"], 24);
}
