//! Resets of a session key: by hand, when it is idle, and each day.

use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::conversations::{append_to_key, get_session, slot_of_key, user_message};
use crate::support::people::sign_in;
use crate::support::{Fields, Reply, Tenant, World};

#[tokio::test(flavor = "multi_thread")]
async fn a_reset_starts_a_new_session_and_the_ended_one_stays_resumable() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let first = append_to_key(&world, &tenant.key, "k", "one")
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
    let old = get_session(&world, &tenant.key, &first).await;
    assert_eq!(
        (&old["state"], &old["end_reason"], &old["current"]),
        (&json!("ended"), &json!("reset"), &json!(false))
    );
    let new = get_session(&world, &tenant.key, &fresh).await;
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
        append_to_key(&world, &tenant.key, "k", "two").await["session_id"],
        fresh
    );
    // Spoken to by its id, the old one opens again and the key stays where it is.
    world
        .append(&tenant.key, &first, json!([user_message("still here")]))
        .await
        .expect(201);
    let old = get_session(&world, &tenant.key, &first).await;
    assert_eq!(
        (&old["state"], &old["end_reason"], &old["ended_at"]),
        (&json!("open"), &json!(null), &json!(null))
    );
    assert_eq!(
        slot_of_key(&world, &tenant.key, "k").await["session_id"],
        fresh
    );
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
        (
            done,
            &slot_of_key(&world, &tenant.key, "k").await["generation"]
        ),
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
    let shared = append_to_key(&world, &tenant.key, "a", "begun at a")
        .await
        .text("session_id")
        .to_owned();
    let own = append_to_key(&world, &tenant.key, "b", "begun at b")
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
    let left = get_session(&world, &tenant.key, &own).await;
    assert_eq!(
        (&left["state"], &left["end_reason"]),
        (&json!("ended"), &json!("switch"))
    );
    assert_eq!(
        append_to_key(&world, &tenant.key, "b", "go on at b").await["session_id"],
        shared
    );
    let of_a = slot_of_key(&world, &tenant.key, "a").await;
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
    let of_b = slot_of_key(&world, &tenant.key, "b").await;
    assert_eq!(
        (&of_b["session_id"], &of_b["generation"]),
        (&json!(shared), &json!(2))
    );
    let conversation = get_session(&world, &tenant.key, &shared).await;
    assert_eq!(
        (&conversation["state"], &conversation["current"]),
        (&json!("open"), &json!(true))
    );
    assert_eq!(
        conversation["session_key"], "a",
        "its memory stays with the key it was made under"
    );
    assert_ne!(
        slot_of_key(&world, &tenant.key, "a").await["session_id"],
        of_a["session_id"]
    );
    // Reset the other too: now nothing leads there, and it ends.
    world
        .post(&tenant.key, "/v1/session-keys/b/reset", json!({}))
        .await
        .expect(200);
    assert_eq!(
        get_session(&world, &tenant.key, &shared).await["state"],
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
    let conversation = get_session(&world, &tenant.key, &shared).await;
    assert_eq!(
        (&conversation["state"], &conversation["end_reason"]),
        (&json!("open"), &json!(null))
    );
}

async fn set_reset(world: &World, tenant: &Tenant, reset: Value) {
    let agent = json!({"upstream": {"kind": "demo"}, "reset": reset});
    world
        .put(&tenant.key, "/v1/agents/main", agent)
        .await
        .expect(200);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_key_restarts_when_its_user_comes_back() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    set_reset(&world, &tenant, json!({"mode": "idle", "idle_minutes": 60})).await;
    let minutes = |n: u64| world.clock.advance(Duration::from_secs(n * 60));
    let first = append_to_key(&world, &tenant.key, "k", "one").await;
    minutes(59);
    let second = append_to_key(&world, &tenant.key, "k", "two").await;
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
        .append(&tenant.key, id, json!([user_message("by its id")]))
        .await
        .expect(201);
    assert_eq!(named["session_id"], id, "a named id is never reset");
    minutes(61);
    let third = append_to_key(&world, &tenant.key, "k", "three").await;
    let reset = json!({"reason": "idle", "previous_session_id": id});
    assert_eq!((&third["reset"], &third["created"]), (&reset, &json!(true)));
    assert_ne!(third["session_id"], first["session_id"]);
    let old = get_session(&world, &tenant.key, id).await;
    assert_eq!(
        (&old["state"], &old["end_reason"]),
        (&json!("ended"), &json!("idle"))
    );
    let shown = slot_of_key(&world, &tenant.key, "k").await;
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
    let fourth = append_to_key(&world, &tenant.key, "k", "four").await;
    assert_eq!(
        (&fourth["session_id"], &fourth["reset"]),
        (&json!(id), &json!(null))
    );
    // What is spoken through one key keeps the conversation young for the other.
    let path = "/v1/session-keys/other/switch";
    append_to_key(&world, &tenant.key, "other", "hi").await;
    world
        .post(&tenant.key, path, json!({"session_id": id}))
        .await
        .expect(200);
    minutes(50);
    append_to_key(&world, &tenant.key, "k", "five").await;
    minutes(50);
    let sixth = append_to_key(&world, &tenant.key, "other", "six").await;
    assert_eq!(
        (&sixth["session_id"], &sixth["reset"]),
        (&json!(id), &json!(null))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_day_ends_at_the_hour_of_the_user_s_own_zone() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    sign_in(&world, &tenant, "ada").await;
    sqlx::query("update users set time_zone = 'Asia/Kolkata' where tenant_id = $1")
        .bind(tenant.uuid())
        .execute(&mut world.superuser().await)
        .await
        .unwrap();
    // Half past three in the afternoon in UTC is nine in the evening in Kolkata.
    world.start_window(Duration::from_secs(24 * 3600));
    world.clock.advance(Duration::from_secs(14 * 3600));
    let ada = sign_in(&world, &tenant, "ada").await;
    set_reset(&world, &tenant, json!({"mode": "daily", "at_hour": 21})).await;
    let first = append_to_key(&world, &ada.token, "k", "at half past seven").await;
    world.clock.advance(Duration::from_secs(80 * 60));
    let second = append_to_key(&world, &ada.token, "k", "ten to nine").await;
    assert_eq!(
        (&second["session_id"], &second["reset"]),
        (&first["session_id"], &json!(null))
    );
    world.clock.advance(Duration::from_secs(15 * 60));
    let ada = sign_in(&world, &tenant, "ada").await;
    let third = append_to_key(&world, &ada.token, "k", "five past nine").await;
    let reset = json!({"reason": "daily", "previous_session_id": first["session_id"]});
    assert_eq!(third["reset"], reset);
    let fourth = append_to_key(&world, &ada.token, "k", "again").await;
    assert_eq!(fourth["reset"], json!(null), "once a day");
    // A platform's own rule comes before the agent's.
    set_reset(
        &world,
        &tenant,
        json!({"mode": "idle", "idle_minutes": 1, "by_platform": {"web": {"mode": "none"}}}),
    )
    .await;
    world.clock.advance(Duration::from_secs(30 * 60));
    let fifth = append_to_key(&world, &ada.token, "k", "much later").await;
    assert_eq!(
        (&fifth["session_id"], &fifth["reset"]),
        (&fourth["session_id"], &json!(null))
    );
}
