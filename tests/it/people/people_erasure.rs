//! An erased person is gone, at once and from every table; whoever adds a table has to say what becomes of
//! a person's data in it.

use deadpool_redis::redis;
use serde_json::{Value, json};
use throughline::ids::IdentityId;

use crate::support::conversations::{user_message, uuid_of_session};
use crate::support::data::erasure::{PERSON_TABLES, count, erase, first_pass, mentions, settle};
use crate::support::data::whole_user::{
    IRC, PARTED, SECRET, TELEGRAM, WholeUser, make_by_admin, plant_usage, retryable, whole_user,
};
use crate::support::servers::cluster::cluster;
use crate::support::{Fields, Tenant, World};

async fn limits_in_redis(user: &str) -> Vec<String> {
    let client = redis::Client::open(cluster().redis_url()).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    redis::cmd("KEYS")
        .arg(format!("throughline:limits:*{user}*"))
        .query_async(&mut connection)
        .await
        .unwrap()
}

/// Everything that once led to the person is as if it had never been.
async fn expect_gone(world: &World, tenant: &Tenant, whole: &WholeUser) {
    let key = &tenant.key;
    for user in [&whole.ada.user_id].into_iter().chain(&whole.merged) {
        for path in ["", "/identities", "/presence", "/home-channels", "/export"] {
            let reply = world.get(key, &format!("/v1/users/{user}{path}")).await;
            reply.expect_problem(404, "not_found");
        }
        erase(world, key, user)
            .await
            .expect_problem(404, "not_found");
        let narrowed = world
            .get(key, &format!("/v1/sessions?user_id={user}"))
            .await;
        assert_eq!(narrowed.expect(200)["data"], json!([]));
    }
    for identity in &whole.identities {
        let path = format!("/v1/identities/{identity}");
        world
            .delete(key, &path)
            .await
            .expect_problem(404, "not_found");
    }
    for session in whole
        .sessions
        .iter()
        .map(String::as_str)
        .chain(["adas-own"])
    {
        for path in ["", "/messages", "/export", "/tip", "/grants"] {
            let reply = world
                .get(key, &format!("/v1/sessions/{session}{path}"))
                .await;
            reply.expect_problem(404, "session_not_found");
        }
        let reply = world
            .append(key, session, json!([user_message("late")]))
            .await;
        reply.expect_problem(404, "session_not_found");
    }
    for session_key in &whole.session_keys {
        let path = format!("/v1/session-keys?session_key={session_key}");
        let reply = world.get(key, &path).await;
        reply.expect_problem(404, "session_key_not_found");
    }
}

async fn transcript(world: &World, tenant: &Tenant, session: &str) -> Vec<Value> {
    let path = format!("/v1/sessions/{session}/messages?scope=conversation");
    world.walk(&tenant.key, &path).await
}

fn contents(messages: &[Value]) -> Vec<&str> {
    messages
        .iter()
        .map(|message| message.text("content"))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_erased_user_is_in_no_table_any_more() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let whole = whole_user(&world, &tenant).await;
    seed_thread(&world, &tenant, &whole, 1500).await;
    let words = whole.words();
    let before = mentions(&world, &tenant, &words).await;
    for (table, _, _) in PERSON_TABLES {
        let there = before.contains_key(table) || table == "erased_people";
        assert!(there, "{table} has nothing of Ada's: fill it in whole_user");
    }
    let used = "select sum(requests)::bigint from usage_hourly where agent = 'main'";
    let used_before = count(&world, used).await;
    // Its limits expire there within seconds.
    world
        .get(&whole.ada.token, "/v1/users/me")
        .await
        .expect(200);
    assert!(!limits_in_redis(&whole.ada.user_id).await.is_empty());

    let erased = erase(&world, &tenant.key, &whole.merged[0])
        .await
        .expect(202);
    assert_eq!(erased["user_id"], json!(whole.ada.user_id));
    assert_eq!(erased["identities"], 2);
    assert!(limits_in_redis(&whole.ada.user_id).await.is_empty());
    expect_gone(&world, &tenant, &whole).await;
    assert!(
        mentions(&world, &tenant, &words)
            .await
            .contains_key("erased_people")
    );
    first_pass(&world, &whole.identities).await;
    write_late(&world, &tenant, &whole).await;
    settle(&world).await;
    let left = mentions(&world, &tenant, &words).await;
    let tables: Vec<&str> = left.keys().map(String::as_str).collect();
    assert_eq!(tables, ["audit"], "{left:?}");
    assert_eq!(count(&world, used).await, used_before + 3, "sums stay");

    // Others have lost nothing.
    let thread = transcript(&world, &tenant, &whole.thread).await;
    // And the summary that has her words, too.
    let expected = whole.in_thread + 1500 + 1;
    let blank = |message: &&Value| message["content"] == "[erased]";
    let (blanked, answers): (Vec<&Value>, Vec<&Value>) = thread
        .iter()
        .filter(blank)
        .partition(|message| message["role"] == "user");
    assert_eq!(answers.len(), 1, "what the agent said to her is erased too");
    assert_eq!(blanked.len(), expected);
    for message in blanked {
        assert_eq!(
            (&message["identity"], &message["platform"], &message["role"]),
            (&Value::Null, &Value::Null, &json!("user"))
        );
    }
    for kept in ["of Bob", PARTED] {
        assert!(contents(&thread).contains(&kept), "{kept}");
    }
    let tip = format!("/v1/sessions/{}/messages", whole.thread);
    let copies = world.walk(&tenant.key, &tip).await;
    assert!(copies.iter().any(|one| !one["copied_from"].is_null()));
    assert!(!contents(&copies).contains(&SECRET));
    let bobs = transcript(&world, &tenant, &whole.guest_in).await;
    assert_eq!(contents(&bobs), ["come in", "[erased]", "[erased]"]);
    let stayed = world.dm(&whole.bridge, IRC).await;
    assert_eq!(stayed["identity_id"], json!(whole.parted));
    let entries = world.walk(&tenant.key, "/v1/audit").await;
    let erasures: Vec<&Value> = entries
        .iter()
        .filter(|entry| entry["action"] == "user.erase")
        .collect();
    assert_eq!(erasures.len(), 1);
    assert_eq!(erasures[0]["target"], json!(whole.ada.user_id));
    someone_new(&world, &tenant, &whole).await;
}

/// More than a job looks at in one transaction.
async fn seed_thread(world: &World, tenant: &Tenant, whole: &WholeUser, count: i64) {
    sqlx::query(
        "with place as (
           update sessions s
              set next_seq = next_seq + $4, message_count = message_count + $4
             from conversations c
            where c.tenant_id = $1 and c.id = $2 and s.tenant_id = $1 and s.id = c.tip_session_id
        returning s.id, s.next_seq - $4 as first
         )
         insert into messages (tenant_id, session_id, seq, role, kind, content, identity_id, platform,
                               token_count, created_at, extra)
         select $1, id, first + n, 'user', 'normal', to_json($5::text), $3, 'telegram', 1, now(),
                json_build_object('name', $5::text)
           from place, generate_series(0, $4 - 1) n",
    )
    .bind(tenant.uuid())
    .bind(uuid_of_session(&whole.thread))
    .bind(whole.identities[0].parse::<IdentityId>().unwrap())
    .bind(count)
    .bind(SECRET)
    .execute(&mut world.superuser().await)
    .await
    .unwrap();
}

/// What requests could write that were under way when the person was erased.
async fn write_late(world: &World, tenant: &Tenant, whole: &WholeUser) {
    sqlx::query(
        "with place as (
           update sessions set next_seq = next_seq + 1 where tenant_id = $1 and id = $2 returning next_seq - 1 as seq
         )
         insert into messages (tenant_id, session_id, seq, role, kind, content, identity_id, platform,
                               token_count, created_at)
         select $1, $2, seq, 'user', 'normal', to_json($4::text), $3, 'web', 1, now()
           from place",
    )
    .bind(tenant.uuid())
    .bind(uuid_of_session(&whole.guest_in))
    .bind(whole.identities[0].parse::<IdentityId>().unwrap())
    .bind(SECRET)
    .execute(&mut world.superuser().await)
    .await
    .unwrap();
    plant_usage(world, tenant, &whole.ada.user_id).await;
    for principal in [
        format!("key_x/{TELEGRAM}"),
        format!("key_x/{}", whole.merged[0]),
        format!("{}/web:ada-to-erase", whole.identities[0]),
    ] {
        sqlx::query(
            "insert into idempotency (tenant_id, principal, route, key, request_hash, created_at, caller, acted_for)
             values ($1, $2, 'r', 'k', decode(repeat('00', 32), 'hex'), now(), split_part($2, '/', 1),
                     split_part($2, '/', 2))",
        )
        .bind(tenant.uuid())
        .bind(principal)
        .execute(&mut world.superuser().await)
        .await
        .unwrap();
    }
}

/// The accounts speak again: for the first time.
async fn someone_new(world: &World, tenant: &Tenant, whole: &WholeUser) {
    let old = &whole.ada.user_id;
    let token = &crate::support::people::sign_in(world, tenant, "ada-to-erase")
        .await
        .token;
    let me = world.get(token, "/v1/users/me").await.expect(200);
    assert_ne!(me["id"], json!(old));
    assert_eq!(me["display_name"], Value::Null);
    assert_eq!(world.walk(token, "/v1/sessions").await, Vec::<Value>::new());
    world
        .get(token, "/v1/session-keys/adas-key")
        .await
        .expect_problem(404, "session_key_not_found");
    let dm = json!({ "identity": TELEGRAM });
    let fresh = retryable(world, (&whole.bridge, None), "/v1/resolve", "r2", dm).await;
    assert!(fresh.headers.get("idempotency-replayed").is_none());
    let fresh = fresh.expect(200);
    assert_eq!(fresh["created"], true);
    assert!(fresh["user_id"] != json!(old) && fresh["user_id"] != me["id"]);
    let made = make_by_admin(world, tenant).await;
    assert!(made.headers.get("idempotency-replayed").is_none());
    assert!(!whole.merged.contains(&made.expect(201).id()));
}
