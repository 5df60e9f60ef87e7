//! The outbox as a bridge sees it: in order per chat, one in flight, leased, acknowledged, given back, dead
//! and replayed; and only to whoever serves the platform.

use std::time::Duration;

use futures_util::future::join_all;
use reqwest::Method;
use serde_json::{Value, json};
use throughline::auth::ServiceCaller;
use throughline::store::bridge::deliveries::Covered;
use throughline::store::bridge::delivery_leases::lease;

use crate::support::linking::bridge;
use crate::support::{Reply, Tenant, World};

pub async fn fetch(world: &World, node: usize, key: &str, query: &str) -> Vec<Value> {
    let reply = world
        .get_on(node, key, &format!("/v1/deliveries?{query}"))
        .await;
    reply.expect(200)["data"].as_array().unwrap().clone()
}

pub async fn ack(world: &World, key: &str, delivery: &Value) -> Reply {
    let path = format!("/v1/deliveries/{}/ack", delivery["id"].as_str().unwrap());
    world
        .post(key, &path, json!({"lease": delivery["lease"]}))
        .await
}

pub async fn nack(world: &World, key: &str, delivery: &Value, retry: bool) -> Reply {
    let path = format!("/v1/deliveries/{}/nack", delivery["id"].as_str().unwrap());
    let body = json!({"lease": delivery["lease"], "error": "the platform said no", "retry": retry});
    world.post(key, &path, body).await
}

/// Lets time pass for what waits to be delivered: its leases are by the clock of the database.
pub async fn pass(world: &World, time: Duration) {
    let seconds = time.as_secs();
    let sql = format!(
        "update chats set due_at = due_at - interval '{seconds} s';
         update deliveries set visible_at = visible_at - interval '{seconds} s' where state in ('pending', 'leased')"
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(sql))
        .execute(&mut world.superuser().await)
        .await
        .unwrap();
}

/// Lets somebody say something whose answer becomes a delivery.
pub async fn say(world: &World, key: &str, identity: &str, text: &str) -> Value {
    let body = json!({"identity": identity, "text": text, "wait": false});
    world.post(key, "/v1/inbound", body).await.expect(202)
}

async fn world_with_bridge(platforms: &[&str]) -> (World, Tenant, String) {
    let world = World::with_nodes(2).await;
    let tenant = world.tenant("Acme").await;
    let key = bridge(&world, &tenant, platforms).await;
    (world, tenant, key)
}

fn texts(deliveries: &[Value]) -> Vec<String> {
    let text = |one: &Value| one["text"].as_str().unwrap().to_owned();
    deliveries.iter().map(text).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chat_has_one_in_flight_and_keeps_its_order() {
    let (world, _, key) = world_with_bridge(&["telegram"]).await;
    for text in ["one", "two"] {
        say(&world, &key, "telegram:5", text).await;
    }
    let first = fetch(&world, 0, &key, "platform=telegram&wait=20").await;
    assert_eq!(first.len(), 1);
    let one = &first[0];
    assert!(texts(&first)[0].contains("You said: one"), "{one}");
    assert_eq!(
        (&one["kind"], &one["seq"], &one["attempt"]),
        (&json!("reply"), &json!(1), &json!(1))
    );
    assert_eq!(one["chat"], json!({"type": "dm"}));
    assert_eq!(one["identity"], "telegram:5");
    assert_eq!(fetch(&world, 1, &key, "wait=1").await, Vec::<Value>::new());
    ack(&world, &key, one).await.expect(204);
    ack(&world, &key, one)
        .await
        .expect_problem(409, "stale_lease");
    let second = fetch(&world, 1, &key, "wait=20").await;
    assert!(texts(&second)[0].contains("You said: two"), "{second:?}");
    ack(&world, &key, &second[0]).await.expect(204);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_acknowledged_comes_again_and_is_dead_after_ten_times() {
    let (world, tenant, key) = world_with_bridge(&["telegram"]).await;
    say(&world, &key, "telegram:5", "hi").await;
    let mut last = Value::Null;
    for attempt in 1..=10 {
        let given = fetch(&world, 0, &key, "wait=20").await;
        assert_eq!(given[0]["attempt"], attempt);
        if !last.is_null() {
            ack(&world, &key, &last)
                .await
                .expect_problem(409, "stale_lease");
        }
        last = given[0].clone();
        pass(&world, Duration::from_secs(61)).await;
    }
    assert_eq!(fetch(&world, 0, &key, "wait=0").await, Vec::<Value>::new());
    let dead = world.get(&key, "/v1/deliveries/dead").await.expect(200);
    assert_eq!(dead["data"][0]["id"], last["id"]);
    let (_, reader) = world.api_key(&tenant, "read").await;
    let unread = world.get(&reader, "/v1/deliveries/dead").await.expect(200);
    assert_eq!(unread["data"][0]["text"], Value::Null);
    let path = format!("/v1/deliveries/{}/replay", last["id"].as_str().unwrap());
    world.post(&key, &path, json!({})).await.expect(200);
    world
        .post(&key, &path, json!({}))
        .await
        .expect_problem(404, "not_found");
    let again = fetch(&world, 0, &key, "wait=20").await;
    assert_eq!(
        (&again[0]["id"], &again[0]["attempt"]),
        (&last["id"], &json!(1))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_given_back_waits_and_holds_its_chat_back_but_no_other() {
    let (world, _, key) = world_with_bridge(&["telegram"]).await;
    say(&world, &key, "telegram:5", "one").await;
    let first = fetch(&world, 0, &key, "wait=20").await.remove(0);
    say(&world, &key, "telegram:5", "two").await;
    nack(&world, &key, &first, true).await.expect(204);
    say(&world, &key, "telegram:6", "other").await;
    let other = fetch(&world, 0, &key, "wait=20").await;
    assert_eq!(other.len(), 1);
    assert_eq!(other[0]["identity"], "telegram:6");
    pass(&world, Duration::from_secs(3)).await;
    let again = fetch(&world, 0, &key, "wait=20").await.remove(0);
    assert_eq!((&again["id"], &again["attempt"]), (&first["id"], &json!(2)));
    assert_eq!(again["error"], "the platform said no");
    nack(&world, &key, &again, false).await.expect(204);
    let next = fetch(&world, 0, &key, "wait=20").await.remove(0);
    assert!(next["text"].as_str().unwrap().contains("You said: two"));
}

#[tokio::test(flavor = "multi_thread")]
async fn several_consumers_on_two_nodes_share_without_doubling() {
    let (world, _, key) = world_with_bridge(&["telegram"]).await;
    let people: Vec<String> = (0..12).map(|n| format!("telegram:{n}")).collect();
    join_all(people.iter().map(|who| say(&world, &key, who, "hi"))).await;
    let taking = (0..6).map(|consumer| {
        let world = &world;
        let key = &key;
        async move {
            let mut taken = Vec::new();
            for _ in 0..20 {
                let given = fetch(world, consumer % 2, key, "wait=1&limit=2").await;
                for one in given {
                    ack(world, key, &one).await.expect(204);
                    taken.push(one["identity"].as_str().unwrap().to_owned());
                }
            }
            taken
        }
    });
    let mut taken: Vec<String> = join_all(taking).await.concat();
    taken.sort_unstable();
    let mut expected = people.clone();
    expected.sort_unstable();
    assert_eq!(taken, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_hangs_up_while_they_wait_takes_nothing_along() {
    let (world, _, key) = world_with_bridge(&["telegram"]).await;
    for _ in 0..3 {
        let waiting = world.request(Method::GET, "/v1/deliveries?wait=50", &key);
        let waiting = waiting.timeout(Duration::from_millis(300));
        assert!(waiting.send().await.is_err());
    }
    say(&world, &key, "telegram:5", "hi").await;
    let given = fetch(&world, 0, &key, "wait=20").await;
    assert_eq!(given[0]["attempt"], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_sees_and_ends_only_what_its_platforms_cover() {
    let (world, tenant, telegram) = world_with_bridge(&["telegram"]).await;
    let slack = bridge(&world, &tenant, &["slack@T1"]).await;
    let admin = &tenant.key;
    for who in ["telegram:5", "slack@T1:5", "slack@T2:5"] {
        say(&world, admin, who, "hi").await;
    }
    let of_telegram = fetch(&world, 0, &telegram, "wait=20").await;
    assert_eq!(of_telegram.len(), 1);
    assert_eq!(of_telegram[0]["platform"], "telegram");
    let mut of_slack = fetch(&world, 0, &slack, "platform=slack&wait=20").await;
    of_slack.extend(fetch(&world, 0, &slack, "wait=1").await);
    assert_eq!(of_slack.len(), 1);
    assert_eq!(of_slack[0]["scope"], "T1");
    for refused in ["platform=telegram", "platform=slack@T2"] {
        let reply = world
            .get(&slack, &format!("/v1/deliveries?{refused}"))
            .await;
        reply.expect_problem(403, "platform_not_allowed");
    }
    for (key, foreign) in [(&telegram, &of_slack[0]), (&slack, &of_telegram[0])] {
        ack(&world, key, foreign)
            .await
            .expect_problem(404, "not_found");
        nack(&world, key, foreign, false)
            .await
            .expect_problem(404, "not_found");
    }
    ack(&world, &telegram, &of_telegram[0]).await.expect(204);
    ack(&world, &slack, &of_slack[0]).await.expect(204);
    let rest = fetch(&world, 0, admin, "wait=20").await;
    assert_eq!(rest[0]["scope"], "T2");
    let (_, chat) = world.api_key(&tenant, "chat").await;
    world
        .get(&chat, "/v1/deliveries")
        .await
        .expect_problem(403, "missing_scope");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_gives_deliveries_as_they_come() {
    let (world, _, key) = world_with_bridge(&["telegram"]).await;
    let mut stream = world
        .request(Method::GET, "/v1/deliveries/stream?platform=telegram", &key)
        .send()
        .await
        .unwrap();
    assert_eq!(stream.status(), 200);
    say(&world, &key, "telegram:5", "hi").await;
    let mut text = String::new();
    while !text.contains("\n\n") || !text.contains("event: delivery") {
        let piece = tokio::time::timeout(Duration::from_secs(20), stream.chunk()).await;
        text += std::str::from_utf8(&piece.unwrap().unwrap().unwrap()).unwrap();
    }
    let data = text
        .lines()
        .find_map(|line| line.strip_prefix("data: "))
        .unwrap();
    let delivery: Value = serde_json::from_str(data).unwrap();
    assert!(delivery["text"].as_str().unwrap().contains("You said: hi"));
    ack(&world, &key, &delivery).await.expect(204);
}

#[tokio::test(flavor = "multi_thread")]
async fn security_notices_come_the_same_way() {
    let (world, tenant, key) = world_with_bridge(&["telegram", "discord"]).await;
    world.link(&key, "telegram:1", "discord:1").await;
    world.link(&tenant.key, "telegram:1", "discord:2").await;
    let given = fetch(&world, 0, &key, "wait=20").await;
    assert!(!given.is_empty());
    assert!(
        given.iter().all(|one| one["kind"] == "security"),
        "{given:?}"
    );
}

/// A node whose clock is wrong leases nothing that is in flight, and loses nothing.
#[tokio::test(flavor = "multi_thread")]
async fn leases_do_not_depend_on_the_clock_of_a_node() {
    let (world, _, key) = world_with_bridge(&["telegram"]).await;
    say(&world, &key, "telegram:5", "hi").await;
    let first = fetch(&world, 0, &key, "wait=20").await.remove(0);
    world.clock.advance(Duration::from_secs(3600));
    assert_eq!(fetch(&world, 1, &key, "wait=0").await, Vec::<Value>::new());
    ack(&world, &key, &first).await.expect(204);
    say(&world, &key, "telegram:5", "again").await;
    assert_eq!(fetch(&world, 1, &key, "wait=20").await.len(), 1);
}

/// Two of one chat must never be in flight, whoever comes in between: that was a unique violation, and 500.
#[tokio::test(flavor = "multi_thread")]
async fn a_dead_delivery_can_be_replayed_while_its_chat_is_leased() {
    let (world, _, key) = world_with_bridge(&["telegram"]).await;
    say(&world, &key, "telegram:5", "one").await;
    let dead = fetch(&world, 0, &key, "wait=20").await.remove(0);
    nack(&world, &key, &dead, false).await.expect(204);
    say(&world, &key, "telegram:5", "two").await;
    let pending = async || {
        let count: i64 =
            sqlx::query_scalar("select count(*) from deliveries where state = 'pending'")
                .fetch_one(&mut world.superuser().await)
                .await
                .unwrap();
        count == 1
    };
    crate::support::eventually("two waits", Duration::from_secs(20), pending).await;
    // Both reach the row of the second, and both wait for it.
    let mut superuser = world.superuser().await;
    let mut held = sqlx::Connection::begin(&mut superuser).await.unwrap();
    sqlx::query("select 1 from chats for update")
        .execute(&mut *held)
        .await
        .unwrap();
    let path = format!("/v1/deliveries/{}/replay", dead["id"].as_str().unwrap());
    let replay = world.post(&key, &path, json!({}));
    let lease = fetch(&world, 1, &key, "wait=5");
    let release = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        held.commit().await.unwrap();
    };
    let (replayed, leased, ()) = tokio::join!(replay, lease, release);
    replayed.expect(200);
    assert_eq!(leased.len(), 1);
    assert_eq!(fetch(&world, 0, &key, "wait=0").await, Vec::<Value>::new());
    ack(&world, &key, &leased[0]).await.expect(204);
    assert_eq!(fetch(&world, 0, &key, "wait=20").await.len(), 1);
}

/// Something is written into a chat while its only delivery is acknowledged, by who has the chat first.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_written_during_an_acknowledgement_is_given_out() {
    let (world, _, key) = world_with_bridge(&["telegram"]).await;
    say(&world, &key, "telegram:5", "one").await;
    let first = fetch(&world, 0, &key, "wait=20").await.remove(0);
    let mut superuser = world.superuser().await;
    let mut writer = sqlx::Connection::begin(&mut superuser).await.unwrap();
    sqlx::raw_sql(
        "with place as (
           update chats set next_seq = next_seq + 1, due_at = least(due_at, now()) returning *
         )
         insert into deliveries (tenant_id, id, platform, scope, chat_ref, seq, kind, payload, visible_at, created_at)
         select tenant_id, gen_random_uuid(), platform, scope, chat_ref, next_seq - 1, 'notice', '{}', now(), now()
           from place",
    )
    .execute(&mut *writer)
    .await
    .unwrap();
    let commit = async {
        world.waiting(1).await;
        writer.commit().await.unwrap();
    };
    let (acknowledged, ()) = tokio::join!(ack(&world, &key, &first), commit);
    acknowledged.expect(204);
    let second = fetch(&world, 1, &key, "wait=20").await.remove(0);
    assert_eq!(second["kind"], "notice");
}

/// What has ended in a chat is not read again, and what is replayed, also by a node of the version before, is not
/// taken for it.
#[tokio::test(flavor = "multi_thread")]
async fn a_replayed_delivery_is_found_behind_what_has_ended() {
    let (world, _, key) = world_with_bridge(&["telegram"]).await;
    say(&world, &key, "telegram:5", "one").await;
    let dead = fetch(&world, 0, &key, "wait=20").await.remove(0);
    nack(&world, &key, &dead, false).await.expect(204);
    say(&world, &key, "telegram:5", "two").await;
    let second = fetch(&world, 0, &key, "wait=20").await.remove(0);
    ack(&world, &key, &second).await.expect(204);
    let ended = async || -> i64 {
        sqlx::query_scalar("select ended_seq from chats")
            .fetch_one(&mut world.superuser().await)
            .await
            .unwrap()
    };
    assert_eq!(ended().await, 1);
    let path = format!("/v1/deliveries/{}/replay", dead["id"].as_str().unwrap());
    world.post(&key, &path, json!({})).await.expect(200);
    let again = fetch(&world, 1, &key, "wait=20").await.remove(0);
    assert_eq!(again["id"], dead["id"]);
    nack(&world, &key, &again, false).await.expect(204);
    say(&world, &key, "telegram:5", "three").await;
    let third = fetch(&world, 0, &key, "wait=20").await.remove(0);
    ack(&world, &key, &third).await.expect(204);
    assert_eq!(ended().await, 2);
    let replayed = sqlx::query(
        "update deliveries set state = 'pending', visible_at = now(), ended_at = null where state = 'dead'",
    )
    .execute(&mut world.superuser().await)
    .await
    .unwrap();
    assert_eq!(replayed.rows_affected(), 1);
    let again = fetch(&world, 1, &key, "wait=20").await.remove(0);
    assert_eq!(again["id"], dead["id"]);
    ack(&world, &key, &again).await.expect(204);
    sqlx::raw_sql(
        "with place as (
           update chats set next_seq = next_seq + 1 returning *
         )
         insert into deliveries (tenant_id, id, platform, scope, chat_ref, seq, kind, payload, visible_at, created_at)
         select tenant_id, gen_random_uuid(), platform, scope, chat_ref, next_seq - 1, 'notice', '{}', now(), now()
           from place",
    )
    .execute(&mut world.superuser().await)
    .await
    .unwrap();
    let new = fetch(&world, 1, &key, "wait=20").await.remove(0);
    assert_eq!(new["kind"], "notice");
}

/// What an unlink cancels is not given out, and an unlink never meets a lease in a circle.
#[tokio::test(flavor = "multi_thread")]
async fn a_held_delivery_is_left_alone_and_holds_up_no_other_chat() {
    let (world, _, key) = world_with_bridge(&["telegram"]).await;
    for who in ["telegram:5", "telegram:6"] {
        say(&world, &key, who, "hi").await;
    }
    let pending = async || {
        let count: i64 =
            sqlx::query_scalar("select count(*) from deliveries where state = 'pending'")
                .fetch_one(&mut world.superuser().await)
                .await
                .unwrap();
        count == 2
    };
    crate::support::eventually("both wait", Duration::from_secs(20), pending).await;
    let mut superuser = world.superuser().await;
    let mut held = sqlx::Connection::begin(&mut superuser).await.unwrap();
    let cancel =
        "update deliveries set state = 'cancelled', ended_at = now() where chat_ref = 'dm:5'";
    sqlx::query(cancel).execute(&mut *held).await.unwrap();
    let given = fetch(&world, 0, &key, "wait=0").await;
    assert_eq!(given.len(), 1);
    assert_eq!(given[0]["identity"], "telegram:6");
    held.commit().await.unwrap();
    assert_eq!(fetch(&world, 1, &key, "wait=0").await, Vec::<Value>::new());
}

/// Waits until so many are there to be fetched.
async fn await_pending(world: &World, count: i64) {
    crate::support::eventually("all wait", Duration::from_secs(20), async || {
        let pending: i64 =
            sqlx::query_scalar("select count(*) from deliveries where state = 'pending'")
                .fetch_one(&mut world.superuser().await)
                .await
                .unwrap();
        pending == count
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_cannot_be_read_is_dead_and_holds_up_no_other() {
    let (world, _, key) = world_with_bridge(&["telegram"]).await;
    for who in ["telegram:5", "telegram:6"] {
        say(&world, &key, who, "hi").await;
    }
    await_pending(&world, 2).await;
    let plant = r#"update chats set chat = '{"type":"dm","x":1}' where chat_ref = 'dm:5'"#;
    sqlx::query(plant)
        .execute(&mut world.superuser().await)
        .await
        .unwrap();
    let given = fetch(&world, 0, &key, "wait=0").await;
    assert_eq!(given.len(), 1);
    assert_eq!(given[0]["identity"], "telegram:6");
    let dead = world.get(&key, "/v1/deliveries/dead").await.expect(200);
    assert_eq!(
        (&dead["data"][0]["identity"], &dead["data"][0]["error"]),
        (&json!("telegram:5"), &json!("unreadable"))
    );
    let path = format!(
        "/v1/deliveries/{}/replay",
        dead["data"][0]["id"].as_str().unwrap()
    );
    let mend = r#"update chats set chat = '{"type":"dm"}' where chat_ref = 'dm:5'"#;
    world.post(&key, &path, json!({})).await.expect(200);
    sqlx::query(mend)
        .execute(&mut world.superuser().await)
        .await
        .unwrap();
    let again = fetch(&world, 0, &key, "wait=0").await;
    assert_eq!(again[0]["identity"], "telegram:5");
}

/// Who takes one chat keeps others from none of the rest, whichever scopes they are in.
#[tokio::test(flavor = "multi_thread")]
async fn a_fetch_holds_only_the_chats_that_it_takes() {
    let (world, tenant, key) = world_with_bridge(&["slack"]).await;
    for who in ["slack@T1:5", "slack@T1:6", "slack@T2:5", "slack@T3:5"] {
        say(&world, &key, who, "hi").await;
    }
    await_pending(&world, 4).await;
    let caller = ServiceCaller::for_tenant(tenant.id.parse().unwrap());
    let mut tx = caller.begin(&world.app().db).await.unwrap();
    let first = lease(&mut tx, &Covered::all(), 1).await.unwrap();
    assert_eq!(first.len(), 1);
    let rest = fetch(&world, 1, &key, "wait=0&limit=10").await;
    tx.commit().await.unwrap();
    assert_eq!(rest.len(), 3);
}
