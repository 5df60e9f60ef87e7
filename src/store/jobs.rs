//! Due work of all tenants: global and without content, so that a loop can find a tenant to enter.

use chrono::{DateTime, Utc};

use super::{Db, TenantTx};
use crate::error::Result;
use crate::ids::{JobId, TenantId};

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

/// Leases up to `limit` due jobs; two nodes never get the same one while its lease lasts. A leased job is
/// due again when its lease ends: if it is planned for earlier by then, that was asked while it ran.
pub async fn claim(
    db: &Db,
    now: DateTime<Utc>,
    lease_until: DateTime<Utc>,
    limit: i64,
) -> Result<Vec<DueJob>> {
    Ok(sqlx::query_as(
        "update jobs j
            set run_at = $2, lease_until = $2, attempts = attempts + 1
           from (select id
                   from jobs
                  where run_at <= $1
                    and (lease_until is null or lease_until <= $1)
                  order by run_at
                  limit $3
                    for update skip locked) due
          where j.id = due.id
      returning j.id, j.tenant_id, j.kind, j.lease_until, j.attempts",
    )
    .bind(now)
    .bind(lease_until)
    .bind(limit)
    .fetch_all(&mut *db.connection().await?)
    .await?)
}

/// Plans the next run of a claimed job, if the claim still holds. What was asked while it ran stands:
/// the job may have looked before there was something to do.
pub async fn reschedule(db: &Db, job: &DueJob, run_at: DateTime<Utc>, failed: bool) -> Result<()> {
    sqlx::query(
        "update jobs
            set run_at = least($4, nullif(run_at, lease_until)),
                lease_until = null,
                attempts = case when $5 then attempts else 0 end
          where tenant_id = $1
            and id = $2
            and lease_until = $3",
    )
    .bind(job.tenant_id)
    .bind(job.id)
    .bind(job.lease_until)
    .bind(run_at)
    .bind(failed)
    .execute(&mut *db.connection().await?)
    .await?;
    Ok(())
}
