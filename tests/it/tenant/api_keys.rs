//! `/v1/api-keys`: making, listing, expiring and revoking keys.

use std::time::{Duration, Instant};

use serde_json::json;
use throughline::dev::servers::RedisServer;

use crate::support::servers::cluster::{scratch_dir, setup};
use crate::support::{Fields, World, eventually};

#[tokio::test(flavor = "multi_thread")]
async fn a_key_is_shown_once_and_kept_only_as_a_hash() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let body =
        json!({"name": "bot", "scopes": ["bridge"], "platforms": ["telegram", "slack@T012"]});
    let made = world
        .post(&tenant.key, "/v1/api-keys", body)
        .await
        .expect(201);
    let key = made.text("key");
    assert!(key.starts_with("tl_"), "{key}");
    assert_eq!(made["platforms"], json!(["telegram", "slack@T012"]));
    let listed = world.get(&tenant.key, "/v1/api-keys").await;
    assert!(!listed.body.contains(key));
    let mut superuser = world.superuser().await;
    let dump: String = sqlx::query_scalar("select string_agg(k::text, ' ') from api_keys k")
        .fetch_one(&mut superuser)
        .await
        .unwrap();
    let secret = key.rsplit('_').next().unwrap();
    assert!(!dump.contains(secret));
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_for_a_new_key_have_pointers() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    for (body, pointer) in [
        (json!({"name": "x", "scopes": []}), "/scopes"),
        (json!({"name": "x", "scopes": ["read", "read"]}), "/scopes"),
        (json!({"name": "x", "scopes": ["bridge"]}), "/platforms"),
        (
            json!({"name": "x", "scopes": ["chat"], "platforms": ["irc"]}),
            "/platforms",
        ),
        (
            json!({"name": "x", "scopes": ["bridge"], "platforms": ["irc", "irc"]}),
            "/platforms",
        ),
        (
            json!({"name": "x", "scopes": ["chat"], "expires_at": "2020-01-01T00:00:00Z"}),
            "/expires_at",
        ),
    ] {
        let reply = world.post(&tenant.key, "/v1/api-keys", body).await;
        let problem = reply.expect_problem(422, "invalid_value");
        assert_eq!(problem["errors"][0]["pointer"], pointer, "{problem}");
    }
    for (body, pointer) in [
        (json!({"name": "x", "scopes": ["root"]}), "/scopes/0"),
        (
            json!({"name": "x", "scopes": ["bridge"], "platforms": ["dm"]}),
            "/platforms/0",
        ),
        (json!({"name": "a\nb", "scopes": ["chat"]}), "/name"),
        (
            json!({"name": "x", "scopes": ["chat"], "admin": true}),
            "/admin",
        ),
    ] {
        let reply = world.post(&tenant.key, "/v1/api-keys", body).await;
        let problem = reply.expect_problem(400, "invalid_request");
        assert_eq!(problem["errors"][0]["pointer"], pointer, "{problem}");
    }
    let keys = world.get(&tenant.key, "/v1/api-keys").await.expect(200);
    assert_eq!(keys.list().len(), 1, "nothing was made");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_key_is_refused_with_its_own_code() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let expires_at = world.clock.now() + Duration::from_secs(3600);
    let body = json!({"name": "brief", "scopes": ["read"], "expires_at": expires_at});
    let made = world
        .post(&tenant.key, "/v1/api-keys", body)
        .await
        .expect(201);
    let key = made.text("key");
    world.get(key, "/v1/tenant").await.expect(200);
    world.clock.advance(Duration::from_secs(3601));
    let reply = world.get(key, "/v1/tenant").await;
    reply.expect_problem(401, "key_expired");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_key_fails_on_another_node_within_a_second_also_without_redis() {
    let redis = RedisServer::start(&setup(scratch_dir("own-redis")), "pw")
        .await
        .unwrap();
    let world = World::with_redis(2, &redis.url).await;
    let tenant = world.tenant("Acme").await;
    for redis in [Some(redis), None] {
        // The second round runs with Redis stopped.
        let (id, key) = world.api_key(&tenant, "read").await;
        world.get_on(1, &key, "/v1/tenant").await.expect(200);
        world
            .delete(&tenant.key, &format!("/v1/api-keys/{id}"))
            .await
            .expect(204);
        let revoked = Instant::now();
        let last_taken = loop {
            let reply = world.get_on(1, &key, "/v1/tenant").await;
            if reply.status == 401 {
                reply.expect_problem(401, "key_revoked");
                break revoked.elapsed();
            }
            assert!(revoked.elapsed() < Duration::from_secs(5), "still taken");
        };
        assert!(
            last_taken < Duration::from_secs(1),
            "taken for {last_taken:?}"
        );
        if let Some(redis) = redis {
            redis.child.stop();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn revoking_twice_is_fine_and_revoking_nothing_is_404() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let (id, _) = world.api_key(&tenant, "read").await;
    let path = format!("/v1/api-keys/{id}");
    world.delete(&tenant.key, &path).await.expect(204);
    world.delete(&tenant.key, &path).await.expect(204);
    for nothing in ["key_01a1e2373db47013a539524902c63338", "x", "%00"] {
        let reply = world
            .delete(&tenant.key, &format!("/v1/api-keys/{nothing}"))
            .await;
        reply.expect_problem(404, "not_found");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_use_is_noted_at_most_once_a_minute() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let (id, key) = world.api_key(&tenant, "read").await;
    let last_used = async || {
        let keys = world.get(&tenant.key, "/v1/api-keys").await.expect(200);
        let rows = keys.list().clone();
        let row = rows
            .into_iter()
            .find(|row| row["id"] == id.as_str())
            .unwrap();
        row["last_used_at"].clone()
    };
    assert!(last_used().await.is_null());
    world.get(&key, "/v1/tenant").await.expect(200);
    let first = last_used().await;
    assert!(first.is_string());
    world.expire_caches();
    world.get(&key, "/v1/tenant").await.expect(200);
    assert_eq!(last_used().await, first);
    world.clock.advance(Duration::from_secs(61));
    world.get(&key, "/v1/tenant").await.expect(200);
    assert_ne!(last_used().await, first);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_with_one_wrong_character_or_of_a_made_up_tenant_is_unknown() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let mut mistyped = tenant.key.clone();
    mistyped.pop();
    mistyped.push('!');
    for wrong in [mistyped.as_str(), "tl_x", "sk-123", "", "é"] {
        let request = reqwest::Client::new().get(world.url("/v1/tenant")).header(
            "authorization",
            reqwest::header::HeaderValue::from_bytes(format!("Bearer {wrong}").as_bytes()).unwrap(),
        );
        let reply = crate::support::Reply::of(request).await;
        reply.expect_problem(401, "unauthorized");
        assert_eq!(reply.header("www-authenticate"), "Bearer");
        assert_eq!(reply.header("x-should-retry"), "false");
    }
    // Well formed, right checksum, but of no key.
    let forged = throughline::domain::tenant::api_key::key_text(
        tenant.id.parse().unwrap(),
        throughline::ids::ApiKeyId::generate(),
        [7; 24],
    );
    let forged = secrecy::ExposeSecret::expose_secret(&forged).to_owned();
    world
        .get(&forged, "/v1/tenant")
        .await
        .expect_problem(401, "unauthorized");
    eventually(
        "a good key still works",
        Duration::from_secs(1),
        async || world.get(&tenant.key, "/v1/tenant").await.status == 200,
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_are_paged_and_cursors_are_bound_to_their_caller() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let (_, reader) = world.api_key(&tenant, "read").await;
    for _ in 0..4 {
        world.api_key(&tenant, "chat").await;
    }
    let mut seen = Vec::new();
    let mut path = "/v1/api-keys?limit=2".to_owned();
    loop {
        let page = world.get(&tenant.key, &path).await.expect(200);
        for row in page.list() {
            seen.push(row.id());
        }
        match page["next_cursor"].as_str() {
            Some(cursor) => path = format!("/v1/api-keys?limit=2&cursor={cursor}"),
            None => break,
        }
    }
    let mut sorted = seen.clone();
    sorted.sort();
    sorted.dedup();
    sorted.reverse();
    assert_eq!(seen, sorted, "newest first, each once");
    assert_eq!(seen.len(), 6);
    let first = world
        .get(&tenant.key, "/v1/api-keys?limit=2")
        .await
        .expect(200);
    let cursor = first.text("next_cursor");
    let stolen = format!("/v1/api-keys?limit=2&cursor={cursor}");
    world
        .get(&reader, &stolen)
        .await
        .expect_problem(400, "invalid_cursor");
    for wrong in [
        "limit=0",
        "limit=201",
        "limit=x",
        "limit=-1",
        "color=red",
        "cursor=AAAA",
    ] {
        let reply = world
            .get(&tenant.key, &format!("/v1/api-keys?{wrong}"))
            .await;
        assert_eq!(reply.status, 400, "{wrong}: {}", reply.body);
    }
}
