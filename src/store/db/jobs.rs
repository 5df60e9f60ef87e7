//! Due work of all tenants: global and without content, so that a loop can find a tenant to enter.

use chrono::{DateTime, TimeDelta, Utc};

use crate::error::Result;
use crate::ids::{JobId, TenantId};
use crate::store::{Db, TenantTx};

#[derive(Debug, Clone, sqlx::FromRow)]
pub struct DueJob {
    pub id: JobId,
    pub tenant_id: TenantId,
    pub kind: String,
    /// The lease this claim was given: only its holder may finish the job.
    pub lease_until: DateTime<Utc>,
    pub attempts: i32,
}

/// Asks for `kind` to run in the tenant of `tx` at `run_at` or earlier. One that is planned for later is
/// brought forward.
pub async fn insert(tx: &mut TenantTx, kind: &str, run_at: DateTime<Utc>) -> Result<()> {
    sqlx::query(
        "insert into jobs (id, tenant_id, kind, run_at)
         values ($1, $2, $3, $4)
             on conflict on constraint jobs_once do update
            set run_at = excluded.run_at
          where jobs.run_at > excluded.run_at",
    )
    .bind(JobId::generate())
    .bind(tx.tenant_id())
    .bind(kind)
    .bind(run_at)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Leases up to `limit` jobs that are due at `now`; two nodes never get the same one while its lease lasts, which
/// is by the clock of the database. A leased job is due again when its lease ends. If it has a time to run by
/// then, that was asked while it ran. Those of the tenants in `busy` are left for later.
pub async fn claim(
    db: &Db,
    now: DateTime<Utc>,
    lease: TimeDelta,
    limit: i64,
    busy: &[TenantId],
) -> Result<Vec<DueJob>> {
    Ok(sqlx::query_as(
        // Materialized: a subquery could be run again for each row that it is joined with, and lease more.
        // Each part is read in the order of its index. A job whose node died has no time to run but its lease's end.
        "with planned as materialized (
           select id, run_at as due_at
             from jobs
            where run_at <= $1
              and lease_until is null
              and tenant_id <> all ($4)
            order by run_at
            limit $3
              for update skip locked
         ), lost as materialized (
           select id, lease_until as due_at
             from jobs
            where lease_until <= now()
              and tenant_id <> all ($4)
            order by lease_until
            limit $3
              for update skip locked
         ), due as materialized (
           select id
             from (select id, due_at from planned union all select id, due_at from lost) o
            order by due_at
            limit $3
         )
         update jobs j
            set run_at = 'infinity', lease_until = now() + $2, attempts = attempts + 1
           from due
          where j.id = due.id
      returning j.id, j.tenant_id, j.kind, j.lease_until, j.attempts",
    )
    .bind(now)
    .bind(lease)
    .bind(limit)
    .bind(busy)
    .fetch_all(db.connection().await?.limited())
    .await?)
}

/// How a claimed job ended.
#[derive(Debug, Clone, Copy)]
pub enum Ended<'a> {
    Done,
    /// With the code of what went wrong; `for_good` if operators should look at it.
    Failed {
        error: &'a str,
        for_good: bool,
    },
}

/// Plans the next run of a claimed job, if the claim still holds. What was asked while it ran stands: the job may
/// have looked before there was something to do. That does not hold after a failure, which waits for its time.
pub async fn reschedule(
    db: &Db,
    job: &DueJob,
    run_at: DateTime<Utc>,
    ended: Ended<'_>,
) -> Result<()> {
    let (error, for_good) = match ended {
        Ended::Done => (None, false),
        Ended::Failed { error, for_good } => (Some(error), for_good),
    };
    sqlx::query(
        "update jobs
            set run_at = case when $5::text is null then least($4, nullif(run_at, 'infinity')) else $4 end,
                lease_until = null,
                attempts = case when $5 is null then 0 else attempts end,
                state = case when $6 then 'failed' when $5 is null then 'planned' else state end,
                last_error = $5,
                failed_at = case when $5 is not null then now() end
          where tenant_id = $1
            and id = $2
            and lease_until = $3",
    )
    .bind(job.tenant_id)
    .bind(job.id)
    .bind(job.lease_until)
    .bind(run_at)
    .bind(error)
    .bind(for_good)
    .execute(db.connection().await?.limited())
    .await?;
    Ok(())
}
