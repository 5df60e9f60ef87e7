//! Background work: due jobs run once, in their own tenant.

use std::time::Duration;

use chrono::TimeDelta;
use reqwest::Method;
use serde_json::json;
use throughline::dev::service_caller;
use throughline::ids::TenantId;
use throughline::jobs;
use throughline::store::Db;
use throughline::store::db::jobs::{DueJob, JobEnd, claim, insert, update_schedule};

use crate::support::servers::cluster::cluster;
use crate::support::{Fields, Reply, Tenant, World};

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
    let claims = (0..8).map(|_| throughline::store::db::jobs::claim(db, now, lease, 3, &[]));
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
        let caller = service_caller(tenant.id.parse().unwrap());
        let mut tx = caller.begin(db).await.unwrap();
        insert(&mut tx, "tested", at(second)).await.unwrap();
        tx.commit().await.unwrap();
    };
    let due = async |second: u64| -> Option<DueJob> {
        let claimed = claim(db, at(second), TimeDelta::seconds(60), 100, &[])
            .await
            .unwrap();
        claimed.into_iter().find(|job| job.kind == "tested")
    };
    plan(0).await;
    let job = due(0).await.unwrap();
    plan(1).await;
    assert!(due(2).await.is_none(), "its lease still lasts");
    update_schedule(db, &job, at(1000), JobEnd::Done)
        .await
        .unwrap();
    let job = due(2).await.expect("it was asked for while it ran");
    update_schedule(db, &job, at(1000), JobEnd::Done)
        .await
        .unwrap();
    assert!(due(999).await.is_none(), "nobody asked for it since");
    due(1000).await.expect("as it said itself");
    // That run never ends: the lease does, and what was asked meanwhile changes neither.
    plan(1001).await;
    assert!(
        due(9999).await.is_none(),
        "whatever the clock of a node says"
    );
    let expire = "update jobs set lease_until = now() where kind = 'tested'";
    // A node of this world looks for jobs too, and may be first.
    let again = async || {
        sqlx::query(expire)
            .execute(&mut world.superuser().await)
            .await
            .unwrap();
        due(1060).await.is_some()
    };
    crate::support::eventually("its lease ran out", Duration::from_secs(20), again).await;
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
           from conversations, generate_series(1, 3) n;
         insert into code_attempts (tenant_id, subject, failures, window_start)
         values ('{0}', 'any', 1, now() - interval '2 days')",
        poisoned.uuid(),
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
            .bind(tenant.uuid())
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
        .bind(poisoned.uuid())
        .fetch_one(&mut world.superuser().await)
        .await
        .unwrap()
    };
    crate::support::eventually("it is failed", Duration::from_secs(10), async || {
        seen().await == ("failed".to_owned(), Some("internal".to_owned()), true)
    })
    .await;
    assert_eq!(left(&poisoned).await, 3);
    let attempts: i64 = sqlx::query_scalar("select count(*) from code_attempts")
        .fetch_one(&mut superuser)
        .await
        .unwrap();
    assert_eq!(attempts, 0, "another kind of the same tenant");
    let mend = "drop trigger poison on events; update jobs set run_at = now() where kind = 'expire_events'";
    sqlx::raw_sql(mend).execute(&mut superuser).await.unwrap();
    crate::support::eventually("it is done", Duration::from_secs(10), async || {
        left(&poisoned).await == 0 && seen().await.0 == "planned"
    })
    .await;
}

/// Makes a job of the tenant due, once the node's own loop does not have it.
async fn make_due(world: &World, tenant: &Tenant, kind: &str) {
    crate::support::eventually("it is due", Duration::from_secs(10), async || {
        let due = "update jobs set run_at = now() - interval '1 day'
                    where tenant_id = $1 and kind = $2 and lease_until is null";
        let done = sqlx::query(due)
            .bind(tenant.uuid())
            .bind(kind)
            .execute(&mut world.superuser().await)
            .await;
        done.unwrap().rows_affected() == 1
    })
    .await;
}

/// A database that has no time for many rows at once.
const SLOW: &str = "
  create function be_slow() returns trigger language plpgsql as $$
    begin
      if (select count(*) from gone) > 100 then
        raise 'too slow' using errcode = 'query_canceled';
      end if;
      return null;
    end $$;
  create trigger slow after delete on events referencing old table as gone
    for each statement execute function be_slow();
  create trigger slow after delete on code_attempts referencing old table as gone
    for each statement execute function be_slow();
  insert into events (tenant_id, conversation_id, seq, turn_id, attempt, kind, session_id, created_at)
  select tenant_id, id, n, gen_random_uuid(), 1, 'x', tip_session_id, now() - interval '1 second'
    from conversations, generate_series(1, 1500) n;
  insert into code_attempts (tenant_id, subject, failures, window_start)
  select tenant_id, n::text, 1, now() - interval '2 days'
    from conversations, generate_series(1, 1500) n";

#[tokio::test(flavor = "multi_thread")]
async fn slow_batches_become_smaller() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let session = world.session(&tenant.key, json!({})).await;
    let mut superuser = world.superuser().await;
    sqlx::raw_sql(SLOW).execute(&mut superuser).await.unwrap();
    let path = format!("/v1/sessions/{}", session.text("id"));
    world.delete(&tenant.key, &path).await.expect(204);
    make_due(&world, &tenant, "expire_events").await;
    let left = "select (select count(*) from events) + (select count(*) from code_attempts)
                     + (select count(*) from conversations)";
    crate::support::eventually("nothing is left", Duration::from_secs(20), async || {
        let left: i64 = sqlx::query_scalar(left)
            .fetch_one(&mut world.superuser().await)
            .await
            .unwrap();
        left == 0
    })
    .await;
}

/// The events of a turn that has not ended stay, however old they are.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_old_and_still_needed_does_not_keep_a_job_busy() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    world.session(&tenant.key, json!({})).await;
    let plant = "
      insert into turns (tenant_id, id, conversation_id, turn_no, state, agent, principal, request_hash, input, session_info,
                         created_at, lease_until)
      select tenant_id, id, id, 1, 'waiting_client', 'main', 'any', '', '{}', '{}', now(), now() + interval '1 hour'
        from conversations;
      insert into events (tenant_id, conversation_id, seq, turn_id, attempt, kind, session_id, created_at)
      select tenant_id, id, 1, id, 1, 'x', tip_session_id, now() - interval '2 days'
        from conversations";
    let mut superuser = world.superuser().await;
    sqlx::raw_sql(plant).execute(&mut superuser).await.unwrap();
    make_due(&world, &tenant, "expire_events").await;
    crate::support::eventually("it waits", Duration::from_secs(10), async || {
        let waits: bool = sqlx::query_scalar(
            "select lease_until is null and run_at > now() + interval '5 minutes' and run_at < 'infinity'
               from jobs
              where tenant_id = $1 and kind = 'expire_events'",
        )
        .bind(tenant.uuid())
        .fetch_one(&mut world.superuser().await)
        .await
        .unwrap();
        waits
    })
    .await;
    let kept: i64 = sqlx::query_scalar("select count(*) from events")
        .fetch_one(&mut superuser)
        .await
        .unwrap();
    assert_eq!(kept, 1);
}

/// A request can end after its tenant has.
#[tokio::test(flavor = "multi_thread")]
async fn answers_of_tenants_that_are_gone_are_removed() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let mut superuser = world.superuser().await;
    let plant = format!(
        "insert into idempotency (tenant_id, principal, route, key, request_hash, created_at)
         select t, 'key_1', 'r', n::text, sha256(''), now()
           from unnest(array[gen_random_uuid(), '{}', gen_random_uuid()]) t, generate_series(1, 1500) n",
        tenant.uuid(),
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(plant))
        .execute(&mut superuser)
        .await
        .unwrap();
    let operator = Tenant {
        id: throughline::ids::TenantId::OPERATOR.to_string(),
        key: String::new(),
    };
    make_due(&world, &operator, "expire_answers").await;
    crate::support::eventually("they are gone", Duration::from_secs(10), async || {
        let left: Vec<sqlx::types::Uuid> =
            sqlx::query_scalar("select tenant_id from idempotency group by tenant_id")
                .fetch_all(&mut world.superuser().await)
                .await
                .unwrap();
        left == [tenant.uuid()]
    })
    .await;
    let (kept, _) = stored_answers(&world).await;
    assert_eq!(kept, 1500);
}

/// A tenant's job that waits for a lock takes the time of no other tenant.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_job_does_not_keep_another_tenants_waiting() {
    let world = World::new().await;
    let slow = world.tenant("Slow").await;
    let other = world.tenant("Other").await;
    let plant = async |connection: &mut sqlx::PgConnection, tenant: &Tenant| {
        let sql = "insert into code_attempts (tenant_id, subject, failures, window_start)
                   values ($1, 'any', 1, now() - interval '2 days')";
        sqlx::query(sql)
            .bind(tenant.uuid())
            .execute(connection)
            .await
            .unwrap();
    };
    let mut superuser = world.superuser().await;
    // Planned runs are over by then.
    make_due(&world, &slow, "expire_events").await;
    make_due(&world, &other, "expire_events").await;
    crate::support::eventually("both ran", Duration::from_secs(10), async || {
        let open: i64 = sqlx::query_scalar(
            "select count(*) from jobs where lease_until is not null or run_at <= now()",
        )
        .fetch_one(&mut world.superuser().await)
        .await
        .unwrap();
        open == 0
    })
    .await;
    plant(&mut superuser, &slow).await;
    let mut held = sqlx::Connection::begin(&mut superuser).await.unwrap();
    sqlx::query("select 1 from code_attempts where tenant_id = $1 for update")
        .bind(slow.uuid())
        .execute(&mut *held)
        .await
        .unwrap();
    make_due(&world, &slow, "expire_events").await;
    let waits = async || -> bool {
        sqlx::query_scalar(
            "select exists (select 1 from pg_stat_activity
                             where datname = current_database() and wait_event_type = 'Lock')",
        )
        .fetch_one(&mut world.superuser().await)
        .await
        .unwrap()
    };
    crate::support::eventually("the first waits", Duration::from_secs(10), waits).await;
    plant(&mut world.superuser().await, &other).await;
    make_due(&world, &other, "expire_events").await;
    crate::support::eventually("the other ran", Duration::from_secs(4), async || {
        let left: i64 =
            sqlx::query_scalar("select count(*) from code_attempts where tenant_id = $1")
                .bind(other.uuid())
                .fetch_one(&mut world.superuser().await)
                .await
                .unwrap();
        left == 0
    })
    .await;
    assert!(waits().await, "the first still does");
    held.rollback().await.unwrap();
}

/// Without a node, whose loop would take them.
#[tokio::test(flavor = "multi_thread")]
async fn a_job_whose_node_died_is_claimed_in_its_turn() {
    let database = cluster().new_database().await;
    let plant = "
      delete from jobs;
      insert into tenants (id, name, state, created_at, updated_at)
      select case n when 4 then '00000000-0000-0000-0000-000000000001' else md5(n::text)::uuid end, n::text,
             'active', now(), now()
        from generate_series(1, 4) n;
      insert into jobs (id, tenant_id, kind, run_at, lease_until)
      values (gen_random_uuid(), '00000000-0000-0000-0000-000000000001', 'busy', now() - interval '1 day', null),
             (gen_random_uuid(), md5('1')::uuid, 'newer', now() - interval '1 minute', null),
             (gen_random_uuid(), md5('2')::uuid, 'lost', 'infinity', now() - interval '2 minutes'),
             (gen_random_uuid(), md5('3')::uuid, 'older', now() - interval '3 minutes', null),
             (gen_random_uuid(), md5('3')::uuid, 'held', 'infinity', now() + interval '1 minute')";
    sqlx::raw_sql(plant)
        .execute(&mut cluster().superuser(&database).await)
        .await
        .unwrap();
    let url = cluster().service_url(&database);
    let db = Db::connect(&url.into(), 2).await.unwrap();
    // A tenant that has enough of them running.
    let busy = [TenantId::from_uuid(sqlx::types::Uuid::from_u128(1))];
    let mut order = Vec::new();
    let now = chrono::Utc::now();
    while let Some(job) = claim(&db, now, TimeDelta::minutes(1), 1, &busy)
        .await
        .unwrap()
        .pop()
    {
        order.push(job.kind);
    }
    assert_eq!(order, ["older", "lost", "newer"]);
}
