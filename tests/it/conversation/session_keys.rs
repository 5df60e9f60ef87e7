//! Session keys: stable names, what moves their current session and what does not, and reset policies.

use crate::support::Fields;
use std::sync::Arc;
use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::conversations::said;
use crate::support::people::person;
use crate::support::{Reply, Tenant, World};

async fn speak(world: &World, key: &str, session_key: &str, text: &str) -> Value {
    let path = format!("/v1/session-keys/{session_key}/messages");
    world
        .post(key, &path, json!({"messages": [said(text)]}))
        .await
        .expect(201)
}

async fn slot(world: &World, key: &str, session_key: &str) -> Value {
    world
        .get(key, &format!("/v1/session-keys/{session_key}"))
        .await
        .expect(200)
}

async fn session(world: &World, key: &str, id: &str) -> Value {
    world
        .get(key, &format!("/v1/sessions/{id}"))
        .await
        .expect(200)
}

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
        .append(&tenant.key, &second, json!([said("x")]))
        .await
        .expect(201);
    assert_eq!(
        slot(&world, &tenant.key, "k").await["session_id"],
        first,
        "naming an id moves nothing"
    );
    let done = world
        .compress(&tenant.key, &second, json!({"summary": "s"}))
        .await
        .expect(201);
    assert_eq!(
        speak(&world, &tenant.key, "k", "hello").await["session_id"],
        first
    );
    let done_first = world
        .compress(&tenant.key, &first, json!({"summary": "s"}))
        .await
        .expect(201);
    let moved = slot(&world, &tenant.key, "k").await;
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
async fn a_reset_begins_anew_and_the_ended_session_stays_resumable() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let first = speak(&world, &tenant.key, "k", "one")
        .await
        .text("session_id")
        .to_owned();
    let reset = async |condition: Option<&str>| {
        let mut request = world.request(Method::POST, "/v1/session-keys/k/reset", &tenant.key);
        if let Some(condition) = condition {
            request = request.header("if-match", condition);
        }
        Reply::of(request).await
    };
    reset(Some("2"))
        .await
        .expect_problem(412, "precondition_failed");
    let after = reset(Some("\"1\"")).await.expect(200);
    let fresh = after.text("session_id").to_owned();
    assert_ne!(fresh, first);
    assert_eq!(after["generation"], 2);
    let old = session(&world, &tenant.key, &first).await;
    assert_eq!(
        (&old["state"], &old["end_reason"], &old["current"]),
        (&json!("ended"), &json!("reset"), &json!(false))
    );
    let new = session(&world, &tenant.key, &fresh).await;
    assert_eq!(
        (&new["parent_id"], &new["edge"], &new["depth"]),
        (&json!(first), &json!("reset"), &json!(0))
    );
    assert_eq!(
        (&new["conversation_id"], &new["message_count"]),
        (&json!(fresh), &json!(0))
    );
    let tip = world
        .get(&tenant.key, &format!("/v1/sessions/{first}/tip"))
        .await
        .expect(200);
    assert_eq!(tip["session_id"], first, "a reset is no part of the chain");
    assert_eq!(
        speak(&world, &tenant.key, "k", "two").await["session_id"],
        fresh
    );
    // Spoken to by its id, the old one opens again and the key stays where it is.
    world
        .append(&tenant.key, &first, json!([said("still here")]))
        .await
        .expect(201);
    let old = session(&world, &tenant.key, &first).await;
    assert_eq!(
        (&old["state"], &old["end_reason"], &old["ended_at"]),
        (&json!("open"), &json!(null), &json!(null))
    );
    assert_eq!(slot(&world, &tenant.key, "k").await["session_id"], fresh);
    // Of many who saw the same generation, one resets.
    let mut racers = Vec::new();
    for _ in 0..8 {
        let request = world
            .request(Method::POST, "/v1/session-keys/k/reset", &tenant.key)
            .header("if-match", "2");
        racers.push(tokio::spawn(Reply::of(request)));
    }
    let mut done = 0;
    for racer in racers {
        let reply = racer.await.unwrap();
        assert!(reply.status == 200 || reply.status == 412, "{}", reply.body);
        done += usize::from(reply.status == 200);
    }
    assert_eq!(
        (done, &slot(&world, &tenant.key, "k").await["generation"]),
        (1, &json!(3))
    );
    world
        .post(&tenant.key, "/v1/session-keys/unknown/reset", json!({}))
        .await
        .expect_problem(404, "session_key_not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_keys_that_lead_to_one_conversation_a_reset_moves_one() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let shared = speak(&world, &tenant.key, "a", "begun at a")
        .await
        .text("session_id")
        .to_owned();
    let own = speak(&world, &tenant.key, "b", "begun at b")
        .await
        .text("session_id")
        .to_owned();
    let switched = world
        .post(
            &tenant.key,
            "/v1/session-keys/b/switch",
            json!({"session_id": shared}),
        )
        .await
        .expect(200);
    assert_eq!(
        (&switched["session_id"], &switched["generation"]),
        (&json!(shared), &json!(2))
    );
    let left = session(&world, &tenant.key, &own).await;
    assert_eq!(
        (&left["state"], &left["end_reason"]),
        (&json!("ended"), &json!("switch"))
    );
    assert_eq!(
        speak(&world, &tenant.key, "b", "go on at b").await["session_id"],
        shared
    );
    let of_a = slot(&world, &tenant.key, "a").await;
    let listed = world.walk(&tenant.key, "/v1/sessions?session_key=b").await;
    let shown: Vec<_> = listed
        .iter()
        .map(|s| (s["id"].clone(), s["current"].clone()))
        .collect();
    assert_eq!(
        shown,
        [(json!(own), json!(false)), (json!(shared), json!(true))]
    );
    // Reset one: the other is as it was, and the conversation stays open.
    world
        .post(&tenant.key, "/v1/session-keys/a/reset", json!({}))
        .await
        .expect(200);
    let of_b = slot(&world, &tenant.key, "b").await;
    assert_eq!(
        (&of_b["session_id"], &of_b["generation"]),
        (&json!(shared), &json!(2))
    );
    let conversation = session(&world, &tenant.key, &shared).await;
    assert_eq!(
        (&conversation["state"], &conversation["current"]),
        (&json!("open"), &json!(true))
    );
    assert_eq!(
        conversation["session_key"], "a",
        "its memory stays with the key it was made under"
    );
    assert_ne!(
        slot(&world, &tenant.key, "a").await["session_id"],
        of_a["session_id"]
    );
    // Reset the other too: now nothing leads there, and it ends.
    world
        .post(&tenant.key, "/v1/session-keys/b/reset", json!({}))
        .await
        .expect(200);
    assert_eq!(
        session(&world, &tenant.key, &shared).await["state"],
        "ended"
    );
    // And back: switching opens it again.
    let back = world
        .post(
            &tenant.key,
            "/v1/session-keys/a/switch",
            json!({"session_id": shared}),
        )
        .await
        .expect(200);
    assert_eq!(
        (&back["session_id"], &back["generation"]),
        (&json!(shared), &json!(3))
    );
    let conversation = session(&world, &tenant.key, &shared).await;
    assert_eq!(
        (&conversation["state"], &conversation["end_reason"]),
        (&json!("open"), &json!(null))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_switch_leads_only_to_one_s_own_of_the_same_agent() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let ada = person(&world, &tenant, "ada").await;
    let bob = person(&world, &tenant, "bob").await;
    world
        .put(
            &tenant.key,
            "/v1/agents/helper",
            json!({"upstream": {"kind": "demo"}}),
        )
        .await
        .expect(201);
    let current = speak(&world, &ada.token, "k", "hi").await["session_id"].clone();
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
    let ada = person(&world, &tenant, "ada").await;
    let bob = person(&world, &tenant, "bob").await;
    let (_, chat) = world.api_key(&tenant, "chat").await;
    let sessions = [
        speak(&world, &ada.token, "same", "ada").await,
        speak(&world, &bob.token, "same", "bob").await,
        speak(&world, &chat, "same", "service").await,
    ];
    assert!(
        sessions[0]["session_id"] != sessions[1]["session_id"]
            && sessions[1]["session_id"] != sessions[2]["session_id"]
    );
    for (key, expected) in [(&ada.token, 0), (&bob.token, 1), (&chat, 2)] {
        assert_eq!(
            slot(&world, key, "same").await["session_id"],
            sessions[expected]["session_id"]
        );
        assert_eq!(world.walk(key, "/v1/session-keys").await.len(), 1);
    }
    assert_eq!(world.walk(&tenant.key, "/v1/session-keys").await.len(), 3);
    // A service key that was made for a person is theirs: not another's, not the chat key's.
    let body = json!({"messages": [said("hi")], "user": ada.user_id});
    let path = "/v1/session-keys/for-ada/messages";
    let made = world.post(&tenant.key, path, body).await.expect(201);
    assert_eq!(
        slot(&world, &ada.token, "for-ada").await["session_id"],
        made["session_id"]
    );
    assert_eq!(
        slot(&world, &ada.token, "for-ada").await["user_id"],
        ada.user_id
    );
    for key in [&bob.token, &chat] {
        let found = world.get(key, "/v1/session-keys/for-ada").await;
        found.expect_problem(404, "session_key_not_found");
    }
    world
        .post(&chat, path, json!({"messages": [said("x")]}))
        .await
        .expect_problem(404, "session_key_not_found");
    // Bob's own of that name is another key.
    assert_ne!(
        speak(&world, &bob.token, "for-ada", "mine").await["session_id"],
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
    assert_eq!(slot(&world, &chat, &encoded).await, asked);
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
            let reply = Reply::of(request.json(&json!({"messages": [said(&place.to_string())]})))
                .await
                .expect(201);
            (reply["session_id"].clone(), reply["created"] == true)
        }));
    }
    let mut ids = Vec::new();
    let mut created = 0;
    for speaker in speakers {
        let (id, made) = speaker.await.unwrap();
        ids.push(id);
        created += usize::from(made);
    }
    ids.dedup();
    assert_eq!((ids.len(), created), (1, 1));
    let session = session(&world, &tenant.key, ids[0].as_str().unwrap()).await;
    assert_eq!(session["message_count"], 24);
}

async fn set_reset(world: &World, tenant: &Tenant, reset: Value) {
    let agent = json!({"upstream": {"kind": "demo"}, "reset": reset});
    world
        .put(&tenant.key, "/v1/agents/main", agent)
        .await
        .expect(200);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_key_begins_anew_when_its_person_comes_back() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    set_reset(&world, &tenant, json!({"mode": "idle", "idle_minutes": 60})).await;
    let minutes = |n: u64| world.clock.advance(Duration::from_secs(n * 60));
    let first = speak(&world, &tenant.key, "k", "one").await;
    minutes(59);
    let second = speak(&world, &tenant.key, "k", "two").await;
    assert_eq!(
        (&second["session_id"], &second["reset"]),
        (&first["session_id"], &json!(null))
    );
    minutes(59);
    // Not a person's word: it neither finds the session too old nor keeps it young.
    let id = first.text("session_id");
    let notice = json!({"messages": [{"role": "assistant", "content": "by the way"}]});
    world
        .post(&tenant.key, "/v1/session-keys/k/messages", notice)
        .await
        .expect(201);
    minutes(2);
    let named = world
        .append(&tenant.key, id, json!([said("by its id")]))
        .await
        .expect(201);
    assert_eq!(named["session_id"], id, "a named id is never reset");
    minutes(61);
    let third = speak(&world, &tenant.key, "k", "three").await;
    let reset = json!({"reason": "idle", "previous_session_id": id});
    assert_eq!((&third["reset"], &third["created"]), (&reset, &json!(true)));
    assert_ne!(third["session_id"], first["session_id"]);
    let old = session(&world, &tenant.key, id).await;
    assert_eq!(
        (&old["state"], &old["end_reason"]),
        (&json!("ended"), &json!("idle"))
    );
    let shown = slot(&world, &tenant.key, "k").await;
    assert_eq!(
        (&shown["session_id"], &shown["generation"]),
        (&third["session_id"], &json!(2))
    );
    // A switch is a person's choice: it moves the idle clock.
    minutes(50);
    let back = json!({"session_id": id});
    world
        .post(&tenant.key, "/v1/session-keys/k/switch", back)
        .await
        .expect(200);
    minutes(50);
    let fourth = speak(&world, &tenant.key, "k", "four").await;
    assert_eq!(
        (&fourth["session_id"], &fourth["reset"]),
        (&json!(id), &json!(null))
    );
    // What is spoken through one key keeps the conversation young for the other.
    let path = "/v1/session-keys/other/switch";
    speak(&world, &tenant.key, "other", "hi").await;
    world
        .post(&tenant.key, path, json!({"session_id": id}))
        .await
        .expect(200);
    minutes(50);
    speak(&world, &tenant.key, "k", "five").await;
    minutes(50);
    let sixth = speak(&world, &tenant.key, "other", "six").await;
    assert_eq!(
        (&sixth["session_id"], &sixth["reset"]),
        (&json!(id), &json!(null))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_day_ends_at_the_hour_of_the_person_s_own_zone() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    person(&world, &tenant, "ada").await;
    sqlx::query("update users set time_zone = 'Asia/Kolkata' where tenant_id = $1")
        .bind(tenant.uuid())
        .execute(&mut world.superuser().await)
        .await
        .unwrap();
    // Half past three in the afternoon in UTC is nine in the evening in Kolkata.
    world.start_window(Duration::from_secs(24 * 3600));
    world.clock.advance(Duration::from_secs(14 * 3600));
    let ada = person(&world, &tenant, "ada").await;
    set_reset(&world, &tenant, json!({"mode": "daily", "at_hour": 21})).await;
    let first = speak(&world, &ada.token, "k", "at half past seven").await;
    world.clock.advance(Duration::from_secs(80 * 60));
    let second = speak(&world, &ada.token, "k", "ten to nine").await;
    assert_eq!(
        (&second["session_id"], &second["reset"]),
        (&first["session_id"], &json!(null))
    );
    world.clock.advance(Duration::from_secs(15 * 60));
    let ada = person(&world, &tenant, "ada").await;
    let third = speak(&world, &ada.token, "k", "five past nine").await;
    let reset = json!({"reason": "daily", "previous_session_id": first["session_id"]});
    assert_eq!(third["reset"], reset);
    let fourth = speak(&world, &ada.token, "k", "again").await;
    assert_eq!(fourth["reset"], json!(null), "once a day");
    // A platform's own rule comes before the agent's.
    set_reset(
        &world,
        &tenant,
        json!({"mode": "idle", "idle_minutes": 1, "by_platform": {"web": {"mode": "none"}}}),
    )
    .await;
    world.clock.advance(Duration::from_secs(30 * 60));
    let fifth = speak(&world, &ada.token, "k", "much later").await;
    assert_eq!(
        (&fifth["session_id"], &fifth["reset"]),
        (&fourth["session_id"], &json!(null))
    );
}
