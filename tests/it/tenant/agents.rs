//! `/v1/agents`: documents with defaults, and keys that go in and never come out.

use serde_json::{Value, json};

use crate::support::{Fields, World};

const KEY: &str = "sk-canary-key";

fn openai(base_url: &str) -> Value {
    json!({"upstream": {"kind": "openai", "base_url": base_url, "model": "gpt-x", "api_key": KEY}})
}

fn without_key(mut body: Value) -> Value {
    body["upstream"].as_object_mut().unwrap().remove("api_key");
    body
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_tenant_has_main_on_the_demo_model() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let main = world.get(&tenant.key, "/v1/agents/main").await.expect(200);
    assert_eq!(
        main["upstream"],
        json!({"kind": "demo", "forward_session_key": false, "timeout_seconds": 600})
    );
    assert_eq!(main["compression"]["threshold"], 0.5);
    assert_eq!(main["on_busy"], "queue");
    assert_eq!(main["linked_sessions"], "shared");
    assert_eq!(main["group_scope"], "per-member");
    assert_eq!(main["reset"]["mode"], "none");
    assert_eq!(main["offer_window_hours"], 24);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_is_made_replaced_listed_and_deleted() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let body =
        json!({"upstream": {"kind": "demo"}, "system_prompt": "Be kind.", "dm_scope": "per-peer"});
    let made = world
        .put(&tenant.key, "/v1/agents/helper", body)
        .await
        .expect(201);
    assert_eq!(made["system_prompt"], "Be kind.");
    assert_eq!(made["dm_scope"], "per-peer");
    let replaced = world
        .put(
            &tenant.key,
            "/v1/agents/helper",
            json!({"upstream": {"kind": "demo"}}),
        )
        .await
        .expect(200);
    assert_eq!(replaced["system_prompt"], "", "replaced whole");
    let list = world.get(&tenant.key, "/v1/agents").await.expect(200);
    let names: Vec<_> = list.list().iter().map(|a| a["name"].clone()).collect();
    assert_eq!(names, ["helper", "main"]);
    world
        .delete(&tenant.key, "/v1/agents/helper")
        .await
        .expect(204);
    world
        .delete(&tenant.key, "/v1/agents/helper")
        .await
        .expect_problem(404, "not_found");
    world
        .delete(&tenant.key, "/v1/agents/main")
        .await
        .expect_problem(409, "agent_in_use");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_is_sealed_never_returned_and_does_not_follow_a_changed_address() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let put = async |body: Value| world.put(&tenant.key, "/v1/agents/gpt", body).await;
    let one = "https://api.one.example/v1";
    let made = put(openai(one)).await;
    assert_eq!(made.expect(201)["has_api_key"], true);
    assert!(!made.body.contains(KEY));
    let shown = world.get(&tenant.key, "/v1/agents").await;
    assert!(!shown.body.contains(KEY));
    let stored: String = sqlx::query_scalar(
        "select spec::text || encode(api_key_enc, 'escape') from agents where name = 'gpt'",
    )
    .fetch_one(&mut world.superuser().await)
    .await
    .unwrap();
    assert!(!stored.contains("canary"), "{stored}");

    let same_host = without_key(openai("https://api.one.example/v2"));
    assert_eq!(put(same_host).await.expect(200)["has_api_key"], true);
    for elsewhere in [
        "https://api.two.example/v1",
        "https://api.one.example:8443/v1",
    ] {
        let reply = put(without_key(openai(elsewhere))).await;
        let problem = reply.expect_problem(422, "secret_required");
        assert_eq!(problem["errors"][0]["pointer"], "/upstream/api_key");
    }
    let kept = world.get(&tenant.key, "/v1/agents/gpt").await.expect(200);
    assert_eq!(
        kept["upstream"]["base_url"], "https://api.one.example/v2",
        "nothing changed"
    );
    let mut dropped = openai("https://api.two.example/v1");
    dropped["upstream"]["api_key"] = Value::Null;
    assert_eq!(put(dropped).await.expect(200)["has_api_key"], false);
    assert_eq!(put(openai(one)).await.expect(200)["has_api_key"], true);
    let demo = json!({"upstream": {"kind": "demo"}});
    assert_eq!(put(demo).await.expect(200)["has_api_key"], false);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_with_an_agent_is_pointed_at() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    for (body, status, pointer) in [
        (json!({}), 400, ""),
        (
            json!({"upstream": {"kind": "magic"}}),
            400,
            "/upstream/kind",
        ),
        (
            json!({"upstream": {"kind": "demo"}, "color": 1}),
            400,
            "/color",
        ),
        (
            json!({"upstream": {"kind": "demo", "color": 1}}),
            400,
            "/upstream/color",
        ),
        (
            json!({"upstream": {"kind": "demo"}, "toolsets": {"irc": [""]}}),
            400,
            "/toolsets/irc/0",
        ),
        (
            json!({"upstream": {"kind": "demo"}, "reset": {"mode": "never"}}),
            400,
            "/reset/mode",
        ),
        (
            json!({"upstream": {"kind": "demo"}, "context_window": 5}),
            422,
            "/context_window",
        ),
        (
            json!({"upstream": {"kind": "demo", "api_key": "k"}}),
            422,
            "/upstream/api_key",
        ),
        (
            json!({"upstream": {"kind": "openai", "model": "m"}}),
            422,
            "/upstream/base_url",
        ),
        (openai("http://api.example/v1"), 422, "/upstream/base_url"),
        (openai("https://127.0.0.1/v1"), 422, "/upstream/base_url"),
        (
            openai("https://user:pw@api.example/v1"),
            422,
            "/upstream/base_url",
        ),
        (openai("not a url"), 422, "/upstream/base_url"),
    ] {
        let reply = world.put(&tenant.key, "/v1/agents/x", body.clone()).await;
        assert_eq!(reply.status, status, "{body}: {}", reply.body);
        let problem = reply.expect(status);
        assert_eq!(
            problem["errors"][0]["pointer"], pointer,
            "{body}: {problem}"
        );
    }
    world
        .get(&tenant.key, "/v1/agents/x")
        .await
        .expect_problem(404, "not_found");
}
