//! Background work: due jobs run once, in their own tenant.

use std::time::Duration;

use reqwest::Method;
use serde_json::json;

use crate::support::{Reply, World};
use throughline::jobs;

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
