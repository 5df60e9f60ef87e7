//! Background work: due jobs run once, in their own tenant.

use std::time::Duration;

use reqwest::Method;
use serde_json::json;

use crate::support::{Reply, World};
use throughline::auth::JobCaller;
use throughline::jobs;
use throughline::store::jobs::{DueJob, claim, insert, reschedule};

async fn stored_answers(world: &World) -> (i64, i64) {
    sqlx::query_as("select count(*), count(secrets_enc) from idempotency")
        .fetch_one(&mut world.superuser().await)
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn stored_secrets_go_after_ten_minutes_and_answers_after_a_day() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let request = world
        .request(Method::POST, "/v1/api-keys", &tenant.key)
        .header("idempotency-key", "k")
        .json(&json!({"name": "bot", "scopes": ["chat"]}));
    Reply::of(request).await.expect(201);
    assert_eq!(stored_answers(&world).await, (1, 1));
    for (later, left) in [(601, (1, 0)), (24 * 3600, (0, 0))] {
        world.clock.advance(Duration::from_secs(later));
        crate::support::eventually("the job has run", Duration::from_secs(5), async || {
            jobs::tick(world.app()).await.unwrap();
            stored_answers(&world).await == left
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_nodes_asking_at_once_never_get_the_same_job() {
    let world = World::new().await;
    for n in 0..10 {
        world.tenant(&format!("tenant {n}")).await;
    }
    let db = &world.app().db;
    let now = world.clock.now() + Duration::from_secs(3600);
    let lease = now + Duration::from_secs(60);
    let claims = (0..8).map(|_| throughline::store::jobs::claim(db, now, lease, 3));
    let claimed = futures_util::future::try_join_all(claims).await.unwrap();
    let mut ids: Vec<String> = claimed
        .iter()
        .flatten()
        .map(|job| job.id.to_string())
        .collect();
    ids.sort();
    let all = ids.len();
    ids.dedup();
    // Ten tenants', and the operator's unless the node's own loop just has it.
    assert_eq!(all, ids.len());
    assert!(all >= 10, "{all}");
}

/// All in the future, where the node's own loop finds nothing due.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_asked_for_while_a_job_runs_is_not_forgotten() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let db = &world.app().db;
    let start = world.clock.now() + Duration::from_secs(3600);
    let at = |second: u64| start + Duration::from_secs(second);
    let plan = async |second: u64| {
        let caller = JobCaller::of_served_tenant(tenant.id.parse().unwrap());
        let mut tx = caller.begin(db).await.unwrap();
        insert(&mut tx, "tested", at(second)).await.unwrap();
        tx.commit().await.unwrap();
    };
    let due = async |second: u64| -> Option<DueJob> {
        let claimed = claim(db, at(second), at(second + 60), 100).await.unwrap();
        claimed.into_iter().find(|job| job.kind == "tested")
    };
    plan(0).await;
    let job = due(0).await.unwrap();
    plan(1).await;
    assert!(due(2).await.is_none(), "its lease still lasts");
    reschedule(db, &job, at(1000), false).await.unwrap();
    let job = due(2).await.expect("it was asked for while it ran");
    reschedule(db, &job, at(1000), false).await.unwrap();
    assert!(due(999).await.is_none(), "nobody asked for it since");
    due(1000).await.expect("as it said itself");
    // That run never ends: the lease does, and what was asked meanwhile changes neither.
    plan(1001).await;
    assert!(due(1059).await.is_none());
    due(1060).await.expect("its lease ran out");
}
