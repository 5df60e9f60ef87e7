//! The connections to Postgres: what one tenant's transaction leaves behind, whatever became of it, never
//! reaches another's, and there are never more connections than were allowed.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use throughline::clock::Clock;
use throughline::dev::service_caller;
use throughline::error::{Code, Result};
use throughline::ids::{TenantId, TurnId};
use throughline::store::Db;
use throughline::store::db::jobs;
use throughline::store::tenant::{agents, tenants};
use throughline::store::turn::turns;

use crate::support::servers::cluster::cluster;
use crate::support::{World, eventually};

/// Two tenants with an agent each, named after them, and nobody connected to their database.
struct Pair {
    world: World,
    tenants: [TenantId; 2],
}

impl Pair {
    async fn new() -> Self {
        let mut world = World::new().await;
        let ids = [
            world.tenant("Acme").await.id,
            world.tenant("Globex").await.id,
        ];
        for node in world.nodes.drain(..) {
            node.stop().await;
        }
        let own = "update agents set name = tenant_id::text";
        execute(&mut world.superuser().await, own).await;
        Self {
            world,
            tenants: ids.map(|id| id.parse().unwrap()),
        }
    }

    async fn connect(&self, connections: u32) -> Db {
        let url = cluster().service_url(&self.world.database);
        Db::connect(&url.into(), connections).await.unwrap()
    }

    /// Connections of the service, busy or not.
    async fn connections(&self) -> i64 {
        sqlx::query_scalar(
            "select count(*) from pg_stat_activity
              where datname = current_database() and usename = 'throughline'",
        )
        .fetch_one(&mut self.world.superuser().await)
        .await
        .unwrap()
    }

    async fn backends(&self) -> Vec<i32> {
        sqlx::query_scalar(
            "select pid from pg_stat_activity where datname = $1 and application_name = 'throughline'",
        )
        .bind(&self.world.database)
        .fetch_all(&mut cluster().superuser("postgres").await)
        .await
        .unwrap()
    }

    /// As a restart of Postgres does.
    async fn end_connections(&self) {
        let end = "select pg_terminate_backend(pid, 5000) from pg_stat_activity
                    where datname = current_database() and usename = 'throughline'";
        execute(&mut self.world.superuser().await, end).await;
    }
}

async fn execute(connection: &mut PgConnection, sql: &str) {
    let sql = AssertSqlSafe(sql.to_owned());
    sqlx::raw_sql(sql).execute(connection).await.unwrap();
}

/// Reads in a transaction of `tenant`, which is not committed, and answers whose rows these were.
async fn seen_by(db: &Db, tenant: TenantId) -> Result<Vec<String>> {
    let mut tx = service_caller(tenant).begin(db).await?;
    let agents = agents::list(&mut tx).await?;
    Ok(agents.into_iter().map(|agent| agent.name).collect())
}

/// Plans a job, and commits if asked to.
async fn plan(db: &Db, tenant: TenantId, kind: &str, commit: bool) -> Result<()> {
    let mut tx = service_caller(tenant).begin(db).await?;
    jobs::insert(&mut tx, kind, Clock::system().now()).await?;
    if commit { tx.commit().await } else { Ok(()) }
}

/// Drops `future` when it has waited so many times; `None` then.
async fn dropped_after<T>(waits: usize, future: impl Future<Output = T>) -> Option<T> {
    let mut future = pin!(future);
    let mut left = waits;
    poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(done) => Poll::Ready(Some(done)),
        Poll::Pending if left <= 1 => Poll::Ready(None),
        Poll::Pending => {
            left -= 1;
            Poll::Pending
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_committed_is_undone_before_its_connection_is_used_again() {
    let pair = Pair::new().await;
    let db = pair.connect(1).await;
    let [acme, globex] = pair.tenants;
    for round in 0..20 {
        plan(&db, acme, &format!("dropped-{round}"), false)
            .await
            .unwrap();
        plan(&db, globex, &format!("kept-{round}"), true)
            .await
            .unwrap();
        assert_eq!(pair.connections().await, 1);
    }
    let kinds: Vec<String> =
        sqlx::query_scalar("select kind from jobs where kind ~ '^(dropped|kept)-'")
            .fetch_all(&mut pair.world.superuser().await)
            .await
            .unwrap();
    assert_eq!(kinds.len(), 20);
    assert!(
        kinds.iter().all(|kind| kind.starts_with("kept-")),
        "{kinds:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_dropped_at_any_point_never_shows_in_the_next() {
    let pair = Pair::new().await;
    let db = pair.connect(1).await;
    let [acme, globex] = pair.tenants;
    let own = vec![globex.as_uuid().to_string()];
    let mut dropped = 0;
    // Where it waits differs from run to run: an answer is often there before it is asked for.
    for round in 0..100 {
        let waits = 1 + round % 8;
        let commit = round % 3 > 0;
        let kind = format!("any-{round}");
        let both = async {
            seen_by(&db, acme).await?;
            plan(&db, acme, &kind, commit).await
        };
        match dropped_after(waits, both).await {
            Some(done) => done.unwrap(),
            None => dropped += 1,
        }
        assert_eq!(seen_by(&db, globex).await.unwrap(), own);
        let open = pair.connections().await;
        assert!(open <= 2, "one, and one that is just ending: {open}");
    }
    assert!(dropped > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_statement_that_nobody_waits_for_any_more_is_ended_before_the_next_begins() {
    let pair = Pair::new().await;
    let db = pair.connect(1).await;
    let [acme, globex] = pair.tenants;
    let mut superuser = pair.world.superuser().await;
    let mut holder = superuser.begin().await.unwrap();
    execute(&mut holder, "lock table agents in access exclusive mode").await;
    let reader = tokio::spawn({
        let db = db.clone();
        async move { seen_by(&db, acme).await }
    });
    pair.world.waiting(1).await;
    reader.abort();
    assert!(reader.await.unwrap_err().is_cancelled());
    let next = tokio::spawn({
        let db = db.clone();
        async move { seen_by(&db, globex).await }
    });
    holder.rollback().await.unwrap();
    assert_eq!(next.await.unwrap().unwrap(), [globex.as_uuid().to_string()]);
    assert_eq!(pair.connections().await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_tenant_is_left_on_a_connection_that_comes_back() {
    let pair = Pair::new().await;
    let db = pair.connect(1).await;
    let [acme, _] = pair.tenants;
    // The one function that is called outside a transaction and can be made to tell.
    let tell =
        "create or replace function erase_tenant(p_tenant_id uuid, p_limit integer) returns integer
                language sql as $$
                  select length(current_setting('app.tenant_id', true))
                       + (current_setting('idle_in_transaction_session_timeout') <> '0')::integer
                $$";
    execute(&mut pair.world.superuser().await, tell).await;
    for commit in [true, false] {
        plan(&db, acme, "any", commit).await.unwrap();
        assert_eq!(tenants::erase(&db, acme, 1).await.unwrap(), 0);
    }
    assert_eq!(pair.connections().await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_waits_too_long_for_a_connection_is_asked_to_retry() {
    let pair = Pair::new().await;
    let db = pair.connect(1).await;
    let [acme, globex] = pair.tenants;
    let held = service_caller(acme).begin(&db).await.unwrap();
    let error = seen_by(&db, globex).await.unwrap_err();
    assert_eq!(error.code, Code::Unavailable);
    assert_eq!(db.ping().await.unwrap_err().code, Code::Unavailable);
    drop(held);
    assert_eq!(seen_by(&db, globex).await.unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_notices_that_idle_connections_were_ended() {
    let pair = Pair::new().await;
    let db = pair.connect(4).await;
    let [acme, globex] = pair.tenants;
    for _ in 0..3 {
        let many = (0..16).map(|number| plan(&db, [acme, globex][number % 2], "any", true));
        futures_util::future::try_join_all(many).await.unwrap();
        let most = pair.connections().await;
        assert!(most <= 4, "{most} connections");
        pair.end_connections().await;
        db.ping().await.unwrap();
        pair.end_connections().await;
        assert_eq!(seen_by(&db, globex).await.unwrap().len(), 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_whose_connection_ended_fails_and_the_next_one_does_not() {
    let pair = Pair::new().await;
    let db = pair.connect(1).await;
    let [acme, globex] = pair.tenants;
    let mut tx = service_caller(acme).begin(&db).await.unwrap();
    pair.end_connections().await;
    let error = agents::list(&mut tx).await.unwrap_err();
    assert_eq!(error.code, Code::Unavailable);
    drop(tx);
    assert_eq!(seen_by(&db, globex).await.unwrap().len(), 1);
}

/// Postgres answers such a commit with a rollback, and no error.
#[tokio::test(flavor = "multi_thread")]
async fn the_commit_of_a_transaction_that_failed_is_a_failure() {
    let pair = Pair::new().await;
    let db = pair.connect(1).await;
    let caller = service_caller(pair.tenants[0]);
    let mut tx = caller.begin(&db).await.unwrap();
    let now = Clock::system().now();
    jobs::insert(&mut tx, "kept", now).await.unwrap();
    jobs::insert(&mut tx, "no\0text", now).await.unwrap_err();
    tx.commit().await.unwrap_err();
    plan(&db, pair.tenants[0], "next", true).await.unwrap();
}

/// A server that stalls must not collect the backends of clients that stopped waiting.
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_whose_begin_takes_too_long_is_kept() {
    let pair = Pair::new().await;
    let db = pair.connect(1).await;
    assert_eq!(seen_by(&db, pair.tenants[0]).await.unwrap().len(), 1);
    let before = pair.backends().await;
    assert_eq!(before.len(), 1);
    let stopped = Pid::from_raw(before[0]);
    kill(stopped, Signal::SIGSTOP).unwrap();
    let late = seen_by(&db, pair.tenants[0]).await;
    kill(stopped, Signal::SIGCONT).unwrap();
    assert_eq!(late.unwrap_err().code, Code::Unavailable);
    assert_eq!(seen_by(&db, pair.tenants[0]).await.unwrap().len(), 1);
    let backends = pair.backends().await;
    assert!(backends.contains(&before[0]), "{before:?} {backends:?}");
}

/// A host that vanished says nothing more, not even that the connection is gone.
#[tokio::test(flavor = "multi_thread")]
async fn a_statement_ends_although_postgres_says_nothing_more() {
    let pair = Pair::new().await;
    let db = pair.connect(1).await;
    let mut tx = service_caller(pair.tenants[0]).begin(&db).await.unwrap();
    let stopped = Pid::from_raw(pair.backends().await[0]);
    kill(stopped, Signal::SIGSTOP).unwrap();
    let asked = tokio::time::timeout(Duration::from_secs(40), agents::list(&mut tx)).await;
    kill(stopped, Signal::SIGCONT).unwrap();
    assert_eq!(asked.unwrap().unwrap_err().code, Code::Unavailable);
    drop(tx);
    assert_eq!(seen_by(&db, pair.tenants[0]).await.unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_pool_keeps_no_connection_and_gives_none() {
    let pair = Pair::new().await;
    let db = pair.connect(2).await;
    let [acme, globex] = pair.tenants;
    let held = service_caller(acme).begin(&db).await.unwrap();
    let closing = tokio::spawn({
        let db = db.clone();
        async move { db.close().await }
    });
    held.commit().await.unwrap();
    closing.await.unwrap();
    let error = seen_by(&db, globex).await.unwrap_err();
    assert_eq!(error.code, Code::Unavailable);
    eventually("all are gone", Duration::from_secs(4), async || {
        pair.connections().await == 0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plan_for_few_rows_is_replaced_for_many() {
    let pair = Pair::new().await;
    let db = pair.connect(1).await;
    let [acme, _] = pair.tenants;
    let mut superuser = pair.world.superuser().await;
    // The one function that is called outside a transaction: tells how the look-up of a turn is done there.
    let tell =
        "create or replace function erase_tenant(p_tenant_id uuid, p_limit integer) returns integer
                language plpgsql as $$
                declare
                  look_up text := (select name from pg_prepared_statements where statement like '%from turns%');
                  line text;
                begin
                  for line in execute format('explain execute %I (%L, %L)', look_up, p_tenant_id, p_tenant_id) loop
                    if line like '%turns_pkey%' then
                      return 1;
                    end if;
                  end loop;
                  return 0;
                end
                $$";
    execute(&mut superuser, tell).await;
    let is_found_by_key = async || {
        let mut tx = service_caller(acme).begin(&db).await.unwrap();
        let found = turns::find(&mut tx, TurnId::generate()).await.unwrap();
        assert!(found.is_none());
        tx.commit().await.unwrap();
        tenants::erase(&db, acme, 1).await.unwrap() == 1
    };
    // More often than Postgres wants before it keeps a plan.
    for _ in 0..10 {
        assert!(!is_found_by_key().await, "an empty table is not read so");
    }
    let fill = format!(
        "set session_replication_role = replica;
         insert into turns (tenant_id, id, conversation_id, turn_no, state, agent, principal, request_hash, input,
                            session_info, created_at, ended_at)
         select '{}', gen_random_uuid(), gen_random_uuid(), 1, 'completed', 'main', 'any', '', '{{}}', '{{}}',
                now(), now()
           from generate_series(1, 20000)",
        acme.as_uuid()
    );
    execute(&mut superuser, &fill).await;
    eventually("found by its key", Duration::from_secs(5), is_found_by_key).await;
}
