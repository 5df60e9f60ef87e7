//! `/v1/whoami`: every credential is told what it is.

use serde_json::{Value, json};

use crate::support::world::OPERATOR_KEY;
use crate::support::{Tenant, World, tokens};

const SECRET: &str = "a secret of the tests, 32 bytes or more";

async fn whoami(world: &World, key: &str) -> Value {
    let reply = world.get(key, "/v1/whoami").await;
    let secret = key.rsplit(['_', '.']).next().unwrap();
    assert!(!reply.body.contains(secret), "{}", reply.body);
    reply.expect(200)
}

async fn user_token(world: &World, tenant: &Tenant) -> String {
    let issuer = json!({
        "issuer": "https://id.example", "platform": "web", "algorithm": "HS256", "secret": SECRET,
    });
    world
        .put(&tenant.key, "/v1/issuers/login", issuer)
        .await
        .expect(201);
    let exp = world.clock.now().timestamp() + 600;
    tokens::hs256(
        &json!({"iss": "https://id.example", "aud": tenant.id, "sub": "alice", "exp": exp}),
        SECRET,
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn an_api_key_is_shown_its_tenant_scopes_and_platforms() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    for scope in ["admin", "bridge", "chat", "read"] {
        let (id, key) = world.api_key(&tenant, scope).await;
        let told = whoami(&world, &key).await;
        assert_eq!(told["kind"], "api_key");
        assert_eq!(told["tenant_id"], tenant.id.as_str());
        assert_eq!((&told["id"], &told["name"]), (&json!(id), &json!(scope)));
        assert_eq!(told["scopes"], json!([scope]));
        let platforms = if scope == "bridge" {
            json!(["telegram"])
        } else {
            json!([])
        };
        assert_eq!(told["platforms"], platforms);
        assert_eq!(told["expires_at"], Value::Null);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_token_is_shown_its_user_identity_and_issuer() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let token = user_token(&world, &tenant).await;
    let told = whoami(&world, &token).await;
    let own = world.get(&token, "/v1/users/me").await.expect(200);
    let identity = world
        .identity_id(&tenant.key, &own["id"], "web:alice")
        .await;
    let expected = json!({
        "kind": "user_token", "tenant_id": tenant.id, "user_id": own["id"], "identity_id": identity,
        "identity": "web:alice", "platform": "web", "issuer": "login",
    });
    assert_eq!(told, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_operator_is_shown_its_name_in_the_audit_and_a_stranger_nothing() {
    let world = World::new().await;
    let told = whoami(&world, OPERATOR_KEY).await;
    assert_eq!(told["kind"], "operator_key");
    world.tenant("Acme").await;
    let audit = world
        .get(OPERATOR_KEY, "/v1/operator/audit")
        .await
        .expect(200);
    assert_eq!(audit["data"][0]["actor"], told["actor"]);
    let reply = world.get("tl_nothing", "/v1/whoami").await;
    reply.expect_problem(401, "unauthorized");
}
