//! Two tenants whose messages of platforms, replies, links and deliveries have equal ids never meet: with
//! row-level security, and with the predicates of the statements alone.

use std::time::Duration;

use serde_json::{Value, json};
use throughline::ids::DeliveryId;

use crate::support::data::twins::{Twins, only_ours};
use crate::support::deliveries::Retry;
use crate::support::servers::model::{Step, echo_of};
use crate::support::{Fields, eventually};

#[tokio::test(flavor = "multi_thread")]
async fn what_bridges_do_with_equal_ids_never_meets() {
    equal_bridges(&Twins::new(true).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_bridges_do_with_equal_ids_never_meets_even_without_row_level_security() {
    equal_bridges(&Twins::new(false).await).await;
}

async fn equal_bridges(twins: &Twins) {
    answer_by_http(twins).await;
    deliver_what_nobody_fetched(twins).await;
    deliver_what_took_too_long(twins).await;
    replace_what_waits(twins).await;
    fetch_and_end(twins).await;
    command(twins).await;
    link(twins).await;
    expire(twins).await;
    for asked in twins.chat.model.requests() {
        only_ours(&asked.to_string());
    }
}

fn message(id: &str, text: &str) -> Value {
    json!({"identity": "telegram:1", "text": text, "message_id": id})
}

fn unwaited(id: &str, text: &str) -> Value {
    json!({"identity": "telegram:1", "text": text, "message_id": id, "wait": false})
}

fn reply(answer: &Value) -> &str {
    answer["reply"]["text"].as_str().unwrap_or_default()
}

async fn answer_by_http(twins: &Twins) {
    for id in ["ours 1", "ours 2"] {
        let answer = twins.send(message(id, id)).await.expect(200);
        assert_eq!(reply(&answer), echo_of(id));
    }
    twins.chat.model.push(Step::Hold);
    let body = message("ours 3", "ours 3");
    let (first, theirs) = tokio::join!(twins.send(body.clone()), async {
        twins.chat.model.called(3).await;
        let theirs = twins.mirror("").await;
        twins.chat.model.release();
        theirs
    });
    let first = first.expect(200);
    assert_eq!(reply(&first), echo_of("ours 3"));
    twins.unchanged(&theirs, "an answer by HTTP").await;
    let theirs = twins.mirror("").await;
    let again = twins.send(body).await.expect(200);
    assert_eq!(
        (&again["turn_id"], &again["duplicate"], reply(&again)),
        (&first["turn_id"], &json!(true), reply(&first))
    );
    twins.unchanged(&theirs, "the same message again").await;
}

/// The next delivery, given out and not ended; of none but `text`.
async fn given(twins: &Twins, query: &str, text: &str) -> Value {
    let mut given = twins.chat.world.fetch(0, twins.bridge(), query).await;
    assert_eq!(given.len(), 1, "{given:?}");
    assert_eq!(given[0]["text"], text);
    given.remove(0)
}

async fn acknowledge(twins: &Twins, delivery: &Value) {
    twins
        .chat
        .world
        .ack(twins.bridge(), delivery)
        .await
        .expect(204);
}

async fn deliver_what_nobody_fetched(twins: &Twins) {
    twins.chat.model.push(Step::Hold);
    twins
        .send_and_disconnect(&message("ours 4", "ours 4"))
        .await;
    // Theirs has ended so too, but not long enough ago for a sweeper.
    let theirs = twins
        .mirror(
            "delete from turns where tenant_id = $theirs and state = 'queued';
             update turns
                set state = 'completed', lease_until = null, ended_at = now(), due_at = now() + interval '1 day'
              where tenant_id = $theirs and state = 'running' and reply_via = 'waiting';",
        )
        .await;
    twins.chat.model.release();
    let delivery = given(twins, "wait=20", &echo_of("ours 4")).await;
    acknowledge(twins, &delivery).await;
    twins
        .unchanged(&theirs, "an answer that nobody fetched")
        .await;
}

async fn deliver_what_took_too_long(twins: &Twins) {
    twins.chat.model.push(Step::Hold);
    let body = message("ours 5", "ours 5");
    twins.send_and_disconnect(&body).await;
    let theirs = twins.mirror("").await;
    twins.chat.world.clock.advance(Duration::from_secs(60));
    assert_eq!(reply(&twins.send(body).await.expect(202)), "");
    twins.unchanged(&theirs, "waiting no longer").await;
    twins.chat.model.release();
    let delivery = given(twins, "wait=20", &echo_of("ours 5")).await;
    acknowledge(twins, &delivery).await;
    twins
        .unchanged(&theirs, "an answer that took too long")
        .await;
}

async fn replace_what_waits(twins: &Twins) {
    twins.chat.model.push(Step::Hold);
    twins.send(unwaited("ours 6", "ours 6")).await.expect(202);
    twins.chat.model.called(6).await;
    let draft = twins.send(unwaited("ours 7", "ours draft")).await;
    let theirs = twins.mirror("").await;
    let edit = async |id: &str, text: &str| {
        let mut body = message(id, text);
        body["edit"] = json!(true);
        twins.send(body).await.expect(202)["turn_id"].clone()
    };
    assert_eq!(edit("ours 7", "ours 7").await, draft.expect(202)["turn_id"]);
    twins.unchanged(&theirs, "replacing what waits").await;
    assert!(edit("ours 3", "ours changed").await.is_string());
    twins.unchanged(&theirs, "keeping a change").await;
    twins.chat.model.release();
    let both = async || {
        let pending = "select count(*) from deliveries where tenant_id = $1 and state = 'pending'";
        twins.number(pending).await == 2
    };
    eventually("both are answered", Duration::from_secs(20), both).await;
}

async fn fetch_and_end(twins: &Twins) {
    let world = &twins.chat.world;
    let key = twins.bridge();
    let text = echo_of("ours 6");
    let theirs = twins.mirror("").await;
    let delivery = given(twins, "wait=0", &text).await;
    twins.unchanged(&theirs, "giving out").await;

    let theirs = twins.mirror("").await;
    world.nack(key, &delivery, Retry::Yes).await.expect(204);
    twins.unchanged(&theirs, "giving back").await;
    world.age_deliveries(Duration::from_secs(3)).await;
    let theirs = twins
        .mirror(
            "update deliveries set state = 'leased', lease = gen_random_uuid()
              where tenant_id = $theirs and state = 'pending'
                and seq = (select min(seq) from deliveries where tenant_id = $theirs and state = 'pending');",
        )
        .await;
    assert_eq!(given(twins, "wait=0", &text).await["attempt"], 2);
    twins.unchanged(&theirs, "one in flight next door").await;

    world.age_deliveries(Duration::from_secs(61)).await;
    let theirs = twins.mirror("").await;
    let delivery = given(twins, "wait=0", &text).await;
    assert_eq!(delivery["attempt"], 3);
    twins.unchanged(&theirs, "taking back").await;

    let theirs = twins.mirror("").await;
    world.nack(key, &delivery, Retry::No).await.expect(204);
    twins.unchanged(&theirs, "giving up").await;
    let theirs = twins.mirror("").await;
    let dead = world.get(key, "/v1/deliveries/dead").await;
    only_ours(&dead.body);
    assert_eq!(dead.expect(200).list().len(), 1);
    let path = |what: &str| format!("/v1/deliveries/{}/{what}", delivery.text("id"));
    let replayed = world.post(key, &path("replay"), json!({})).await;
    assert_eq!(replayed.expect(200)["text"], text);
    twins.unchanged(&theirs, "trying again").await;

    let delivery = given(twins, "wait=0", &text).await;
    let (foreign, theirs) = only_next_door(twins).await;
    let mut missing = delivery.clone();
    missing["id"] = json!(foreign.to_string());
    for refused in [
        world.ack(key, &missing).await,
        world.nack(key, &missing, Retry::Yes).await,
    ] {
        refused.expect_problem(404, "not_found");
    }
    acknowledge(twins, &delivery).await;
    twins.unchanged(&theirs, "acknowledging").await;
    let last = given(twins, "wait=0", &echo_of("ours 7")).await;
    acknowledge(twins, &last).await;
}

/// A delivery that is the neighbour's alone.
async fn only_next_door(twins: &Twins) -> (DeliveryId, crate::support::data::twins::Theirs) {
    let foreign = DeliveryId::generate();
    let also = format!(
        "update deliveries set id = '{}' where tenant_id = $theirs and state = 'pending';",
        foreign.as_uuid()
    );
    (foreign, twins.mirror(&also).await)
}

async fn command(twins: &Twins) {
    let tell = async |text: &str| {
        let answer = twins.send(message(&format!("ours {text}"), text)).await;
        reply(&answer.expect(200)).to_owned()
    };
    let theirs = twins.mirror("").await;
    assert_eq!(tell("/stop").await, "There is nothing to stop.");
    let undone = tell("/undo 50").await;
    assert!(undone.starts_with("Your last 7 messages"), "{undone}");
    assert_eq!(tell("/undo").await, "There is nothing to take back.");
    twins.unchanged(&theirs, "taking back").await;
    assert_eq!(tell("ours 8").await, echo_of("ours 8"));
    let theirs = twins.mirror("").await;
    assert_eq!(tell("/retry").await, echo_of("ours 8"));
    twins.unchanged(&theirs, "answering again").await;
    twins.chat.model.push(Step::Hold);
    for id in ["ours 9", "ours 10"] {
        twins.send(unwaited(id, id)).await.expect(202);
    }
    let theirs = twins.mirror("").await;
    let stop = message("ours /stop again", "/stop");
    assert_eq!(reply(&twins.send(stop).await.expect(200)), "Stopped.");
    let open = "select count(*) from turns where tenant_id = $1 and ended_at is null";
    let stopped = async || twins.number(open).await == 0;
    eventually("both are stopped", Duration::from_secs(20), stopped).await;
    twins.unchanged(&theirs, "stopping").await;
}

async fn link(twins: &Twins) {
    let tell = async |identity: &str, text: &str| {
        let answer = twins.send(json!({"identity": identity, "text": text}));
        reply(&answer.await.expect(200)).to_owned()
    };
    let shown = tell("telegram:1", "/link").await;
    let code = shown.split_whitespace().last().unwrap();
    let preview = tell("telegram:2", &format!("/link {code}")).await;
    assert!(preview.contains("/link yes"), "{preview}");
    let theirs = twins.mirror("").await;
    assert!(
        tell("telegram:2", "/link yes").await.contains("one person"),
        "{preview}"
    );
    twins.unchanged(&theirs, "linking").await;
}

/// What is kept for a while, and goes with its time: not with the neighbour's.
async fn expire(twins: &Twins) {
    let kept = async || {
        twins
            .number(
                "select (select count(*) from events where tenant_id = $1)
                      + (select count(*) from inbound_receipts where tenant_id = $1)
                      + (select count(*) from deliveries where tenant_id = $1 and ended_at is not null)",
            )
            .await
    };
    let there = kept().await;
    assert!(there > 0);
    let theirs = twins
        .mirror(
            "update events set created_at = created_at - interval '40 days' where tenant_id = $theirs;
             update inbound_receipts set created_at = created_at - interval '40 days' where tenant_id = $theirs;
             update deliveries set created_at = created_at - interval '40 days', ended_at = ended_at - interval '40 days'
              where tenant_id = $theirs;",
        )
        .await;
    let due = "with due as (update jobs set run_at = now() - interval '1 day', lease_until = null
                             where tenant_id = $1 and kind = 'expire_events' returning 1)
               select count(*) from due";
    assert_eq!(twins.number(due).await, 1);
    let has_run = async || {
        let app = twins.chat.world.app();
        throughline::jobs::tick(app).await.unwrap();
        let later = "select count(*) from jobs where tenant_id = $1 and kind = 'expire_events'
                        and run_at > now() and lease_until is null";
        twins.number(later).await == 1
    };
    eventually("the job has run", Duration::from_secs(20), has_run).await;
    assert_eq!(kept().await, there);
    twins.unchanged(&theirs, "letting nothing go").await;

    let theirs = twins.mirror("").await;
    twins
        .chat
        .world
        .clock
        .advance(Duration::from_secs(31 * 24 * 3600));
    let gone = async || {
        let app = twins.chat.world.app();
        throughline::jobs::tick(app).await.unwrap();
        kept().await == 0
    };
    eventually("it is gone", Duration::from_secs(20), gone).await;
    twins.unchanged(&theirs, "letting go").await;
}
