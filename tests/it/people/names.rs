//! Names that people read: nothing in them makes them read otherwise than they are written.

use serde_json::json;

use crate::support::World;

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_turns_text_around_or_is_not_seen_is_refused_with_a_pointer() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    for name in [
        "a\u{202e}b",
        "\u{2066}a\u{2069}",
        "\u{200b}",
        "a\u{feff}",
        "a\u{ffff}",
    ] {
        let reply = world
            .post(&tenant.key, "/v1/users", json!({ "display_name": name }))
            .await;
        let problem = reply.expect_problem(400, "invalid_request");
        assert_eq!(problem["errors"][0]["pointer"], "/display_name", "{name:?}");
    }
    let name = json!({"display_name": "דני 👩\u{200d}🚀"});
    world.post(&tenant.key, "/v1/users", name).await.expect(201);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_is_not_lost_for_its_senders_name() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let (_, bridge) = world.api_key(&tenant, "bridge").await;
    for (name, shown) in [("\u{2068}Bob\u{2069}\u{202e}", "Bob"), ("\u{200b}", "5")] {
        let body = json!({
            "identity": "telegram:5", "text": "hi", "display_name": name,
            "chat": {"type": "thread", "id": "board", "thread_id": shown},
        });
        let answer = world.post(&bridge, "/v1/inbound", body).await;
        answer.expect(200);
        assert!(
            answer.body.contains(&format!("[{shown}] hi")),
            "{}",
            answer.body
        );
    }
}
