//! The last admin key of a tenant stays, also where two are revoked at once; and how many keys, agents and issuers
//! a tenant may have.

use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::world::OPERATOR_KEY;
use crate::support::{Fields, Reply, Tenant, World};

async fn first_key_id(world: &World, tenant: &Tenant) -> String {
    let whoami = world.get(&tenant.key, "/v1/whoami").await.expect(200);
    whoami.id()
}

async fn revoke_on(world: &World, node: usize, tenant: &Tenant, id: &str) -> Reply {
    let url = world.url_on(node, &format!("/v1/api-keys/{id}"));
    Reply::of(world.client.delete(url).bearer_auth(&tenant.key)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_admin_key_that_does_not_expire_cannot_be_revoked() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let first = first_key_id(&world, &tenant).await;
    world.api_key(&tenant, "read").await;
    let expires_at = world.clock.now() + Duration::from_secs(3600);
    let body = json!({"name": "brief", "scopes": ["admin"], "expires_at": expires_at});
    let brief = world
        .post(&tenant.key, "/v1/api-keys", body)
        .await
        .expect(201);
    let path = format!("/v1/api-keys/{first}");
    let refused = world.delete(&tenant.key, &path).await;
    refused.expect_problem(409, "last_admin_key");
    assert_eq!(refused.header("x-should-retry"), "false");
    world.get(&tenant.key, "/v1/tenant").await.expect(200);
    // One that expires can go, and with another that stays the first can go too.
    let brief = format!("/v1/api-keys/{}", brief.text("id"));
    world.delete(&tenant.key, &brief).await.expect(204);
    world.api_key(&tenant, "admin").await;
    world.delete(&tenant.key, &path).await.expect(204);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_admin_keys_revoked_at_once_on_two_nodes_leave_one() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    let first = first_key_id(&world, &tenant).await;
    let (second, _) = world.api_key(&tenant, "admin").await;
    let mut holder = world.superuser().await;
    for sql in ["begin", "select 1 from tenants for update"] {
        sqlx::query(sql).execute(&mut holder).await.unwrap();
    }
    let let_go = async {
        world.waiting(2).await;
        sqlx::query("commit").execute(&mut holder).await.unwrap();
    };
    let (one, two, ()) = tokio::join!(
        revoke_on(&world, 0, &tenant, &first),
        revoke_on(&world, 1, &tenant, &second),
        let_go
    );
    let mut answers = [one.status, two.status];
    answers.sort_unstable();
    assert_eq!(answers, [204, 409], "{} {}", one.body, two.body);
}

async fn limit(world: &World, tenant: &Tenant, limits: Value) {
    let path = format!("/v1/tenants/{}", tenant.id);
    let body = json!({ "limits": limits });
    Reply::of(
        world
            .request(Method::PATCH, &path, OPERATOR_KEY)
            .json(&body),
    )
    .await
    .expect(200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_makes_no_more_keys_than_its_limit_also_on_two_nodes_at_once() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    limit(&world, &tenant, json!({"api_keys": 5})).await;
    let make = async |node: usize| {
        let url = world.url_on(node, "/v1/api-keys");
        let body = json!({"name": "x", "scopes": ["chat"]});
        Reply::of(world.client.post(url).bearer_auth(&tenant.key).json(&body)).await
    };
    let replies = futures_util::future::join_all((0..10).map(|each| make(each % 2))).await;
    let made: Vec<&Reply> = replies.iter().filter(|reply| reply.status == 201).collect();
    assert_eq!(made.len(), 4, "besides the first");
    for refused in replies.iter().filter(|reply| reply.status != 201) {
        refused.expect_problem(409, "limit_reached");
    }
    // One that is revoked makes room; the operator's is made without.
    let made: Value = serde_json::from_str(&made[0].body).unwrap();
    let path = format!("/v1/operator/tenants/{}/api-keys", tenant.id);
    world.post(OPERATOR_KEY, &path, json!({})).await.expect(201);
    make(0).await.expect_problem(409, "limit_reached");
    let id = made.text("id");
    let first = first_key_id(&world, &tenant).await;
    for id in [id, &first] {
        revoke_on(&world, 0, &tenant, id).await.expect(204);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn agents_and_issuers_past_the_limit_are_refused_and_those_there_are_can_be_changed() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    limit(&world, &tenant, json!({"agents": 2, "issuers": 1})).await;
    let agent = json!({"upstream": {"kind": "demo"}});
    let issuer = |platform: &str| {
        json!({
            "issuer": format!("https://{platform}.example"), "platform": platform, "algorithm": "HS256",
            "secret": "a secret of 32 bytes or even more",
        })
    };
    let agents = async |name: &str| {
        let path = format!("/v1/agents/{name}");
        world.put(&tenant.key, &path, agent.clone()).await
    };
    let issuers = async |name: &str| {
        let path = format!("/v1/issuers/{name}");
        world.put(&tenant.key, &path, issuer(name)).await
    };
    agents("second").await.expect(201);
    agents("third").await.expect_problem(409, "limit_reached");
    for there in ["main", "second"] {
        agents(there).await.expect(200);
    }
    issuers("web").await.expect(201);
    issuers("app").await.expect_problem(409, "limit_reached");
    issuers("web").await.expect(200);
    world
        .delete(&tenant.key, "/v1/agents/second")
        .await
        .expect(204);
    agents("third").await.expect(201);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_agent_too_many_on_two_nodes_at_once_is_one_refusal() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    limit(&world, &tenant, json!({"agents": 2})).await;
    let mut holder = world.superuser().await;
    for sql in ["begin", "select 1 from tenants for update"] {
        sqlx::query(sql).execute(&mut holder).await.unwrap();
    }
    let put = async |node: usize, name: &str| {
        let url = world.url_on(node, &format!("/v1/agents/{name}"));
        let body = json!({"upstream": {"kind": "demo"}});
        Reply::of(world.client.put(url).bearer_auth(&tenant.key).json(&body)).await
    };
    let let_go = async {
        world.waiting(2).await;
        sqlx::query("commit").execute(&mut holder).await.unwrap();
    };
    let (one, two, ()) = tokio::join!(put(0, "one"), put(1, "two"), let_go);
    let mut answers = [one.status, two.status];
    answers.sort_unstable();
    assert_eq!(answers, [201, 409], "{} {}", one.body, two.body);
}
