//! Planned jobs of all tenants: a global table without content, so that a loop can find a tenant to enter.

use chrono::{DateTime, TimeDelta, Utc};

use crate::error::Result;
use crate::ids::{JobId, TenantId};
use crate::store::{Db, TenantTx};

#[derive(Debug, Clone, sqlx::FromRow)]
pub struct DueJob {
    pub id: JobId,
    pub tenant_id: TenantId,
    pub kind: String,
    /// The end of this claim's lease: only the owner of the lease may finish the job.
    pub lease_until: DateTime<Utc>,
    pub attempts: i32,
}

/// Plans a run of `kind` in the tenant of `tx` at `run_at` or earlier. A run that is planned for later moves
/// forward.
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

/// Leases up to `limit` jobs that are due at `now`. Two nodes never get the same job while its lease lasts, by the
/// clock of the database. A leased job is due again when its lease expires. If it has a run time by then, that was
/// planned while it ran. Jobs of the tenants in `busy` wait.
pub async fn claim(
    db: &Db,
    now: DateTime<Utc>,
    lease: TimeDelta,
    limit: i64,
    busy: &[TenantId],
) -> Result<Vec<DueJob>> {
    Ok(sqlx::query_as(
        // Materialized: Postgres could run a subquery again for each joined row, and lease more.
        // Each part is read in the order of its index. A job whose node died has no run time, only its lease's end.
        "with planned as materialized (
           select id, run_at as due_at
             from jobs
            where run_at <= $1
              and lease_until is null
              and tenant_id <> all ($4)
            order by run_at
            limit $3
              for update skip locked
         ), expired as materialized (
           select id, lease_until as due_at
             from jobs
            where lease_until <= now()
              and tenant_id <> all ($4)
            order by lease_until
            limit $3
              for update skip locked
         ), due as materialized (
           select id
             from (select id, due_at from planned union all select id, due_at from expired) o
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

/// The end of a claimed job.
#[derive(Debug, Clone, Copy)]
pub enum JobEnd<'a> {
    Done,
    /// With an error code; `is_final` if an operator has to act.
    Failed {
        error: &'a str,
        is_final: bool,
    },
}

/// Plans the next run of a claimed job, if the lease is still valid. A run that was planned while the job ran stays:
/// the job may have read before there was work. After a failure it does not stay: the backoff decides.
pub async fn update_schedule(
    db: &Db,
    job: &DueJob,
    run_at: DateTime<Utc>,
    end: JobEnd<'_>,
) -> Result<()> {
    let (error, is_final) = match end {
        JobEnd::Done => (None, false),
        JobEnd::Failed { error, is_final } => (Some(error), is_final),
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
    .bind(is_final)
    .execute(db.connection().await?.limited())
    .await?;
    Ok(())
}
