//! The outbox as a bridge sees it: in order per chat, one in flight, leased, acknowledged, given back, dead
//! and replayed; and only to whoever serves the platform.

use std::time::Duration;

use futures_util::future::join_all;
use reqwest::Method;
use serde_json::{Value, json};
use throughline::dev::service_caller;
use throughline::store::bridge::deliveries::CoveredPlatforms;
use throughline::store::bridge::delivery_leases::lease;

use crate::support::deliveries::Retry;
use crate::support::{Fields, Scene, World};

async fn bridge(platforms: &'static [&'static str]) -> Scene {
    let scene = Scene::builder().nodes(2).bridge(platforms);
    scene.build().await
}

fn texts(deliveries: &[Value]) -> Vec<String> {
    let text = |one: &Value| one.text("text").to_owned();
    deliveries.iter().map(text).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chat_has_one_in_flight_and_keeps_its_order() {
    let b = bridge(&["telegram"]).await;
    for text in ["one", "two"] {
        b.queue("telegram:5", text).await;
    }
    let first = b.fetch(0, "platform=telegram&wait=20").await;
    assert_eq!(first.len(), 1);
    let one = &first[0];
    assert!(texts(&first)[0].contains("You said: one"), "{one}");
    assert_eq!(
        (&one["kind"], &one["seq"], &one["attempt"]),
        (&json!("reply"), &json!(1), &json!(1))
    );
    assert_eq!(one["chat"], json!({"type": "dm"}));
    assert_eq!(one["identity"], "telegram:5");
    assert_eq!(b.fetch(1, "wait=1").await, Vec::<Value>::new());
    b.ack(one).await.expect(204);
    b.ack(one).await.expect_problem(409, "stale_lease");
    let second = b.fetch(1, "wait=20").await;
    assert!(texts(&second)[0].contains("You said: two"), "{second:?}");
    b.ack(&second[0]).await.expect(204);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_acknowledged_comes_again_and_is_dead_after_ten_times() {
    let b = bridge(&["telegram"]).await;
    b.queue("telegram:5", "hi").await;
    let mut last = Value::Null;
    for attempt in 1..=10 {
        let given = b.fetch(0, "wait=20").await;
        assert_eq!(given[0]["attempt"], attempt);
        if !last.is_null() {
            b.ack(&last).await.expect_problem(409, "stale_lease");
        }
        last = given[0].clone();
        b.world.age_deliveries(Duration::from_secs(61)).await;
    }
    assert_eq!(b.fetch(0, "wait=0").await, Vec::<Value>::new());
    let dead = b
        .world
        .get(&b.bridge_key, "/v1/deliveries/dead")
        .await
        .expect(200);
    assert_eq!(dead["data"][0]["id"], last["id"]);
    let (_, reader) = b.world.api_key(&b.tenant, "read").await;
    let unread = b
        .world
        .get(&reader, "/v1/deliveries/dead")
        .await
        .expect(200);
    assert_eq!(unread["data"][0]["text"], Value::Null);
    let path = format!("/v1/deliveries/{}/replay", last.text("id"));
    b.world
        .post(&b.bridge_key, &path, json!({}))
        .await
        .expect(200);
    b.world
        .post(&b.bridge_key, &path, json!({}))
        .await
        .expect_problem(404, "not_found");
    let again = b.fetch(0, "wait=20").await;
    assert_eq!(
        (&again[0]["id"], &again[0]["attempt"]),
        (&last["id"], &json!(1))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_released_delivery_waits_and_delays_its_chat_but_no_other() {
    let b = bridge(&["telegram"]).await;
    b.queue("telegram:5", "one").await;
    let first = b.fetch(0, "wait=20").await.remove(0);
    b.queue("telegram:5", "two").await;
    b.nack(&first, Retry::Yes).await.expect(204);
    b.queue("telegram:6", "other").await;
    let other = b.fetch(0, "wait=20").await;
    assert_eq!(other.len(), 1);
    assert_eq!(other[0]["identity"], "telegram:6");
    b.world.age_deliveries(Duration::from_secs(3)).await;
    let again = b.fetch(0, "wait=20").await.remove(0);
    assert_eq!((&again["id"], &again["attempt"]), (&first["id"], &json!(2)));
    assert_eq!(again["error"], "the platform refused");
    b.nack(&again, Retry::No).await.expect(204);
    let next = b.fetch(0, "wait=20").await.remove(0);
    assert!(next.text("text").contains("You said: two"));
}

#[tokio::test(flavor = "multi_thread")]
async fn several_consumers_on_two_nodes_share_without_doubling() {
    let b = bridge(&["telegram"]).await;
    let people: Vec<String> = (0..12).map(|n| format!("telegram:{n}")).collect();
    join_all(people.iter().map(|who| b.queue(who, "hi"))).await;
    let taking = (0..6).map(|consumer| {
        let b = &b;
        async move {
            let mut taken = Vec::new();
            for _ in 0..20 {
                let given = b.fetch(consumer % 2, "wait=1&limit=2").await;
                for one in given {
                    b.ack(&one).await.expect(204);
                    taken.push(one.text("identity").to_owned());
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
async fn a_consumer_that_hangs_up_while_it_waits_leases_nothing() {
    let b = bridge(&["telegram"]).await;
    for _ in 0..3 {
        let waiting = b
            .world
            .request(Method::GET, "/v1/deliveries?wait=50", &b.bridge_key);
        let waiting = waiting.timeout(Duration::from_millis(300));
        assert!(waiting.send().await.is_err());
    }
    b.queue("telegram:5", "hi").await;
    let given = b.fetch(0, "wait=20").await;
    assert_eq!(given[0]["attempt"], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_sees_and_ends_only_what_its_platforms_cover() {
    let b = bridge(&["telegram"]).await;
    let slack = b.world.bridge_key(&b.tenant, &["slack@T1"]).await;
    let admin = &b.tenant.key;
    for who in ["telegram:5", "slack@T1:5", "slack@T2:5"] {
        b.world.queue(admin, who, "hi").await;
    }
    let of_telegram = b.fetch(0, "wait=20").await;
    assert_eq!(of_telegram.len(), 1);
    assert_eq!(of_telegram[0]["platform"], "telegram");
    let mut of_slack = b.world.fetch(0, &slack, "platform=slack&wait=20").await;
    of_slack.extend(b.world.fetch(0, &slack, "wait=1").await);
    assert_eq!(of_slack.len(), 1);
    assert_eq!(of_slack[0]["scope"], "T1");
    for refused in ["platform=telegram", "platform=slack@T2"] {
        let reply = b
            .world
            .get(&slack, &format!("/v1/deliveries?{refused}"))
            .await;
        reply.expect_problem(403, "platform_not_allowed");
    }
    for (key, foreign) in [(&b.bridge_key, &of_slack[0]), (&slack, &of_telegram[0])] {
        b.world
            .ack(key, foreign)
            .await
            .expect_problem(404, "not_found");
        b.world
            .nack(key, foreign, Retry::No)
            .await
            .expect_problem(404, "not_found");
    }
    b.ack(&of_telegram[0]).await.expect(204);
    b.world.ack(&slack, &of_slack[0]).await.expect(204);
    let rest = b.world.fetch(0, admin, "wait=20").await;
    assert_eq!(rest[0]["scope"], "T2");
    let (_, chat) = b.world.api_key(&b.tenant, "chat").await;
    b.world
        .get(&chat, "/v1/deliveries")
        .await
        .expect_problem(403, "missing_scope");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_gives_deliveries_as_they_come() {
    let b = bridge(&["telegram"]).await;
    let mut stream = b
        .world
        .request(
            Method::GET,
            "/v1/deliveries/stream?platform=telegram",
            &b.bridge_key,
        )
        .send()
        .await
        .unwrap();
    assert_eq!(stream.status(), 200);
    b.queue("telegram:5", "hi").await;
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
    assert!(delivery.text("text").contains("You said: hi"));
    b.ack(&delivery).await.expect(204);
}

#[tokio::test(flavor = "multi_thread")]
async fn security_notices_come_the_same_way() {
    let b = bridge(&["telegram", "discord"]).await;
    b.world.link(&b.bridge_key, "telegram:1", "discord:1").await;
    b.world.link(&b.tenant.key, "telegram:1", "discord:2").await;
    let given = b.fetch(0, "wait=20").await;
    assert!(!given.is_empty());
    assert!(
        given.iter().all(|one| one["kind"] == "security"),
        "{given:?}"
    );
}

/// A node whose clock is wrong leases nothing that is in flight, and loses nothing.
#[tokio::test(flavor = "multi_thread")]
async fn leases_do_not_depend_on_the_clock_of_a_node() {
    let b = bridge(&["telegram"]).await;
    b.queue("telegram:5", "hi").await;
    let first = b.fetch(0, "wait=20").await.remove(0);
    b.world.clock.advance(Duration::from_secs(3600));
    assert_eq!(b.fetch(1, "wait=0").await, Vec::<Value>::new());
    b.ack(&first).await.expect(204);
    b.queue("telegram:5", "again").await;
    assert_eq!(b.fetch(1, "wait=20").await.len(), 1);
}

/// Two of one chat must never be in flight, whoever comes in between: that was a unique violation, and 500.
#[tokio::test(flavor = "multi_thread")]
async fn a_dead_delivery_can_be_replayed_while_its_chat_is_leased() {
    let b = bridge(&["telegram"]).await;
    b.queue("telegram:5", "one").await;
    let dead = b.fetch(0, "wait=20").await.remove(0);
    b.nack(&dead, Retry::No).await.expect(204);
    b.queue("telegram:5", "two").await;
    let pending = async || {
        let count: i64 =
            sqlx::query_scalar("select count(*) from deliveries where state = 'pending'")
                .fetch_one(&mut b.world.superuser().await)
                .await
                .unwrap();
        count == 1
    };
    crate::support::eventually("two waits", Duration::from_secs(20), pending).await;
    // The replay waits for the chat; who fetches passes over it, and looks again.
    let mut superuser = b.world.superuser().await;
    let mut held = sqlx::Connection::begin(&mut superuser).await.unwrap();
    sqlx::query("select 1 from chats for update")
        .execute(&mut *held)
        .await
        .unwrap();
    let path = format!("/v1/deliveries/{}/replay", dead.text("id"));
    let replay = b.world.post(&b.bridge_key, &path, json!({}));
    let lease = b.fetch(1, "wait=5");
    let release = async {
        b.world.waiting(1).await;
        held.commit().await.unwrap();
    };
    let (replayed, leased, ()) = tokio::join!(replay, lease, release);
    replayed.expect(200);
    assert_eq!(leased.len(), 1);
    assert_eq!(b.fetch(0, "wait=0").await, Vec::<Value>::new());
    b.ack(&leased[0]).await.expect(204);
    assert_eq!(b.fetch(0, "wait=20").await.len(), 1);
}

/// Something is written into a chat while its only delivery is acknowledged, by who has the chat first.
#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_written_during_an_acknowledgement_is_delivered() {
    let b = bridge(&["telegram"]).await;
    b.queue("telegram:5", "one").await;
    let first = b.fetch(0, "wait=20").await.remove(0);
    let mut superuser = b.world.superuser().await;
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
        b.world.waiting(1).await;
        writer.commit().await.unwrap();
    };
    let (acknowledged, ()) = tokio::join!(b.ack(&first), commit);
    acknowledged.expect(204);
    let second = b.fetch(1, "wait=20").await.remove(0);
    assert_eq!(second["kind"], "notice");
}

/// What has ended in a chat is not read again, and what is replayed, also by a node of the version before, is not
/// taken for it.
#[tokio::test(flavor = "multi_thread")]
async fn a_replayed_delivery_is_found_behind_what_has_ended() {
    let b = bridge(&["telegram"]).await;
    b.queue("telegram:5", "one").await;
    let dead = b.fetch(0, "wait=20").await.remove(0);
    b.nack(&dead, Retry::No).await.expect(204);
    b.queue("telegram:5", "two").await;
    let second = b.fetch(0, "wait=20").await.remove(0);
    b.ack(&second).await.expect(204);
    let ended = async || -> i64 {
        sqlx::query_scalar("select ended_seq from chats")
            .fetch_one(&mut b.world.superuser().await)
            .await
            .unwrap()
    };
    assert_eq!(ended().await, 1);
    let path = format!("/v1/deliveries/{}/replay", dead.text("id"));
    b.world
        .post(&b.bridge_key, &path, json!({}))
        .await
        .expect(200);
    let again = b.fetch(1, "wait=20").await.remove(0);
    assert_eq!(again["id"], dead["id"]);
    b.nack(&again, Retry::No).await.expect(204);
    b.queue("telegram:5", "three").await;
    let third = b.fetch(0, "wait=20").await.remove(0);
    b.ack(&third).await.expect(204);
    assert_eq!(ended().await, 2);
    let replayed = sqlx::query(
        "update deliveries set state = 'pending', visible_at = now(), ended_at = null where state = 'dead'",
    )
    .execute(&mut b.world.superuser().await)
    .await
    .unwrap();
    assert_eq!(replayed.rows_affected(), 1);
    let again = b.fetch(1, "wait=20").await.remove(0);
    assert_eq!(again["id"], dead["id"]);
    b.ack(&again).await.expect(204);
    sqlx::raw_sql(
        "with place as (
           update chats set next_seq = next_seq + 1 returning *
         )
         insert into deliveries (tenant_id, id, platform, scope, chat_ref, seq, kind, payload, visible_at, created_at)
         select tenant_id, gen_random_uuid(), platform, scope, chat_ref, next_seq - 1, 'notice', '{}', now(), now()
           from place",
    )
    .execute(&mut b.world.superuser().await)
    .await
    .unwrap();
    let new = b.fetch(1, "wait=20").await.remove(0);
    assert_eq!(new["kind"], "notice");
}

/// What an unlink cancels is not given out, and an unlink never meets a lease in a circle.
#[tokio::test(flavor = "multi_thread")]
async fn a_locked_delivery_is_skipped_and_delays_no_other_chat() {
    let b = bridge(&["telegram"]).await;
    for who in ["telegram:5", "telegram:6"] {
        b.queue(who, "hi").await;
    }
    let pending = async || {
        let count: i64 =
            sqlx::query_scalar("select count(*) from deliveries where state = 'pending'")
                .fetch_one(&mut b.world.superuser().await)
                .await
                .unwrap();
        count == 2
    };
    crate::support::eventually("both wait", Duration::from_secs(20), pending).await;
    let mut superuser = b.world.superuser().await;
    let mut held = sqlx::Connection::begin(&mut superuser).await.unwrap();
    let cancel =
        "update deliveries set state = 'cancelled', ended_at = now() where chat_ref = 'dm:5'";
    sqlx::query(cancel).execute(&mut *held).await.unwrap();
    let given = b.fetch(0, "wait=0").await;
    assert_eq!(given.len(), 1);
    assert_eq!(given[0]["identity"], "telegram:6");
    held.commit().await.unwrap();
    assert_eq!(b.fetch(1, "wait=0").await, Vec::<Value>::new());
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
    let b = bridge(&["telegram"]).await;
    for who in ["telegram:5", "telegram:6"] {
        b.queue(who, "hi").await;
    }
    await_pending(&b.world, 2).await;
    let plant = r#"update chats set chat = '{"type":"dm","x":1}' where chat_ref = 'dm:5'"#;
    sqlx::query(plant)
        .execute(&mut b.world.superuser().await)
        .await
        .unwrap();
    let given = b.fetch(0, "wait=0").await;
    assert_eq!(given.len(), 1);
    assert_eq!(given[0]["identity"], "telegram:6");
    let dead = b
        .world
        .get(&b.bridge_key, "/v1/deliveries/dead")
        .await
        .expect(200);
    assert_eq!(
        (&dead["data"][0]["identity"], &dead["data"][0]["error"]),
        (&json!("telegram:5"), &json!("unreadable"))
    );
    let path = format!("/v1/deliveries/{}/replay", dead.text("/data/0/id"));
    let mend = r#"update chats set chat = '{"type":"dm"}' where chat_ref = 'dm:5'"#;
    b.world
        .post(&b.bridge_key, &path, json!({}))
        .await
        .expect(200);
    sqlx::query(mend)
        .execute(&mut b.world.superuser().await)
        .await
        .unwrap();
    let again = b.fetch(0, "wait=0").await;
    assert_eq!(again[0]["identity"], "telegram:5");
}

/// Who takes one chat keeps others from none of the rest, whichever scopes they are in.
#[tokio::test(flavor = "multi_thread")]
async fn a_fetch_locks_only_the_chats_that_it_leases() {
    let b = bridge(&["slack"]).await;
    for who in ["slack@T1:5", "slack@T1:6", "slack@T2:5", "slack@T3:5"] {
        b.queue(who, "hi").await;
    }
    await_pending(&b.world, 4).await;
    let caller = service_caller(b.tenant.id.parse().unwrap());
    let mut tx = caller.begin(&b.world.app().db).await.unwrap();
    let first = lease(&mut tx, &CoveredPlatforms::all(), 1).await.unwrap();
    assert_eq!(first.len(), 1);
    let rest = b.fetch(1, "wait=0&limit=10").await;
    tx.commit().await.unwrap();
    assert_eq!(rest.len(), 3);
}
