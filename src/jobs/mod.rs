//! Background work. One loop per node leases due jobs from Postgres and runs each inside its tenant. A crash leaves
//! a lease that expires, and any node claims the job again. All functions are operations.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use crate::app::App;
use crate::auth::ServiceCaller;
use crate::error::{Code, Error, Result};
use crate::idempotency;
use crate::ids::TenantId;
use crate::people;
use crate::retry::{self, Backoff};
use crate::sessions;
use crate::store::db::jobs::{self, DueJob, JobEnd};
use crate::store::db::nodes;
use crate::tenants;

mod batches;
mod erase_conversations;
mod erase_tenant;
mod erase_users;
mod expire;
mod expire_answers;
mod expire_events;
pub mod flush_usage;
pub mod heartbeat;
pub mod recover_turns;
mod stop_turns;
mod sweep_conversations;
pub mod watch_streams;

const TICK: Duration = Duration::from_secs(1);
const LEASE: TimeDelta = TimeDelta::minutes(1);
/// A job ends before its lease does.
const MAX_RUN: Duration = Duration::from_secs(50);
/// Longer than any background statement may take.
pub const QUERY_TIMEOUT: Duration = Duration::from_secs(20);
/// A long job does not delay the short ones behind it.
const MAX_RUNNING: usize = 4;
/// One tenant's long jobs leave room for others.
const MAX_PER_TENANT: usize = 2;
/// After so many failures an operator should look at the job.
const MAX_FAILURES: i32 = 10;
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(3600);
/// The bounds of the pauses between attempts to hand over.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const MAX_PAUSE: Duration = Duration::from_millis(50);

/// Called when nothing else of this node runs: writes its last counts and deletes its row. Connections that were
/// opened on a listener's thread ended with it, which shows only on their next use: hence the attempts.
pub async fn finish(app: &App) -> Result<()> {
    let mut attempts_left = app.config.database_pool;
    let mut backoff = Backoff::new(FIRST_PAUSE, MAX_PAUSE);
    loop {
        match hand_over(app).await {
            Err(error) if attempts_left > 0 && error.code == Code::Unavailable => {
                attempts_left -= 1
            }
            outcome => return outcome,
        }
        tokio::time::sleep(backoff.next_pause()).await;
    }
}

async fn hand_over(app: &App) -> Result<()> {
    app.usage.flush(&app.db).await?;
    nodes::delete(&app.db, app.boot_id).await
}

/// Runs until `stop` is cancelled. The running jobs are finished.
pub async fn run(app: App, stop: CancellationToken) {
    while !stop.is_cancelled() {
        if let Err(error) = tick(&app).await {
            tracing::warn!(error = %error, "job poll failed");
        }
        tokio::select! {
            () = stop.cancelled() => {}
            () = tokio::time::sleep(TICK) => {}
        }
    }
}

enum Step {
    Claimed(Result<Option<DueJob>>),
    Ended(TenantId),
}

/// Runs the due jobs, some at a time, each under a lease of its own, until none is due. Returns how many it ran. A
/// claim and the jobs run concurrently: they share the connections of the pool.
pub async fn tick(app: &App) -> Result<usize> {
    let mut steps: FuturesUnordered<BoxFuture<'_, Step>> = FuturesUnordered::new();
    let mut running: Vec<TenantId> = Vec::new();
    let mut started = 0;
    let mut claiming = false;
    let mut more = true;
    let mut again = tokio::time::interval_at(Instant::now() + TICK, TICK);
    again.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        if more && !claiming && running.len() < MAX_RUNNING && !app.shutdown.is_stopping() {
            claiming = true;
            steps.push(claim(app, busy(&running)).boxed());
        }
        let step = tokio::select! {
            step = steps.next() => step,
            // A job that is due meanwhile does not wait for the end of a long one.
            _ = again.tick() => {
                more = true;
                continue;
            }
        };
        match step {
            None => return Ok(started),
            Some(Step::Ended(tenant_id)) => {
                if let Some(index) = running.iter().position(|one| *one == tenant_id) {
                    running.swap_remove(index);
                }
            }
            Some(Step::Claimed(claimed)) => {
                claiming = false;
                match claimed {
                    Ok(Some(job)) => {
                        started += 1;
                        running.push(job.tenant_id);
                        steps.push(run_and_plan(app, job).boxed());
                    }
                    Ok(None) => more = false,
                    Err(error) if running.is_empty() => return Err(error),
                    Err(_) => more = false,
                }
            }
        }
    }
}

/// The tenants that already run as many jobs on this node as one tenant may.
fn busy(running: &[TenantId]) -> Vec<TenantId> {
    let count = |tenant_id: &TenantId| running.iter().filter(|one| *one == tenant_id).count();
    let full = |tenant_id: &&TenantId| count(tenant_id) >= MAX_PER_TENANT;
    running.iter().filter(full).copied().collect()
}

async fn claim(app: &App, busy: Vec<TenantId>) -> Step {
    let claimed = jobs::claim(&app.db, app.clock.now(), LEASE, 1, &busy);
    Step::Claimed(
        within(QUERY_TIMEOUT, claimed)
            .await
            .map(|mut jobs| jobs.pop()),
    )
}

/// Runs a claimed job and plans its next run. A failure concerns only this job, which is retried later.
async fn run_and_plan(app: &App, job: DueJob) -> Step {
    let running = AssertUnwindSafe(run_one(app, &job)).catch_unwind();
    let outcome = match tokio::time::timeout(MAX_RUN, running).await {
        Ok(Ok(outcome)) => outcome,
        Ok(Err(_)) => Err(Error::internal(anyhow::anyhow!("it panicked"))),
        Err(late) => Err(Error::internal(late)),
    };
    let (run_at, ended) = match &outcome {
        Ok(next) => (*next, JobEnd::Done),
        Err(error) => {
            let failed = JobEnd::Failed {
                error: error.code.as_str(),
                is_final: job.attempts >= MAX_FAILURES,
            };
            tracing::warn!(
                job.kind, tenant = %job.tenant_id, job.attempt = job.attempts,
                error = %error, cause = ?error.cause, "job failed"
            );
            (app.clock.now() + backoff(job.attempts), failed)
        }
    };
    let planned = within(
        QUERY_TIMEOUT,
        jobs::update_schedule(&app.db, &job, run_at, ended),
    )
    .await;
    if let Err(error) = planned {
        tracing::warn!(
            job.kind, tenant = %job.tenant_id, error = %error,
            "job reschedule failed"
        );
    }
    Step::Ended(job.tenant_id)
}

/// Limits a background query, even if the database's host vanished, which shows only here: Postgres' own limits
/// vanish with it.
pub async fn within<T>(limit: Duration, query: impl Future<Output = Result<T>>) -> Result<T> {
    match tokio::time::timeout(limit, query).await {
        Ok(outcome) => outcome,
        Err(late) => Err(Error::unavailable("the database", late)),
    }
}

/// Runs a job and returns the time of its next run.
async fn run_one(app: &App, job: &DueJob) -> Result<DateTime<Utc>> {
    let caller = ServiceCaller::for_job(job);
    match job.kind.as_str() {
        idempotency::EXPIRY_JOB => expire_answers::run(app, &caller).await,
        tenants::EXPIRE_EVENTS_JOB => expire_events::run(app, &caller).await,
        sessions::ERASE_JOB => erase_conversations::run(app, &caller).await,
        people::ERASE_JOB => erase_users::run(app, &caller).await,
        sessions::retention::SWEEP_JOB => sweep_conversations::run(app, &caller).await,
        tenants::STOP_TURNS_JOB => stop_turns::run(app, job.tenant_id).await,
        tenants::ERASE_JOB => erase_tenant::run(app, job.tenant_id).await,
        // A newer node planned a kind of job that this one does not have: leave it to that node.
        _ => Ok(app.clock.now() + LEASE),
    }
}

/// Spread by a quarter, so that jobs that failed together do not run together; never longer than `MAX_BACKOFF`.
fn backoff(attempts: i32) -> Duration {
    let attempts = u32::try_from(attempts).unwrap_or_default();
    let pause = retry::exponential(FIRST_BACKOFF, MAX_BACKOFF, attempts);
    pause - retry::full_jitter(pause / 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_pause_between_attempts_is_an_hour() {
        for attempts in [0, 12, 20, i32::MAX] {
            assert!((0..100).all(|_| backoff(attempts) <= MAX_BACKOFF));
        }
        assert!(backoff(20) >= MAX_BACKOFF * 3 / 4);
    }
}
