//! `/v1/resolve`: who speaks, and where what they say belongs.

use std::collections::HashSet;
use std::time::Duration;

use futures_util::future::join_all;
use reqwest::Method;
use serde_json::{Value, json};
use sqlx::types::Uuid;
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use throughline::domain::bridge::chat::Chat;
use throughline::domain::conversation::session_key::{possible_keys, user_key_prefix};
use throughline::domain::people::identity::IdentityName;
use throughline::store::people::resolve::RESOLVE;

use crate::support::people::{as_bridge, sign_in};
use crate::support::servers::cluster::cluster;
use crate::support::{Fields, Tenant, World, retry};

async fn agent(world: &World, tenant: &Tenant, changes: Value) {
    let mut spec = json!({"upstream": {"kind": "demo"}});
    for (member, value) in changes.as_object().unwrap() {
        spec[member] = value.clone();
    }
    world
        .put(&tenant.key, "/v1/agents/main", spec)
        .await
        .expect_success();
}

#[tokio::test(flavor = "multi_thread")]
async fn first_contact_makes_a_user_a_key_and_a_session_and_the_next_finds_them() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    let key = world.bridge_key(&tenant, &["telegram"]).await;
    let first = world.dm(&key, "telegram:5").await;
    let expected = json!({
        "user_id": first["user_id"], "identity_id": first["identity_id"], "linked": false,
        "session_key": "agent:main:telegram:dm:5", "session_id": first["session_id"],
        "conversation_id": first["session_id"], "created": true, "reset": null, "offer": null,
    });
    assert_eq!(first, expected);
    let mut again = world.dm(&key, "telegram:5").await;
    assert_eq!(again["created"], false);
    again["created"] = json!(true);
    assert_eq!(again, first);
    // By the header, and by an admin.
    let by_header = as_bridge(
        &world,
        &key,
        "telegram:5",
        (Method::POST, "/v1/resolve"),
        Some(json!({})),
    )
    .await;
    assert_eq!(by_header.expect(200)["session_id"], first["session_id"]);
    assert_eq!(
        world.dm(&tenant.key, "telegram:5").await["user_id"],
        first["user_id"]
    );
    // The current session follows a compression and a reset.
    let id = first.text("session_id");
    world
        .write_in(&key, "telegram:5", &first["session_id"], "hello")
        .await;
    let compressed = world
        .compress(&tenant.key, id, json!({"summary": "s"}))
        .await
        .expect(201);
    let now = world.dm(&key, "telegram:5").await;
    assert_eq!(now["session_id"], compressed["session_id"]);
    assert_eq!(now["conversation_id"], first["conversation_id"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_first_contacts_at_once_are_one_user_with_one_session() {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    let key = world.bridge_key(&tenant, &["telegram"]).await;
    let asks = (0..1000).map(|n| {
        let client = &world.client;
        let url = world.url_on(n % 2, "/v1/resolve");
        let request = client
            .post(url)
            .bearer_auth(&key)
            .json(&json!({"identity": "telegram:5"}));
        async move {
            // A small pool under a crowd may answer 429 or 503: whoever is refused asks again.
            let pause = Duration::from_millis(50);
            retry("an answer", Duration::from_secs(60), pause, async || {
                let reply = crate::support::Reply::of(request.try_clone().unwrap()).await;
                (![429, 503].contains(&reply.status)).then(|| reply.expect(200))
            })
            .await
        }
    });
    let answers = join_all(asks).await;
    for member in ["user_id", "identity_id", "session_id"] {
        let distinct: HashSet<String> = answers.iter().map(|one| one[member].to_string()).collect();
        assert_eq!(distinct.len(), 1, "{member}");
    }
    let created = answers.iter().filter(|one| one["created"] == true).count();
    assert_eq!(created, 1);
    let users = world.walk(&tenant.key, "/v1/users").await;
    assert_eq!(users.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn different_users_have_different_slots_under_every_scope() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    for (scope, expected) in [
        (
            "per-channel-peer",
            [
                "agent:main:irc@a:dm:bob",
                "agent:main:irc@b:dm:bob",
                "agent:main:telegram:dm:5",
                "agent:main:discord:dm:5",
            ],
        ),
        (
            "per-peer",
            [
                "agent:main:dm:bob",
                "agent:main:irc@b:dm:bob",
                "agent:main:dm:5",
                "agent:main:discord:dm:5",
            ],
        ),
        (
            "main",
            [
                "agent:main:main",
                "agent:main:irc@b:dm:bob",
                "agent:main:telegram:dm:5",
                "agent:main:discord:dm:5",
            ],
        ),
        (
            "per-account-channel-peer",
            [
                "agent:main:irc@a:dm:bob",
                "agent:main:irc@b:dm:bob",
                "agent:main:telegram:dm:5",
                "agent:main:discord:dm:5",
            ],
        ),
    ] {
        world
            .patch(&tenant.key, "/v1/tenant", json!({ "dm_scope": scope }))
            .await
            .expect(200);
        let mut sessions = HashSet::new();
        for (identity, key) in ["irc@a:bob", "irc@b:Bob", "telegram:5", "discord:5"]
            .iter()
            .zip(expected)
        {
            let resolved = world.dm(&tenant.key, identity).await;
            assert_eq!(resolved["session_key"], key, "{scope} {identity}");
            sessions.insert(resolved["session_id"].to_string());
            let again = world.dm(&tenant.key, identity).await;
            assert_eq!(again["session_id"], resolved["session_id"]);
        }
        assert_eq!(sessions.len(), 4, "{scope}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn groups_and_threads_belong_to_their_chat() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let resolve = async |identity: &str, chat: Value| {
        let body = json!({"identity": identity, "chat": chat});
        world.resolve(&tenant.key, body).await.expect(200)
    };
    let group = json!({"type": "group", "id": "G:1"});
    let thread = json!({"type": "thread", "id": "C1", "thread_id": "9"});
    let ann = resolve("slack@T1:U1", group.clone()).await;
    let bob = resolve("slack@T1:U2", group.clone()).await;
    assert_eq!(ann["session_key"], "agent:main:slack@T1:group:G%3A1:U1");
    assert_eq!(bob["session_key"], "agent:main:slack@T1:group:G%3A1:U2");
    assert_ne!(ann["session_id"], bob["session_id"]);
    // The key is found as it is shown.
    let slot = world.slot(&tenant.key, &ann["session_key"]).await;
    assert_eq!(
        (&slot["session_id"], &slot["user_id"]),
        (&ann["session_id"], &ann["user_id"])
    );
    let one = resolve("slack@T1:U1", thread.clone()).await;
    let two = resolve("slack@T1:U2", thread).await;
    assert_eq!(one["session_key"], "agent:main:slack@T1:thread:C1:9");
    assert_eq!(one["session_id"], two["session_id"]);
    let slot = world.slot(&tenant.key, &one["session_key"]).await;
    assert_eq!(slot["user_id"], Value::Null);
    agent(&world, &tenant, json!({"group_scope": "shared"})).await;
    let ann = resolve("slack@T1:U1", group.clone()).await;
    let bob = resolve("slack@T1:U2", group.clone()).await;
    assert_eq!(ann["session_key"], "agent:main:slack@T1:group:G%3A1");
    assert_eq!(ann["session_id"], bob["session_id"]);
    let elsewhere = resolve("slack@T2:U2", group).await;
    assert_ne!(elsewhere["session_id"], bob["session_id"]);
    let wrong = json!({"identity": "slack@T1:U1", "chat": {"type": "thread", "id": "C1"}});
    let problem = world
        .resolve(&tenant.key, wrong)
        .await
        .expect_problem(422, "invalid_value");
    assert_eq!(problem["errors"][0]["pointer"], "/chat/thread_id");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_reset_policy_is_applied_as_for_a_message() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let idle = json!({"mode": "idle", "idle_minutes": 10});
    agent(
        &world,
        &tenant,
        json!({"reset": {"mode": "none", "by_chat_type": {"dm": idle}}}),
    )
    .await;
    let key = world.bridge_key(&tenant, &["telegram"]).await;
    let first = world.write_dm(&key, "telegram:5", "hello").await;
    world.clock.advance(Duration::from_secs(9 * 60));
    // Asking is no message: it does not move the clock.
    assert_eq!(
        world.dm(&key, "telegram:5").await["session_id"],
        first["session_id"]
    );
    world.clock.advance(Duration::from_secs(2 * 60));
    let reset = world.dm(&key, "telegram:5").await;
    assert_ne!(reset["session_id"], first["session_id"]);
    let expected = json!({"reason": "idle", "previous_session_id": first["session_id"]});
    assert_eq!(
        (&reset["reset"], &reset["created"]),
        (&expected, &json!(true))
    );
    let again = world.dm(&key, "telegram:5").await;
    assert_eq!(
        (&again["session_id"], &again["reset"]),
        (&reset["session_id"], &Value::Null)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bridge_vouches_for_its_platforms_alone() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let slack = world.bridge_key(&tenant, &["slack@T1"]).await;
    let telegram = world.bridge_key(&tenant, &["telegram"]).await;
    let ann = world.write_dm(&slack, "slack@T1:U1", "private").await;
    let user = ann.text("user_id");
    for identity in ["slack@T1:U1", "slack@T2:U1", "slack:U1", "discord:1"] {
        let named = json!({ "identity": identity });
        for path in ["/v1/resolve", "/v1/link-codes"] {
            world
                .post(&telegram, path, named.clone())
                .await
                .expect_problem(403, "platform_not_allowed");
        }
        world
            .redeem(&telegram, "ABCD2345", identity)
            .await
            .expect_problem(403, "platform_not_allowed");
        let read = as_bridge(
            &world,
            &telegram,
            identity,
            (Method::GET, &format!("/v1/users/{user}")),
            None,
        )
        .await;
        read.expect_problem(403, "platform_not_allowed");
    }
    let elsewhere =
        json!({"identity": "slack@T1:U1", "chat": {"type": "group", "id": "1", "scope": "T2"}});
    world
        .resolve(&slack, elsewhere)
        .await
        .expect_problem(403, "platform_not_allowed");
    for path in ["/v1/resolve", "/v1/link-codes"] {
        world
            .post(&telegram, path, json!({}))
            .await
            .expect_problem(403, "identity_required");
    }
    let session = ann.text("session_id");
    for path in [
        format!("/v1/users/{user}"),
        format!("/v1/users/{user}/identities"),
        format!("/v1/users/{user}/presence"),
        format!("/v1/sessions/{session}"),
        "/v1/session-keys/agent:main:slack@T1:dm:U1".to_owned(),
    ] {
        world
            .get(&telegram, &path)
            .await
            .expect_problem(403, "identity_required");
        let foreign = as_bridge(&world, &telegram, "telegram:5", (Method::GET, &path), None).await;
        assert_eq!(foreign.status, 404, "{path}");
        as_bridge(&world, &slack, "slack@T1:U1", (Method::GET, &path), None)
            .await
            .expect(200);
    }
    let body = json!({"identity": "telegram:5", "chat": {"type": "dm"}, "agent": "nobody"});
    world
        .resolve(&telegram, body)
        .await
        .expect_problem(422, "invalid_value");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_resolves_no_other() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let ada = sign_in(&world, &tenant, "ada").await;
    let bob = sign_in(&world, &tenant, "bob").await;
    let own = world.resolve(&ada.token, json!({})).await.expect(200);
    assert_eq!(own["user_id"], json!(ada.user_id));
    assert_eq!(own["session_key"], "agent:main:web:dm:ada");
    assert_eq!(
        world.dm(&ada.token, "web:ada").await["session_id"],
        own["session_id"]
    );
    world.resolve(&bob.token, json!({})).await.expect(200);
    for foreign in ["web:bob", "web:nobody", "telegram:5"] {
        let asked = world
            .resolve(&ada.token, json!({ "identity": foreign }))
            .await;
        asked.expect_problem(404, "not_found");
        assert_eq!(
            world
                .post(&ada.token, "/v1/link-codes", json!({ "identity": foreign }))
                .await
                .status,
            404
        );
    }
    let users = world.walk(&tenant.key, "/v1/users").await;
    assert_eq!(users.len(), 2, "asking for someone made nobody");
}

#[tokio::test(flavor = "multi_thread")]
async fn presence_shows_when_and_where_each_identity_was_active() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let key = world.bridge_key(&tenant, &["telegram", "slack"]).await;
    let heard = world.dm(&key, "telegram:5").await;
    let path = format!("/v1/users/{}/presence", heard.text("user_id"));
    let presence = async || world.get(&tenant.key, &path).await.expect(200)["data"].clone();
    let first = presence().await;
    assert_eq!(first[0]["identity"], "telegram:5");
    assert_eq!(first[0]["session_key"], heard["session_key"]);
    assert_eq!(first[0]["session_id"], heard["session_id"]);
    assert_eq!(first[0]["home_channel"], Value::Null);
    world.clock.advance(Duration::from_secs(30));
    world.dm(&key, "telegram:5").await;
    assert_eq!(
        presence().await,
        first,
        "within the minute nothing is written"
    );
    world.clock.advance(Duration::from_secs(31));
    world.dm(&key, "telegram:5").await;
    assert_ne!(
        presence().await[0]["last_seen_at"],
        first[0]["last_seen_at"]
    );
    let home = json!({"chat": {"type": "dm", "id": "77"}});
    let user = heard.text("user_id");
    let put = |path: String, body: Value| {
        let world = &world;
        let key = &key;
        async move { as_bridge(world, key, "telegram:5", (Method::PUT, &path), Some(body)).await }
    };
    let made = put(
        format!("/v1/users/{user}/home-channels/telegram"),
        home.clone(),
    )
    .await
    .expect(200);
    assert_eq!(made["identity"], "telegram:5");
    assert_eq!(presence().await[0]["home_channel"], home["chat"]);
    let group = json!({"chat": {"type": "group", "id": "77"}});
    put(
        format!("/v1/users/{user}/home-channels/telegram"),
        group.clone(),
    )
    .await
    .expect_problem(403, "private_chat_required");
    put(format!("/v1/users/{user}/home-channels/slack"), home)
        .await
        .expect_problem(422, "invalid_value");
    let by_admin = world
        .put(
            &tenant.key,
            &format!("/v1/users/{user}/home-channels/telegram"),
            group,
        )
        .await;
    by_admin.expect(200);
    world
        .delete(
            &tenant.key,
            &format!("/v1/users/{user}/home-channels/telegram"),
        )
        .await
        .expect(204);
    assert_eq!(presence().await[0]["home_channel"], Value::Null);
}

/// Buffers that the one statement touches while it runs, as the service's own role.
async fn buffers(world: &World, tenant: &Tenant, identity: &str) -> i64 {
    let url = cluster().service_url(&world.database);
    let mut service = PgConnection::connect(&url).await.unwrap();
    let mut tx = service.begin().await.unwrap();
    let enter = format!("set local app.tenant_id = '{}'", tenant.uuid());
    sqlx::raw_sql(AssertSqlSafe(enter))
        .execute(&mut *tx)
        .await
        .unwrap();
    let name: IdentityName = identity.parse().unwrap();
    let sql = format!("explain (analyze, buffers, format json) {RESOLVE}");
    let mut touched = 0;
    // The first look also fills caches.
    for _ in 0..2 {
        let plan: Value = sqlx::query_scalar(AssertSqlSafe(sql.clone()))
            .bind(tenant.uuid())
            .bind(name.platform().platform())
            .bind(name.platform().scope().unwrap_or_default())
            .bind(name.external_id())
            .bind("main")
            .bind(possible_keys("main", &name, &Chat::DM))
            .bind(user_key_prefix("main"))
            .bind(Uuid::nil())
            .fetch_one(&mut *tx)
            .await
            .unwrap();
        let top = &plan[0]["Plan"];
        touched = top.number("Shared Hit Blocks") + top.number("Shared Read Blocks");
    }
    touched
}

#[tokio::test(flavor = "multi_thread")]
async fn a_known_identity_costs_the_same_among_many() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let others = |count: usize, from: usize| {
        format!(
            "insert into users (tenant_id, id, created_at)
             select '{tenant}', md5('u' || n)::uuid, now() from generate_series({from}, {count}) n;
             insert into identities (tenant_id, id, user_id, platform, external_id, raw, linked_at, created_at)
             select '{tenant}', md5('i' || n)::uuid, md5('u' || n)::uuid, 'telegram', n::text, n::text, now(), now()
               from generate_series({from}, {count}) n;
             insert into slots (tenant_id, id, kind, key, user_id, agent, last_user_at, created_at)
             select '{tenant}', md5('s' || n)::uuid, 'dm', 'agent:main:telegram:dm:' || n, md5('u' || n)::uuid, 'main',
                    now(), now()
               from generate_series({from}, {count}) n;
             insert into slot_names (tenant_id, namespace, key, slot_id, home_slot_id)
             select '{tenant}', '{nil}', 'agent:main:telegram:dm:' || n, md5('s' || n)::uuid, md5('s' || n)::uuid
               from generate_series({from}, {count}) n",
            tenant = tenant.uuid(),
            nil = Uuid::nil(),
        )
    };
    let mut superuser = world.superuser().await;
    let mut touched = Vec::new();
    for (from, count) in [(1, 2_000), (2_001, 20_000)] {
        sqlx::raw_sql(AssertSqlSafe(others(count, from)))
            .execute(&mut superuser)
            .await
            .unwrap();
        // Someone of the many, with a session.
        world.dm(&tenant.key, "telegram:77").await;
        sqlx::raw_sql("vacuum analyze")
            .execute(&mut superuser)
            .await
            .unwrap();
        touched.push(buffers(&world, &tenant, "telegram:77").await);
    }
    // An index may be a level deeper by then: some pages for each of its few look-ups.
    assert!(touched[0] < 100 && touched[1] < 100, "{touched:?}");
}
