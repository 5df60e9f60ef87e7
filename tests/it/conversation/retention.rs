//! Retention: what is old goes, what is young or in use stays, once in the cluster, whatever happens in
//! the middle of a sweep.

use crate::support::Fields;
use std::time::Duration;

use chrono::{DateTime, Utc};
use reqwest::Method;
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection};
use throughline::auth::ServiceCaller;
use throughline::sessions::retention::{self, Progress};
use throughline::store::TenantTx;

use crate::support::conversations::{answered, said, uuid_of_session};
use crate::support::people::person;
use crate::support::{Reply, Tenant, World, eventually};

const DAY: Duration = Duration::from_secs(24 * 3600);

async fn keep_for(world: &World, tenant: &Tenant, days: Value) {
    let body = json!({"retention": {"conversations_days": days}});
    world
        .patch(&tenant.key, "/v1/tenant", body)
        .await
        .expect(200);
}

async fn shown(world: &World, tenant: &Tenant) -> Value {
    world.get(&tenant.key, "/v1/retention").await.expect(200)
}

/// Lets due jobs run until a sweep that started after `after` has finished, and answers it.
async fn swept(world: &World, tenant: &Tenant, after: DateTime<Utc>) -> Value {
    let done = async || {
        for node in &world.nodes {
            throughline::jobs::tick(&node.app).await.unwrap();
        }
        let sweep = shown(world, tenant).await["sweep"].clone();
        let started: Option<DateTime<Utc>> =
            serde_json::from_value(sweep["started_at"].clone()).unwrap();
        started.is_some_and(|started| started >= after) && !sweep["finished_at"].is_null()
    };
    eventually("a sweep has finished", Duration::from_secs(20), done).await;
    shown(world, tenant).await["sweep"].clone()
}

async fn sweep_entries(world: &World, tenant: &Tenant) -> Vec<Value> {
    world
        .walk(&tenant.key, "/v1/audit?action=retention.sweep")
        .await
}

async fn status(world: &World, tenant: &Tenant, id: &str) -> u16 {
    world
        .get(&tenant.key, &format!("/v1/sessions/{id}"))
        .await
        .status
}

/// A conversation with one message.
async fn conversation(world: &World, tenant: &Tenant) -> String {
    world
        .session(&tenant.key, json!({"messages": [said("x")]}))
        .await
        .id()
}

async fn conversations(world: &World, tenant: &Tenant, count: usize) -> Vec<String> {
    let mut made = Vec::new();
    for _ in 0..count {
        made.push(conversation(world, tenant).await);
    }
    made
}

/// Takes the sweep's job into the test's own hands, as a node would that then stands still.
async fn hold_job(world: &World, tenant: &Tenant) {
    let held = async || {
        let done = sqlx::query(
            "update jobs set lease_until = '2200-01-01'
              where tenant_id = $1 and kind = $2 and lease_until is null",
        )
        .bind(tenant.uuid())
        .bind(retention::SWEEP_JOB)
        .execute(&mut world.superuser().await)
        .await;
        done.unwrap().rows_affected() == 1
    };
    eventually("no node has the job", Duration::from_secs(10), held).await;
}

/// What happens when the lease of a node that died runs out.
async fn release_job(world: &World, tenant: &Tenant) {
    sqlx::query(
        "update jobs set run_at = $3, lease_until = null where tenant_id = $1 and kind = $2",
    )
    .bind(tenant.uuid())
    .bind(retention::SWEEP_JOB)
    .bind(world.clock.now())
    .execute(&mut world.superuser().await)
    .await
    .unwrap();
}

/// A tenant that keeps conversations for 30 days, whose sweeps only the test runs.
async fn tenant_by_hand(world: &World) -> Tenant {
    let tenant = world.tenant("Acme").await;
    keep_for(world, &tenant, json!(30)).await;
    hold_job(world, &tenant).await;
    tenant
}

async fn transaction(world: &World, node: usize, tenant: &Tenant) -> TenantTx {
    let caller = ServiceCaller::for_tenant(tenant.id.parse().unwrap());
    caller.begin(&world.nodes[node].app.db).await.unwrap()
}

async fn begin(world: &World, node: usize, tenant: &Tenant) -> Option<DateTime<Utc>> {
    let mut tx = transaction(world, node, tenant).await;
    let begun = retention::begin(&world.nodes[node].app, &mut tx)
        .await
        .unwrap();
    tx.commit().await.unwrap();
    begun
}

async fn step(
    world: &World,
    node: usize,
    tenant: &Tenant,
    started_at: DateTime<Utc>,
    batch: i64,
) -> Progress {
    let mut tx = transaction(world, node, tenant).await;
    let progress = retention::step(&world.nodes[node].app, &mut tx, started_at, batch)
        .await
        .unwrap();
    tx.commit().await.unwrap();
    progress
}

#[tokio::test(flavor = "multi_thread")]
async fn old_conversations_go_and_young_ones_stay() {
    let world = World::new().await;
    let (tenant, other) = (world.tenant("Acme").await, world.tenant("other").await);
    let untouched = conversation(&world, &other).await;
    let body = json!({"id": "old", "session_key": "k", "messages": [said("forget me")]});
    world.session(&tenant.key, body).await;
    let chained = conversation(&world, &tenant).await;
    let child = world
        .compress(&tenant.key, &chained, json!({"summary": "s"}))
        .await
        .expect(201);
    let child = child.text("session_id").to_owned();
    let pinned = conversation(&world, &tenant).await;
    let mark = json!({"pinned": true, "archived": true});
    world
        .patch(&tenant.key, &format!("/v1/sessions/{pinned}"), mark)
        .await
        .expect(200);
    let empty = world.session(&tenant.key, json!({})).await.id();
    let revived = conversation(&world, &tenant).await;
    world.clock.advance(20 * DAY);
    world
        .append(&tenant.key, &revived, json!([answered("still here")]))
        .await
        .expect(201);
    let body = json!({"session_key": "young", "messages": [said("x")]});
    let young = world.session(&tenant.key, body).await.id();
    let branch = world
        .post(
            &tenant.key,
            &format!("/v1/sessions/{chained}/branch"),
            json!({}),
        )
        .await
        .expect(201);
    world.clock.advance(11 * DAY);
    let started = world.clock.now();
    keep_for(&world, &tenant, json!(30)).await;
    let sweep = swept(&world, &tenant, started).await;
    assert_eq!(
        (&sweep["examined"], &sweep["deleted"]),
        (&json!(7), &json!(4))
    );
    for id in ["old", &chained, &child, &pinned, &empty] {
        assert_eq!(status(&world, &tenant, id).await, 404, "{id}");
        let late = world.append(&tenant.key, id, json!([said("late")])).await;
        late.expect_problem(404, "session_not_found");
    }
    for id in [&revived, &young, &branch.id()] {
        assert_eq!(status(&world, &tenant, id).await, 200, "{id}");
    }
    assert_eq!(status(&world, &other, &untouched).await, 200);
    world
        .post(&tenant.key, "/v1/sessions", json!({"id": "old"}))
        .await
        .expect_problem(409, "session_id_taken");
    // Its key is free, and goes on with a fresh session.
    let slot = world
        .get(&tenant.key, "/v1/session-keys/k")
        .await
        .expect(200);
    assert_eq!(slot["session_id"], json!(null));
    let kept = world
        .get(&tenant.key, "/v1/session-keys/young")
        .await
        .expect(200);
    assert_eq!(kept["session_id"], young);
    let path = "/v1/session-keys/k/messages";
    let next = world
        .post(&tenant.key, path, json!({"messages": [said("hi")]}))
        .await
        .expect(201);
    assert_eq!(next["created"], true);
    let rows = async || -> i64 {
        let sql = "select count(*) from messages where content::text like '%forget me%'";
        sqlx::query_scalar(sql)
            .fetch_one(&mut world.superuser().await)
            .await
            .unwrap()
    };
    eventually("its rows are gone", Duration::from_secs(10), async || {
        throughline::jobs::tick(world.app()).await.unwrap();
        rows().await == 0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sweep_that_deleted_something_is_one_audit_entry() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    conversations(&world, &tenant, 3).await;
    world.clock.advance(31 * DAY);
    conversations(&world, &tenant, 2).await;
    let started = world.clock.now();
    keep_for(&world, &tenant, json!(30)).await;
    swept(&world, &tenant, started).await;
    let entries = sweep_entries(&world, &tenant).await;
    assert_eq!(entries.len(), 1, "{entries:?}");
    assert_eq!(entries[0]["actor"], "retention");
    assert_eq!(entries[0]["target"], tenant.id);
    assert_eq!(entries[0]["detail"], json!({"examined": 5, "deleted": 3}));
    let deletions = "/v1/audit?action=conversation.delete";
    assert_eq!(
        world.walk(&tenant.key, deletions).await,
        Vec::<Value>::new()
    );
    // One that finds nothing says nothing. It is planned by hand, and by itself an hour later.
    let started = world.clock.now();
    let planned = world
        .post(&tenant.key, "/v1/retention/sweeps", json!({}))
        .await
        .expect(202);
    assert_eq!(planned["conversations_days"], 30);
    let sweep = swept(&world, &tenant, started).await;
    assert_eq!(
        (&sweep["examined"], &sweep["deleted"]),
        (&json!(2), &json!(0))
    );
    let started = world.clock.now();
    world.clock.advance(Duration::from_secs(3601));
    let sweep = swept(&world, &tenant, started).await;
    assert_eq!(sweep["examined"], 2);
    assert_eq!(sweep_entries(&world, &tenant).await.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_changes_nothing_and_tells_what_the_sweep_then_deletes() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let body = json!({"messages": [said("1"), answered("2"), said("3")]});
    let chained = world.session(&tenant.key, body).await.id();
    world
        .compress(
            &tenant.key,
            &chained,
            json!({"summary": "s", "keep_last": 1}),
        )
        .await
        .expect(201);
    conversations(&world, &tenant, 2).await;
    world.clock.advance(10 * DAY);
    conversations(&world, &tenant, 3).await;
    world.clock.advance(10 * DAY);
    let before = world.walk(&tenant.key, "/v1/sessions").await;
    let nothing = json!({"conversations_days": null, "cutoff": null, "sweep": null});
    assert_eq!(shown(&world, &tenant).await, nothing);
    let sweeps = async |body: Value| world.post(&tenant.key, "/v1/retention/sweeps", body).await;
    for body in [json!({}), json!({"dry_run": true})] {
        let refused = sweeps(body).await;
        refused.expect_problem(422, "retention_not_set");
    }
    for body in [
        json!({"conversations_days": 15}),
        json!({"dry_run": false, "conversations_days": 15}),
        json!({"dry_run": true, "conversations_days": 0}),
        json!({"dry_run": true, "conversations_days": 36_501}),
    ] {
        let problem = sweeps(body).await.expect_problem(422, "invalid_value");
        assert_eq!(problem["errors"][0]["pointer"], "/conversations_days");
    }
    // Of the chain its three messages and the summary: the kept copy is not counted again.
    for (days, conversations, messages) in [(30, 0, 0), (15, 3, 6), (5, 6, 9)] {
        let body = json!({"dry_run": true, "conversations_days": days});
        let told = sweeps(body).await.expect(200);
        let cutoff: DateTime<Utc> = serde_json::from_value(told["cutoff"].clone()).unwrap();
        let age = (world.clock.now() - cutoff).num_seconds();
        assert!((0..60).contains(&(age - days * 24 * 3600)), "{told}");
        let expected = json!({
            "dry_run": true, "conversations_days": days, "cutoff": told["cutoff"],
            "conversations": conversations, "messages": messages,
        });
        assert_eq!(told, expected);
    }
    assert_eq!(shown(&world, &tenant).await, nothing);
    assert_eq!(world.walk(&tenant.key, "/v1/sessions").await, before);
    let started = world.clock.now();
    keep_for(&world, &tenant, json!(15)).await;
    let sweep = swept(&world, &tenant, started).await;
    assert_eq!(
        (&sweep["examined"], &sweep["deleted"]),
        (&json!(6), &json!(3))
    );
    let told = sweeps(json!({"dry_run": true})).await.expect(200);
    assert_eq!(
        (&told["conversations_days"], &told["conversations"]),
        (&json!(15), &json!(0))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_see_the_sweep_and_only_admins_start_one() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let ada = person(&world, &tenant, "ada").await;
    let (_, read) = world.api_key(&tenant, "read").await;
    let (_, chat) = world.api_key(&tenant, "chat").await;
    let dry = json!({"dry_run": true, "conversations_days": 1});
    world.get(&read, "/v1/retention").await.expect(200);
    world
        .get(&chat, "/v1/retention")
        .await
        .expect_problem(403, "missing_scope");
    for key in [&read, &chat] {
        world
            .post(key, "/v1/retention/sweeps", dry.clone())
            .await
            .expect_problem(403, "missing_scope");
    }
    world.get(&ada.token, "/v1/retention").await.expect(404);
    world
        .post(&ada.token, "/v1/retention/sweeps", dry)
        .await
        .expect(404);
}

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
        let mut progress = Progress::Going;
        while progress == Progress::Going {
            progress = step(&world, node, &tenant, started_at, 3).await;
        }
        (started_at, progress)
    };
    let (first, second) = tokio::join!(run(0), run(1));
    assert_eq!(first.0, second.0, "there is one sweep");
    let ends = [first.1, second.1];
    assert!(ends.contains(&Progress::Finished) && ends.contains(&Progress::Overtaken));
    let sweep = shown(&world, &tenant).await["sweep"].clone();
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
    let sweep = swept(&world, &tenant, started).await;
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
        Progress::Going
    );
    // The node dies in the middle of its second step.
    let mut tx = transaction(&world, 0, &tenant).await;
    retention::step(world.app(), &mut tx, started_at, 4)
        .await
        .unwrap();
    drop(tx);
    let half = shown(&world, &tenant).await["sweep"].clone();
    assert_eq!(
        (&half["examined"], &half["deleted"], &half["finished_at"]),
        (&json!(4), &json!(4), &json!(null))
    );
    assert_eq!(world.walk(&tenant.key, "/v1/sessions").await.len(), 6);
    release_job(&world, &tenant).await;
    throughline::jobs::tick(&world.nodes[1].app).await.unwrap();
    let whole = swept(&world, &tenant, started_at).await;
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
    let body = json!({"session_key": "k", "messages": [said("x")]});
    let keyed = world.session(&tenant.key, body).await.id();
    world.clock.advance(31 * DAY);
    // Said and not yet committed; and a key through which somebody is about to speak.
    let mut superuser = world.superuser().await;
    let mut open = superuser.begin().await.unwrap();
    let changed = sqlx::query(
        "with place as (
           update sessions set next_seq = next_seq + 1, last_active_at = $3, last_person_at = $3
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
    let sweep = shown(&world, &tenant).await["sweep"].clone();
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
    let body = json!({"session_key": "k", "messages": [said("x")]});
    let keyed = world.session(&tenant.key, body).await.id();
    world.clock.advance(31 * DAY);
    let started_at = begin(&world, 0, &tenant).await.unwrap();
    let mut tx = transaction(&world, 0, &tenant).await;
    retention::step(world.app(), &mut tx, started_at, 10)
        .await
        .unwrap();
    let body = json!([said("late")]);
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
async fn a_retention_that_is_lengthened_or_taken_away_stops_the_sweep() {
    let world = World::new().await;
    let tenant = tenant_by_hand(&world).await;
    conversations(&world, &tenant, 9).await;
    world.clock.advance(40 * DAY);
    let left = async || world.walk(&tenant.key, "/v1/sessions").await.len();
    let begun = async || begin(&world, 0, &tenant).await.unwrap();
    let step = async |started_at| step(&world, 0, &tenant, started_at, 2).await;
    let first = begun().await;
    assert_eq!(step(first).await, Progress::Going);
    // A shorter one is for the next sweep.
    keep_for(&world, &tenant, json!(20)).await;
    assert_eq!(step(first).await, Progress::Going);
    assert_eq!(left().await, 5);
    keep_for(&world, &tenant, json!(60)).await;
    assert_eq!(step(first).await, Progress::Overtaken);
    assert_eq!(left().await, 5);
    let ended = shown(&world, &tenant).await["sweep"].clone();
    assert!(ended["finished_at"].is_string(), "{ended}");
    let entries = sweep_entries(&world, &tenant).await;
    assert_eq!(entries[0]["detail"], json!({"examined": 4, "deleted": 4}));
    // The next one goes by the new setting, and says when it began.
    let second = begun().await;
    while step(second).await == Progress::Going {}
    let sweep = shown(&world, &tenant).await["sweep"].clone();
    assert_eq!(
        (&sweep["examined"], &sweep["deleted"]),
        (&json!(5), &json!(0))
    );
    keep_for(&world, &tenant, json!(30)).await;
    let third = begun().await;
    assert_eq!(step(third).await, Progress::Going);
    keep_for(&world, &tenant, json!(null)).await;
    assert_eq!(step(third).await, Progress::Overtaken);
    assert_eq!(begin(&world, 0, &tenant).await, None);
    assert_eq!(left().await, 3);
    // A sweep that stood still meanwhile is ended by whoever takes it up.
    keep_for(&world, &tenant, json!(30)).await;
    begun().await;
    keep_for(&world, &tenant, json!(null)).await;
    release_job(&world, &tenant).await;
    swept(&world, &tenant, third).await;
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
    assert_eq!(after, Progress::Overtaken);
    assert_eq!(world.walk(&tenant.key, "/v1/sessions").await.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn tenants_that_had_a_retention_before_there_were_sweeps_get_one() {
    let world = World::new().await;
    let (tenant, other) = (world.tenant("Acme").await, world.tenant("other").await);
    conversations(&world, &tenant, 2).await;
    world.clock.advance(31 * DAY);
    let mut superuser = world.superuser().await;
    let settings = r#"{"retention": {"conversations_days": 30}}"#;
    sqlx::query("update tenants set settings = settings || $2::jsonb where id = $1")
        .bind(tenant.uuid())
        .bind(settings)
        .execute(&mut superuser)
        .await
        .unwrap();
    let started = world.clock.now();
    let migration = include_str!("../../../migrations/20261116010600_plan_retention_sweeps.sql");
    for _ in 0..2 {
        sqlx::raw_sql(AssertSqlSafe(migration))
            .execute(&mut superuser)
            .await
            .unwrap();
    }
    let sweep = swept(&world, &tenant, started).await;
    assert_eq!(sweep["deleted"], 2);
    assert_eq!(shown(&world, &other).await["sweep"], json!(null));
}
