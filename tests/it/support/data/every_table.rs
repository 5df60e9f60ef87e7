//! A row in every table of a tenant.

use reqwest::Method;
use serde_json::json;

use crate::support::conversations::grant;
use crate::support::{Fields, Reply, Tenant, World};

/// A row in every table with tenant rows, so that "sees nothing" means something.
pub async fn fill_every_table(world: &World, tenant: &Tenant) {
    create_key(world, &tenant.key, "fill").await.expect(201);
    let secret = "a secret of thirty-two bytes or more";
    let issuer = json!({"issuer": "i", "platform": "web", "algorithm": "HS256", "secret": secret});
    world
        .put(&tenant.key, "/v1/issuers/fill", issuer)
        .await
        .expect(201);
    let expires = world.clock.now().timestamp() + 60;
    let claims = json!({"iss": "i", "aud": tenant.id, "sub": "fill", "exp": expires});
    let token = crate::support::tokens::hs256(&claims, secret);
    world.get(&token, "/v1/users/me").await.expect(200);
    fill_conversations(world, tenant, &token).await;
    fill_people(world, tenant).await;
    throughline::jobs::flush_usage::tick(world.app()).await;
}

/// Two accounts of one person, heard, with a home, a code, a wrong one, and a notice of their link.
async fn fill_people(world: &World, tenant: &Tenant) {
    let key = &tenant.key;
    let linked = world.link(key, "telegram:1", "telegram:2").await;
    world.dm(key, "telegram:1").await;
    world.mint(key, "telegram:1").await;
    let guess = world.redeem(key, "ABCDEFGH", "telegram:2").await;
    guess.expect_problem(404, "code_not_found");
    let shown = world.mint(key, "discord:9").await;
    let send =
        json!({"identity": "telegram:1", "text": format!("/link {shown}"), "message_id": "1"});
    world.post(key, "/v1/inbound", send).await.expect(200);
    let user = linked.text("user_id");
    let path = format!("/v1/users/{user}/home-channels/telegram");
    let home = json!({"identity": "telegram:1", "chat": {"type": "dm"}});
    world.put(key, &path, home).await.expect(200);
}

async fn fill_conversations(world: &World, tenant: &Tenant, token: &str) {
    let body = json!({"session_key": "fill", "messages": [{"role": "user", "content": "fill"}]});
    let session = world.post(token, "/v1/sessions", body).await.expect(201);
    let user = session.text("user_id");
    grant(world, tenant, session.text("id"), user).await;
    let ask = json!({"model": "main", "messages": [{"role": "user", "content": "fill"}]});
    let ask = world
        .request(reqwest::Method::POST, "/v1/chat/completions", token)
        .header("x-hermes-session-key", "fill")
        .json(&ask);
    Reply::of(ask).await.expect(200);
    // What a sweep and a deletion leave behind, without a job that would change it under the test.
    for sql in [
        "insert into retention_sweeps (tenant_id, cutoff, started_at) values ($1, now(), now())",
        "insert into spent_session_ids (tenant_id, digest) values ($1, decode(repeat('00', 32), 'hex'))",
        "insert into erased_people (tenant_id, user_id, merged_ids, identity_ids, names, erased_at)
         values ($1, $1, '{}', '{}', '{}', now())",
        "insert into summary_sources (tenant_id, identity_id, session_id, seq)
         select tenant_id, tenant_id, session_id, seq from messages where tenant_id = $1 order by session_id, seq limit 1",
    ] {
        sqlx::query(sql)
            .bind(tenant.uuid())
            .execute(&mut world.superuser().await)
            .await
            .unwrap();
    }
}

/// A key, made with a name for retries.
pub async fn create_key(world: &World, key: &str, idempotency_key: &str) -> Reply {
    let request = world
        .request(Method::POST, "/v1/api-keys", key)
        .header("idempotency-key", idempotency_key)
        .json(&json!({"name": "made twice", "scopes": ["chat"]}));
    Reply::of(request).await
}
