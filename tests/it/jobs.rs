//! Background work: due jobs run once, in their own tenant.

use std::time::Duration;

use chrono::TimeDelta;
use reqwest::Method;
use serde_json::json;

use crate::support::{Reply, Tenant, World};
use crate::tenancy::uuid_of;
use throughline::auth::JobCaller;
use throughline::jobs;
use throughline::store::jobs::{DueJob, Ended, claim, insert, reschedule};

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
    let lease = TimeDelta::seconds(60);
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
        let claimed = claim(db, at(second), TimeDelta::seconds(60), 100)
            .await
            .unwrap();
        claimed.into_iter().find(|job| job.kind == "tested")
    };
    plan(0).await;
    let job = due(0).await.unwrap();
    plan(1).await;
    assert!(due(2).await.is_none(), "its lease still lasts");
    reschedule(db, &job, at(1000), Ended::Done).await.unwrap();
    let job = due(2).await.expect("it was asked for while it ran");
    reschedule(db, &job, at(1000), Ended::Done).await.unwrap();
    assert!(due(999).await.is_none(), "nobody asked for it since");
    due(1000).await.expect("as it said itself");
    // That run never ends: the lease does, and what was asked meanwhile changes neither.
    plan(1001).await;
    assert!(
        due(9999).await.is_none(),
        "whatever the clock of a node says"
    );
    let expire = "update jobs set lease_until = now() where kind = 'tested'";
    sqlx::query(expire)
        .execute(&mut world.superuser().await)
        .await
        .unwrap();
    due(1060).await.expect("its lease ran out");
}

/// A tenant's job that fails for ever, and one that hangs, are tried again later, are seen, and hold up nobody.
#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_fails_for_ever_is_seen_and_holds_up_no_other() {
    let world = World::new().await;
    let poisoned = world.tenant("Poisoned").await;
    let other = world.tenant("Other").await;
    for tenant in [&poisoned, &other] {
        world.session(&tenant.key, json!({})).await;
    }
    let mut superuser = world.superuser().await;
    let sql = format!(
        "create function fail() returns trigger language plpgsql as $$ begin raise 'poison'; end $$;
         create trigger poison before delete on events for each row when (old.kind = 'poison')
           execute function fail();
         insert into events (tenant_id, conversation_id, seq, turn_id, attempt, kind, session_id, created_at)
         select tenant_id, id, n, gen_random_uuid(), 1, case when tenant_id = '{0}' then 'poison' else 'x' end,
                tip_session_id, now() - interval '2 days'
           from conversations, generate_series(1, 3) n",
        uuid_of(&poisoned),
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(sql))
        .execute(&mut superuser)
        .await
        .unwrap();
    // Once the node's own loop has none of them.
    let due = "update jobs set run_at = now() - interval '1 day', attempts = 9
                where kind = 'expire_events' and lease_until is null";
    crate::support::eventually("they are due", Duration::from_secs(10), async || {
        let done = sqlx::query(due).execute(&mut world.superuser().await).await;
        done.unwrap().rows_affected() == 2
    })
    .await;
    let left = async |tenant: &Tenant| -> i64 {
        sqlx::query_scalar("select count(*) from events where tenant_id = $1")
            .bind(uuid_of(tenant))
            .fetch_one(&mut world.superuser().await)
            .await
            .unwrap()
    };
    crate::support::eventually("the other's ran", Duration::from_secs(10), async || {
        left(&other).await == 0
    })
    .await;
    let seen = async || -> (String, Option<String>, bool) {
        sqlx::query_as(
            "select state, last_error, run_at > now() + interval '10 minutes'
               from jobs
              where kind = 'expire_events' and tenant_id = $1",
        )
        .bind(uuid_of(&poisoned))
        .fetch_one(&mut world.superuser().await)
        .await
        .unwrap()
    };
    crate::support::eventually("it is failed", Duration::from_secs(10), async || {
        seen().await == ("failed".to_owned(), Some("internal".to_owned()), true)
    })
    .await;
    assert_eq!(left(&poisoned).await, 3);
    let mend = "drop trigger poison on events; update jobs set run_at = now() where kind = 'expire_events'";
    sqlx::raw_sql(mend).execute(&mut superuser).await.unwrap();
    crate::support::eventually("it is done", Duration::from_secs(10), async || {
        left(&poisoned).await == 0 && seen().await.0 == "planned"
    })
    .await;
}
