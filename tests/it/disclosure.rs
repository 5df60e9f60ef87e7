//! What answers must not give away, and to whom.

use reqwest::Method;
use serde_json::json;

use crate::support::tokens::{SigningKey, unsigned};
use crate::support::{Reply, World};

#[tokio::test(flavor = "multi_thread")]
async fn no_private_key_is_registered_or_shown() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let mut jwks = SigningKey::jwks(&[&SigningKey::generate("ES256", "one")]);
    let public = jwks.clone();
    jwks["keys"][0]["d"] = json!("c2VjcmV0");
    let body = |jwks| json!({"issuer": "https://id.example", "platform": "web", "algorithm": "ES256", "jwks": jwks});
    let path = "/v1/issuers/id";
    let refused = world.put(&tenant.key, path, body(jwks.clone())).await;
    let refused = refused.expect_problem(422, "invalid_value");
    assert_eq!(refused["errors"][0]["pointer"], "/jwks/keys/0/d");
    world
        .put(&tenant.key, path, body(public.clone()))
        .await
        .expect(201);
    // As it could be registered once.
    sqlx::query("update issuers set jwks = $1")
        .bind(&jwks)
        .execute(&mut world.superuser().await)
        .await
        .unwrap();
    let shown = world.get(&tenant.key, path).await.expect(200);
    assert_eq!(shown["jwks"], public);
    let listed = world.get(&tenant.key, "/v1/issuers").await;
    assert!(!listed.text.contains("c2VjcmV0"));
}

#[tokio::test(flavor = "multi_thread")]
async fn no_cache_keeps_an_answer_and_no_browser_guesses_its_type() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    for path in ["/v1/users", "/v1/nothing", "/v1/api-keys"] {
        let request = world.request(Method::GET, path, &tenant.key);
        let answer = request.send().await.unwrap();
        assert_eq!(answer.headers()["cache-control"], "no-store", "{path}");
        assert_eq!(answer.headers()["x-content-type-options"], "nosniff");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_read_is_refused_for_what_it_is() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let expires = world.clock.now().timestamp() + 60;
    let claims = json!({"iss": "a\0b", "aud": tenant.id, "sub": "x", "exp": expires});
    world
        .get(&unsigned(&claims), "/v1/users/me")
        .await
        .expect_problem(401, "unknown_issuer");
    let request = world
        .request(Method::POST, "/v1/sessions", &tenant.key)
        .header("content-encoding", "gzip")
        .header("content-type", "application/json")
        .body("\u{1f}");
    Reply::of(request)
        .await
        .expect_problem(415, "unsupported_media_type");
}
