//! Limits and usage: what a tenant may use, held across nodes, and what it used.

use std::time::{Duration, Instant};

use deadpool_redis::redis;
use futures_util::StreamExt;
use reqwest::Method;
use serde_json::{Value, json};
use throughline::dev::servers::RedisServer;
use throughline::jobs::{flush_usage, heartbeat};

use crate::support::servers::cluster::{cluster, scratch_dir, setup};
use crate::support::world::OPERATOR_KEY;
use crate::support::{Fields, Reply, Tenant, World, eventually, retry};

const MINUTE: Duration = Duration::from_secs(60);

async fn own_redis() -> RedisServer {
    RedisServer::start(&setup(scratch_dir("own-redis")), "pw")
        .await
        .unwrap()
}

async fn put_limits(world: &World, tenant: &Tenant, limits: Value) -> Reply {
    let path = format!("/v1/operator/tenants/{}/limits", tenant.id);
    let request = world.request(Method::PUT, &path, OPERATOR_KEY);
    Reply::of(request.json(&limits)).await
}

/// As many nodes, which wait for Redis however busy this machine is: what they admit is exact.
async fn patient_world(count: usize, redis_url: &str) -> World {
    let world = World::with_redis(count, redis_url).await;
    for node in &world.nodes {
        node.app.limits.set_patience(10_000);
    }
    world
}

/// A tenant with these limits; the window is young, so that a test need not fear its end.
async fn limited_tenant(world: &World, limits: Value) -> Tenant {
    let tenant = world.tenant("limited").await;
    put_limits(world, &tenant, limits).await.expect(200);
    world.start_window(MINUTE);
    tenant
}

/// Sends `count` requests with one key, some at a time, in turn to all nodes; answers the statuses.
async fn hammer(world: &World, key: &str, count: usize) -> Vec<u16> {
    let nodes = world.nodes.len();
    futures_util::stream::iter(0..count)
        .map(async |n| world.get_on(n % nodes, key, "/v1/tenant").await.status)
        .buffer_unordered(20)
        .collect()
        .await
}

fn accepted(statuses: &[u16]) -> usize {
    let strange = |status: &&u16| ![200, 429].contains(*status);
    assert_eq!(statuses.iter().find(strange), None);
    statuses.iter().filter(|status| **status == 200).count()
}

/// The number after `name` in a header like `"tenant";r=5;t=42`.
fn parameter(header: &str, name: &str) -> u64 {
    let part = header.split(';').find_map(|part| part.strip_prefix(name));
    part.unwrap_or_else(|| panic!("{header}")).parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_over_its_limit_is_refused_until_the_window_ends_and_others_are_not() {
    let world = patient_world(1, cluster().redis_url()).await;
    let tenant = limited_tenant(&world, json!({"requests_per_minute": 5})).await;
    let other = world.tenant("other").await;
    for left in (0..5).rev() {
        let reply = world.get(&tenant.key, "/v1/tenant").await;
        reply.expect(200);
        assert_eq!(reply.header("ratelimit-policy"), "\"tenant\";q=5;w=60");
        let rate_limit = reply.header("ratelimit");
        assert!(rate_limit.starts_with("\"tenant\";"), "{rate_limit}");
        assert_eq!(parameter(rate_limit, "r="), left);
        assert!((1..=60).contains(&parameter(rate_limit, "t=")));
    }
    let refused = world.get(&tenant.key, "/v1/tenant").await;
    refused.expect_problem(429, "rate_limited");
    let rate_limit = refused.header("ratelimit");
    assert_eq!(parameter(rate_limit, "r="), 0);
    assert_eq!(
        refused.header("retry-after").parse::<u64>().unwrap(),
        parameter(rate_limit, "t=")
    );
    assert!(refused.headers.get("x-should-retry").is_none());
    // Before anything of the body is read, and also where the key has no right.
    let request = world.request(Method::POST, "/v1/api-keys", &tenant.key);
    Reply::of(request.body("not JSON"))
        .await
        .expect_problem(429, "rate_limited");
    world
        .get(&tenant.key, "/v1/tenants")
        .await
        .expect_problem(429, "rate_limited");
    world.get(&other.key, "/v1/tenant").await.expect(200);
    world.clock.advance(MINUTE);
    world.get(&tenant.key, "/v1/tenant").await.expect(200);
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_carry_the_headers_and_answers_to_operators_do_not() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    for path in ["/v1/nothing", "/v1/tenants", "/v1/usage?color=red"] {
        let reply = world.get(&tenant.key, path).await;
        assert!(reply.status >= 400);
        assert!(
            reply.header("ratelimit").starts_with("\"key\";r="),
            "the key's limit is tighter than the tenant's"
        );
    }
    let reply = world.get(OPERATOR_KEY, "/v1/tenants").await;
    assert!(reply.headers.get("ratelimit").is_none());
    let reply = world.get("nonsense", "/v1/tenant").await;
    assert!(reply.headers.get("ratelimit").is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_has_a_limit_of_its_own_and_what_it_refuses_costs_the_tenant_nothing() {
    let world = patient_world(1, cluster().redis_url()).await;
    let limits = json!({"requests_per_minute": 20, "requests_per_minute_per_key": 5});
    let tenant = world.tenant("limited").await;
    let (_, second) = world.api_key(&tenant, "read").await;
    put_limits(&world, &tenant, limits).await.expect(200);
    world.start_window(MINUTE);
    eventually("the limit applies", Duration::from_secs(2), async || {
        let reply = world.get(&tenant.key, "/v1/tenant").await;
        reply.header("ratelimit-policy") == "\"key\";q=5;w=60"
    })
    .await;
    world.start_window(MINUTE);
    assert_eq!(accepted(&hammer(&world, &tenant.key, 50).await), 5);
    let refused = world.get(&tenant.key, "/v1/tenant").await;
    assert!(refused.header("ratelimit").starts_with("\"key\";r=0"));
    assert_eq!(accepted(&hammer(&world, &second, 50).await), 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_nodes_together_admit_exactly_the_limit() {
    let world = patient_world(2, cluster().redis_url()).await;
    let tenant = limited_tenant(&world, json!({"requests_per_minute": 300})).await;
    let taken = accepted(&hammer(&world, &tenant.key, 500).await);
    assert_eq!(taken, 300);
    world.start_window(MINUTE);
    assert!(accepted(&hammer(&world, &tenant.key, 50).await) == 50);
}

/// How often each command but this one was called.
async fn commands(redis: &RedisServer) -> u64 {
    let client = redis::Client::open(redis.url.as_str()).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    let stats: String = redis::cmd("INFO")
        .arg("commandstats")
        .query_async(&mut connection)
        .await
        .unwrap();
    let calls = |line: &str| -> Option<u64> {
        let (name, rest) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
        let count = rest.split(',').next()?.parse().ok()?;
        (name != "info").then_some(count)
    };
    stats.lines().filter_map(calls).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_is_called_far_less_often_than_the_service() {
    let redis = own_redis().await;
    let world = patient_world(1, &redis.url).await;
    let limits = json!({"requests_per_minute": 1000, "requests_per_minute_per_key": 800});
    let tenant = limited_tenant(&world, limits).await;
    let before = commands(&redis).await;
    assert_eq!(accepted(&hammer(&world, &tenant.key, 2000).await), 800);
    // A script, what it calls, and what the pool says before it: some six commands for a chunk.
    let during = commands(&redis).await - before;
    assert!(during < 800, "{during} commands for 2000 requests");
    let before = commands(&redis).await;
    assert_eq!(accepted(&hammer(&world, &tenant.key, 200).await), 0);
    let during = commands(&redis).await - before;
    assert!(during < 20, "{during} commands for refusals alone");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_redis_each_node_keeps_its_share_and_answers_promptly() {
    let redis = own_redis().await;
    let world = patient_world(2, &redis.url).await;
    let tenant = limited_tenant(&world, json!({"requests_per_minute": 40})).await;
    for node in &world.nodes {
        heartbeat::tick(&node.app).await;
    }
    heartbeat::tick(world.app()).await;
    assert!(world.nodes.iter().all(|n| n.app.limits.live_nodes() == 2));
    assert_eq!(accepted(&hammer(&world, &tenant.key, 100).await), 40);
    redis.child.stop();
    world.start_window(MINUTE);
    let began = Instant::now();
    let mut taken = 0;
    for _ in 0..60 {
        let asked = Instant::now();
        let reply = world.get(&tenant.key, "/v1/tenant").await;
        assert!(asked.elapsed() < Duration::from_millis(500));
        taken += usize::from(reply.status == 200);
    }
    assert_eq!(taken, 20);
    assert!(began.elapsed() < Duration::from_secs(5));
    let other = world.get_on(1, &tenant.key, "/v1/tenant").await;
    other.expect(200);
}

/// As bad as a Redis can be: it takes connections and says nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_redis_that_hangs_holds_no_request_up() {
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("redis://:pw@{}/0", silent.local_addr().unwrap());
    let world = World::with_redis(1, &url).await;
    let tenant = limited_tenant(&world, json!({"requests_per_minute": 30})).await;
    let began = Instant::now();
    assert_eq!(accepted(&hammer(&world, &tenant.key, 100).await), 30);
    assert!(
        began.elapsed() < Duration::from_secs(3),
        "{:?}",
        began.elapsed()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_admitted_without_redis_is_counted_when_it_is_back() {
    let redis = own_redis().await;
    let url = redis.url.clone();
    let port = redis.port;
    let world = World::with_redis(1, &url).await;
    let tenant = limited_tenant(&world, json!({"requests_per_minute": 500})).await;
    redis.child.stop();
    assert_eq!(accepted(&hammer(&world, &tenant.key, 100).await), 100);
    let _redis = RedisServer::start_on(&setup(scratch_dir("own-redis")), "pw", port)
        .await
        .unwrap();
    eventually("Redis knows", Duration::from_secs(5), async || {
        world.get(&tenant.key, "/v1/tenant").await.expect(200);
        let client = redis::Client::open(url.as_str()).unwrap();
        let mut connection = client.get_multiplexed_async_connection().await.unwrap();
        let keys: Vec<String> = redis::cmd("KEYS")
            .arg(format!("throughline:limits:{}:tenant:*", tenant.id))
            .query_async(&mut connection)
            .await
            .unwrap();
        let Some(key) = keys.first() else {
            return false;
        };
        let used: u64 = redis::cmd("GET")
            .arg(key)
            .query_async(&mut connection)
            .await
            .unwrap();
        used > 100
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_changes_limits_and_they_apply_within_two_seconds() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    let shown = world.get_on(1, &tenant.key, "/v1/tenant").await.expect(200);
    assert_eq!(shown["limits"]["requests_per_minute"], 1_200_000);
    assert_eq!(shown["name"], "Acme");
    let changed = json!({"requests_per_minute_per_key": 7, "concurrent_turns": 3});
    let effective = put_limits(&world, &tenant, changed).await.expect(200);
    assert_eq!(effective["requests_per_minute_per_key"], 7);
    assert_eq!(effective["requests_per_minute"], 1_200_000);
    eventually("the other node", Duration::from_secs(2), async || {
        let reply = world.get_on(1, &tenant.key, "/v1/tenant").await;
        reply.header("ratelimit-policy") == "\"key\";q=7;w=60"
    })
    .await;
    world.start_window(MINUTE);
    let shown = world.get_on(1, &tenant.key, "/v1/tenant").await.expect(200);
    assert_eq!(shown["limits"], effective);
    // What is left out has its default again.
    let effective = put_limits(&world, &tenant, json!({})).await.expect(200);
    assert_eq!(effective["requests_per_minute_per_key"], 1_200_000);
    for (wrong, status, pointers) in [
        (json!({"requests": 1}), 400, vec!["/requests"]),
        (json!({"open_streams": "1"}), 400, vec!["/open_streams"]),
        (json!({"open_streams": 0}), 422, vec!["/open_streams"]),
        (
            json!({"tokens_per_minute": -1, "concurrent_turns": 100_001}),
            422,
            vec!["/tokens_per_minute", "/concurrent_turns"],
        ),
    ] {
        let problem = put_limits(&world, &tenant, wrong).await.expect(status);
        let errors = problem.items("errors").iter();
        let found: Vec<&str> = errors.map(|e| e.text("pointer")).collect();
        assert_eq!(found, pointers, "{problem}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn use_is_counted_on_all_nodes_and_kept_when_the_database_refuses_it() {
    let world = patient_world(2, cluster().redis_url()).await;
    let tenant = limited_tenant(&world, json!({"requests_per_minute": 40})).await;
    let mut superuser = world.superuser().await;
    let lock =
        "alter table usage_hourly add constraint usage_hourly_closed check (false) not valid";
    sqlx::raw_sql(lock).execute(&mut superuser).await.unwrap();
    assert_eq!(accepted(&hammer(&world, &tenant.key, 60).await), 40);
    for node in &world.nodes {
        flush_usage::tick(&node.app).await;
    }
    let open = "alter table usage_hourly drop constraint usage_hourly_closed";
    sqlx::raw_sql(open).execute(&mut superuser).await.unwrap();
    world.clock.advance(MINUTE);
    let mut asked = 0;
    let pause = Duration::from_millis(200);
    retry("all are counted", pause * 35, pause, async || {
        asked += 1;
        let path = "/v1/usage?group_by=source,hour";
        let usage = world.get(&tenant.key, path).await.expect(200);
        let rows = usage.list();
        let sum: i64 = rows.iter().map(|r| r.number("requests")).sum();
        assert!(rows.iter().all(|row| row["source"] == "api"), "{usage}");
        assert!(rows.iter().all(|row| row["user_id"].is_null()), "{usage}");
        // The refused are not counted; those that ask here are, a second later.
        assert!(sum < 40 + asked, "{usage}");
        (sum >= 40).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_ends_writes_what_it_counted_and_leaves_the_list() {
    let mut world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    for node in &world.nodes {
        heartbeat::tick(&node.app).await;
    }
    let nodes = async |world: &World| -> i64 {
        sqlx::query_scalar("select count(*) from nodes")
            .fetch_one(&mut world.superuser().await)
            .await
            .unwrap()
    };
    assert_eq!(nodes(&world).await, 2);
    assert_eq!(accepted(&hammer(&world, &tenant.key, 20).await), 20);
    for node in world.nodes.drain(..).collect::<Vec<_>>() {
        node.stop().await;
    }
    assert_eq!(nodes(&world).await, 0);
    let written: i64 = sqlx::query_scalar("select sum(requests)::bigint from usage_hourly")
        .fetch_one(&mut world.superuser().await)
        .await
        .unwrap();
    assert_eq!(written, 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn usage_is_grouped_filtered_and_paged() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let uuid = tenant.id.parse::<throughline::ids::TenantId>().unwrap();
    sqlx::query(
        "insert into usage_hourly (tenant_id, hour, agent, user_id, model, source, requests, turns,
                                   input_tokens, output_tokens)
         select $1, timestamptz '2026-01-01 00:00Z' + h * interval '1 hour', 'main',
                md5(u::text)::uuid, 'demo', 'turn', 0, 1, 10, 2
           from generate_series(0, 47) h cross join generate_series(1, 3) u",
    )
    .bind(uuid)
    .execute(&mut world.superuser().await)
    .await
    .unwrap();
    let ask = async |query: &str| {
        let path = format!("/v1/usage?{query}");
        world.get(&tenant.key, &path).await
    };
    let days = "from=2026-01-01T00:00:00Z&to=2026-01-03T00:00:00Z";
    let by_agent = ask(&format!("{days}&group_by=agent")).await.expect(200);
    let row = &by_agent["data"][0];
    assert_eq!(by_agent.list().len(), 1);
    assert_eq!(
        (&row["agent"], &row["hour"]),
        (&json!("main"), &json!(null))
    );
    assert_eq!(
        (&row["turns"], &row["input_tokens"]),
        (&json!(144), &json!(1440))
    );
    let one_hour = "from=2026-01-01T05:30:00Z&to=2026-01-01T06:00:00Z";
    let rows = ask(one_hour).await.expect(200);
    assert_eq!(rows.list().len(), 3);
    assert_eq!(rows["data"][0]["hour"], "2026-01-01T05:00:00Z");
    assert!(rows.text("/data/0/user_id").starts_with("usr_"));
    let mut seen = Vec::new();
    let mut cursor = String::new();
    loop {
        let page = ask(&format!("{days}&limit=50{cursor}")).await.expect(200);
        for row in page.list() {
            seen.push(format!("{} {}", row["hour"], row["user_id"]));
        }
        match page["next_cursor"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => break,
        }
    }
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), 144);
    for (wrong, pointer) in [
        ("from=yesterday", "/query/from"),
        (
            "from=2026-01-02T00:00:00Z&to=2026-01-01T00:00:00Z",
            "/query/from",
        ),
        (
            "from=2025-01-01T00:00:00Z&to=2026-01-01T00:00:00Z",
            "/query/from",
        ),
        ("group_by=color", "/query/group_by"),
        ("group_by=", "/query/group_by"),
        ("to=-262143-01-01T00:00:00Z", "/query/to"),
    ] {
        let problem = ask(wrong).await.expect_problem(400, "invalid_request");
        assert_eq!(problem["errors"][0]["pointer"], pointer, "{problem}");
    }
}
