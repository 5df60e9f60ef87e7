//! Sweeps that race: with each other, with messages, and with changes of the retention.

use reqwest::Method;
use serde_json::json;
use sqlx::Connection;
use throughline::sessions::retention::{self, Progress};

use crate::support::conversations::{user_message, uuid_of_session};
use crate::support::data::retention::{
    DAY, begin, conversation, conversations, finished_sweep, keep_for, release_job, retention_of,
    status, step, sweep_entries, tenant_by_hand, transaction,
};
use crate::support::{Fields, Reply, World};

#[tokio::test(flavor = "multi_thread")]
async fn two_nodes_at_once_sweep_each_conversation_once() {
    let world = World::with_nodes(2).await;
    let tenant = tenant_by_hand(&world).await;
    conversations(&world, &tenant, 11).await;
    world.clock.advance(31 * DAY);
    let young = conversations(&world, &tenant, 7).await;
    // Both believe that they have the job, as after a lease that ran out too early.
    let both = tokio::sync::Barrier::new(2);
    let run = async |node: usize| {
        let started_at = begin(&world, node, &tenant).await.unwrap();
        both.wait().await;
        let mut progress = Progress::Running;
        while progress == Progress::Running {
            progress = step(&world, node, &tenant, started_at, 3).await;
        }
        (started_at, progress)
    };
    let (first, second) = tokio::join!(run(0), run(1));
    assert_eq!(first.0, second.0, "there is one sweep");
    let ends = [first.1, second.1];
    assert!(ends.contains(&Progress::Finished) && ends.contains(&Progress::Restart));
    let sweep = retention_of(&world, &tenant).await["sweep"].clone();
    assert_eq!(
        (&sweep["examined"], &sweep["deleted"]),
        (&json!(18), &json!(11))
    );
    assert_eq!(sweep_entries(&world, &tenant).await.len(), 1);
    assert_eq!(world.walk(&tenant.key, "/v1/sessions").await.len(), 7);
    // And with jobs: whoever has the lease sweeps.
    world.clock.advance(31 * DAY);
    let started = world.clock.now();
    release_job(&world, &tenant).await;
    let apps = world.nodes.iter().map(|node| &node.app);
    futures_util::future::try_join_all(apps.map(throughline::jobs::tick))
        .await
        .unwrap();
    let sweep = finished_sweep(&world, &tenant, started).await;
    assert_eq!(
        (&sweep["examined"], &sweep["deleted"]),
        (&json!(young.len()), &json!(young.len()))
    );
    assert_eq!(sweep_entries(&world, &tenant).await.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sweep_that_stops_in_the_middle_goes_on_elsewhere() {
    let world = World::with_nodes(2).await;
    let tenant = tenant_by_hand(&world).await;
    conversations(&world, &tenant, 10).await;
    world.clock.advance(31 * DAY);
    let started_at = begin(&world, 0, &tenant).await.unwrap();
    assert_eq!(
        step(&world, 0, &tenant, started_at, 4).await,
        Progress::Running
    );
    // The node dies in the middle of its second step.
    let mut tx = transaction(&world, 0, &tenant).await;
    retention::step(world.app(), &mut tx, started_at, 4)
        .await
        .unwrap();
    drop(tx);
    let half = retention_of(&world, &tenant).await["sweep"].clone();
    assert_eq!(
        (&half["examined"], &half["deleted"], &half["finished_at"]),
        (&json!(4), &json!(4), &json!(null))
    );
    assert_eq!(world.walk(&tenant.key, "/v1/sessions").await.len(), 6);
    release_job(&world, &tenant).await;
    throughline::jobs::tick(&world.nodes[1].app).await.unwrap();
    let whole = finished_sweep(&world, &tenant, started_at).await;
    assert_eq!(whole["started_at"], half["started_at"]);
    assert_eq!(
        (&whole["examined"], &whole["deleted"]),
        (&json!(10), &json!(10))
    );
    let entries = sweep_entries(&world, &tenant).await;
    assert_eq!(entries.len(), 1, "{entries:?}");
    assert_eq!(entries[0]["detail"], json!({"examined": 10, "deleted": 10}));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_in_the_middle_of_a_sweep_saves_its_conversation() {
    let world = World::new().await;
    let tenant = tenant_by_hand(&world).await;
    let old = conversations(&world, &tenant, 3).await;
    let body = json!({"session_key": "k", "messages": [user_message("x")]});
    let keyed = world.session(&tenant.key, body).await.id();
    world.clock.advance(31 * DAY);
    // Said and not yet committed; and a key through which somebody is about to speak.
    let mut superuser = world.superuser().await;
    let mut open = superuser.begin().await.unwrap();
    let changed = sqlx::query(
        "with place as (
           update sessions set next_seq = next_seq + 1, last_active_at = $3, last_user_at = $3
            where tenant_id = $1 and id = $2
        returning next_seq - 1 as seq
         )
         insert into messages (tenant_id, session_id, seq, role, kind, content, token_count, created_at)
         select $1, $2, seq, 'user', 'normal', '\"just in time\"', 1, $3 from place",
    )
    .bind(tenant.uuid())
    .bind(uuid_of_session(&old[1]))
    .bind(world.clock.now())
    .execute(&mut *open)
    .await
    .unwrap();
    assert_eq!(changed.rows_affected(), 1);
    sqlx::query("select id from slots where tenant_id = $1 and key = 'k' for no key update")
        .bind(tenant.uuid())
        .execute(&mut *open)
        .await
        .unwrap();
    let started_at = begin(&world, 0, &tenant).await.unwrap();
    let progress = step(&world, 0, &tenant, started_at, 10).await;
    assert_eq!(progress, Progress::Finished, "it waits for nobody");
    open.commit().await.unwrap();
    let sweep = retention_of(&world, &tenant).await["sweep"].clone();
    assert_eq!(
        (&sweep["examined"], &sweep["deleted"]),
        (&json!(4), &json!(2))
    );
    for (id, there) in [
        (&old[0], 404),
        (&old[1], 200),
        (&old[2], 404),
        (&keyed, 200),
    ] {
        assert_eq!(status(&world, &tenant, id).await, there);
    }
    let path = format!("/v1/sessions/{}/messages", old[1]);
    assert_eq!(
        world.contents(&tenant.key, &path).await,
        ["x", "just in time"]
    );
    // Nobody spoke through the key after all: the next sweep takes that one.
    let started_at = begin(&world, 0, &tenant).await.unwrap();
    step(&world, 0, &tenant, started_at, 10).await;
    assert_eq!(status(&world, &tenant, &old[1]).await, 200);
    assert_eq!(status(&world, &tenant, &keyed).await, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_comes_too_late_is_never_acknowledged_and_lost() {
    let world = World::new().await;
    let tenant = tenant_by_hand(&world).await;
    let plain = conversation(&world, &tenant).await;
    let body = json!({"session_key": "k", "messages": [user_message("x")]});
    let keyed = world.session(&tenant.key, body).await.id();
    world.clock.advance(31 * DAY);
    let started_at = begin(&world, 0, &tenant).await.unwrap();
    let mut tx = transaction(&world, 0, &tenant).await;
    retention::step(world.app(), &mut tx, started_at, 10)
        .await
        .unwrap();
    let body = json!([user_message("late")]);
    let by_id = async { world.append(&tenant.key, &plain, body.clone()).await };
    let by_key = async {
        let path = "/v1/session-keys/k/messages";
        world
            .post(&tenant.key, path, json!({ "messages": body }))
            .await
    };
    let commit = async {
        world.waiting(2).await;
        tx.commit().await.unwrap();
    };
    let (by_id, by_key, ()) = tokio::join!(by_id, by_key, commit);
    by_id.expect_problem(404, "session_not_found");
    let fresh = by_key.expect(201);
    assert_eq!(fresh["created"], true);
    assert_ne!(fresh["session_id"], keyed);
    assert_eq!(status(&world, &tenant, &keyed).await, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retention_that_is_lengthened_or_removed_stops_the_sweep() {
    let world = World::new().await;
    let tenant = tenant_by_hand(&world).await;
    conversations(&world, &tenant, 9).await;
    world.clock.advance(40 * DAY);
    let left = async || world.walk(&tenant.key, "/v1/sessions").await.len();
    let begun = async || begin(&world, 0, &tenant).await.unwrap();
    let step = async |started_at| step(&world, 0, &tenant, started_at, 2).await;
    let first = begun().await;
    assert_eq!(step(first).await, Progress::Running);
    // A shorter one is for the next sweep.
    keep_for(&world, &tenant, json!(20)).await;
    assert_eq!(step(first).await, Progress::Running);
    assert_eq!(left().await, 5);
    keep_for(&world, &tenant, json!(60)).await;
    assert_eq!(step(first).await, Progress::Restart);
    assert_eq!(left().await, 5);
    let ended = retention_of(&world, &tenant).await["sweep"].clone();
    assert!(ended["finished_at"].is_string(), "{ended}");
    let entries = sweep_entries(&world, &tenant).await;
    assert_eq!(entries[0]["detail"], json!({"examined": 4, "deleted": 4}));
    // The next one goes by the new setting, and says when it began.
    let second = begun().await;
    while step(second).await == Progress::Running {}
    let sweep = retention_of(&world, &tenant).await["sweep"].clone();
    assert_eq!(
        (&sweep["examined"], &sweep["deleted"]),
        (&json!(5), &json!(0))
    );
    keep_for(&world, &tenant, json!(30)).await;
    let third = begun().await;
    assert_eq!(step(third).await, Progress::Running);
    keep_for(&world, &tenant, json!(null)).await;
    assert_eq!(step(third).await, Progress::Restart);
    assert_eq!(begin(&world, 0, &tenant).await, None);
    assert_eq!(left().await, 3);
    // A sweep that stood still meanwhile is ended by whoever takes it up.
    keep_for(&world, &tenant, json!(30)).await;
    begun().await;
    keep_for(&world, &tenant, json!(null)).await;
    release_job(&world, &tenant).await;
    finished_sweep(&world, &tenant, third).await;
    assert_eq!(left().await, 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_of_the_retention_waits_for_the_step_that_runs() {
    let world = World::new().await;
    let tenant = tenant_by_hand(&world).await;
    conversations(&world, &tenant, 2).await;
    world.clock.advance(31 * DAY);
    let started_at = begin(&world, 0, &tenant).await.unwrap();
    let mut tx = transaction(&world, 0, &tenant).await;
    retention::step(world.app(), &mut tx, started_at, 1)
        .await
        .unwrap();
    let body = json!({"retention": {"conversations_days": null}});
    let change = Reply::of(
        world
            .request(Method::PATCH, "/v1/tenant", &tenant.key)
            .json(&body),
    );
    let commit = async {
        world.waiting(1).await;
        tx.commit().await.unwrap();
    };
    let (changed, ()) = tokio::join!(change, commit);
    changed.expect(200);
    // What is there when the change is acknowledged stays.
    assert_eq!(world.walk(&tenant.key, "/v1/sessions").await.len(), 1);
    let after = step(&world, 0, &tenant, started_at, 1).await;
    assert_eq!(after, Progress::Restart);
    assert_eq!(world.walk(&tenant.key, "/v1/sessions").await.len(), 1);
}
