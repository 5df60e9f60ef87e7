//! Retention: what is old goes, what is young or in use stays, once in the cluster, whatever happens in
//! the middle of a sweep.

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde_json::{Value, json};
use sqlx::AssertSqlSafe;

use crate::support::conversations::{assistant_message, user_message};
use crate::support::data::retention::{
    DAY, conversation, conversations, finished_sweep, keep_for, retention_of, status, sweep_entries,
};
use crate::support::people::sign_in;
use crate::support::{Fields, World, eventually};

#[tokio::test(flavor = "multi_thread")]
async fn old_conversations_go_and_young_ones_stay() {
    let world = World::new().await;
    let (tenant, other) = (world.tenant("Acme").await, world.tenant("other").await);
    let untouched = conversation(&world, &other).await;
    let body = json!({"id": "old", "session_key": "k", "messages": [user_message("forget me")]});
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
        .append(
            &tenant.key,
            &revived,
            json!([assistant_message("still here")]),
        )
        .await
        .expect(201);
    let body = json!({"session_key": "young", "messages": [user_message("x")]});
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
    let sweep = finished_sweep(&world, &tenant, started).await;
    assert_eq!(
        (&sweep["examined"], &sweep["deleted"]),
        (&json!(7), &json!(4))
    );
    for id in ["old", &chained, &child, &pinned, &empty] {
        assert_eq!(status(&world, &tenant, id).await, 404, "{id}");
        let late = world
            .append(&tenant.key, id, json!([user_message("late")]))
            .await;
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
        .post(&tenant.key, path, json!({"messages": [user_message("hi")]}))
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
    finished_sweep(&world, &tenant, started).await;
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
    let sweep = finished_sweep(&world, &tenant, started).await;
    assert_eq!(
        (&sweep["examined"], &sweep["deleted"]),
        (&json!(2), &json!(0))
    );
    let started = world.clock.now();
    world.clock.advance(Duration::from_secs(3601));
    let sweep = finished_sweep(&world, &tenant, started).await;
    assert_eq!(sweep["examined"], 2);
    assert_eq!(sweep_entries(&world, &tenant).await.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_changes_nothing_and_counts_what_the_sweep_then_deletes() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let body = json!({"messages": [user_message("1"), assistant_message("2"), user_message("3")]});
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
    assert_eq!(retention_of(&world, &tenant).await, nothing);
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
    assert_eq!(retention_of(&world, &tenant).await, nothing);
    assert_eq!(world.walk(&tenant.key, "/v1/sessions").await, before);
    let started = world.clock.now();
    keep_for(&world, &tenant, json!(15)).await;
    let sweep = finished_sweep(&world, &tenant, started).await;
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
    let ada = sign_in(&world, &tenant, "ada").await;
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
    let sweep = finished_sweep(&world, &tenant, started).await;
    assert_eq!(sweep["deleted"], 2);
    assert_eq!(retention_of(&world, &other).await["sweep"], json!(null));
}
