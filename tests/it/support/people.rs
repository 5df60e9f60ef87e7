//! People of a tenant, for tests that need someone to speak.

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::{Fields, Reply, Tenant, World, tokens};

const SECRET: &str = "a secret of the tests' people, 32 bytes";
const ISSUER: &str = "https://people.example";

/// Someone with a user token.
pub struct User {
    pub token: String,
    pub user_id: String,
}

/// The person `name` of a tenant, on the platform `web`; made at first contact.
pub async fn sign_in(world: &World, tenant: &Tenant, name: &str) -> User {
    let issuer =
        json!({"issuer": ISSUER, "platform": "web", "algorithm": "HS256", "secret": SECRET});
    world
        .put(&tenant.key, "/v1/issuers/people", issuer)
        .await
        .expect_success();
    let token = token(world, tenant, name);
    let user = world.get(&token, "/v1/users/me").await.expect(200);
    User {
        user_id: user.id(),
        token,
    }
}

/// A token of the issuer that `person` registers; nobody has used it yet.
pub fn token(world: &World, tenant: &Tenant, name: &str) -> String {
    let expires = world.clock.now().timestamp() + 20 * 3600;
    let claims = json!({"iss": ISSUER, "aud": tenant.id, "sub": name, "exp": expires});
    tokens::hs256(&claims, SECRET)
}

/// A bridge's request for one person.
pub async fn as_bridge(
    world: &World,
    key: &str,
    identity: &str,
    (method, path): (Method, &str),
    body: Option<Value>,
) -> Reply {
    let mut request = world
        .request(method, path, key)
        .header("x-throughline-identity", identity);
    if let Some(body) = body {
        request = request.json(&body);
    }
    Reply::of(request).await
}
