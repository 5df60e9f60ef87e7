//! Deletes the conversations past a tenant's retention, a batch at a time. However often it stops or runs twice, the
//! sweep continues after the last committed step.

use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};

use super::batches::BatchSize;
use crate::app::App;
use crate::auth::ServiceCaller;
use crate::error::Result;
use crate::sessions::retention::{self, Progress};

/// A step, and every transaction that waits for its locks, is done in a fraction of a second.
const BATCH: i64 = 500;
/// Well within the job's lease. The rest is left to the next run.
const MAX_TIME: Duration = Duration::from_secs(20);
/// Retention counts days: an hour late is in time.
const BETWEEN_SWEEPS: TimeDelta = TimeDelta::hours(1);
/// A new retention schedules the job earlier.
const WITHOUT_RETENTION: TimeDelta = TimeDelta::days(1);

pub async fn run(app: &App, caller: &ServiceCaller) -> Result<DateTime<Utc>> {
    let mut tx = caller.begin(&app.db).await?;
    let begun = retention::begin(app, &mut tx).await?;
    tx.commit().await?;
    let Some(started_at) = begun else {
        return Ok(app.clock.now() + WITHOUT_RETENTION);
    };
    let started = Instant::now();
    let mut size = BatchSize::new(BATCH);
    while started.elapsed() < MAX_TIME && !app.shutdown.is_stopping() {
        match step(app, caller, started_at, size.rows()).await {
            Ok(Progress::Running) => {}
            Ok(Progress::Finished) => return Ok(app.clock.now() + BETWEEN_SWEEPS),
            Ok(Progress::Restart) => break,
            Err(error) => size.shrink(error)?,
        }
    }
    Ok(app.clock.now())
}

async fn step(
    app: &App,
    caller: &ServiceCaller,
    started_at: DateTime<Utc>,
    limit: i64,
) -> Result<Progress> {
    let mut tx = caller.begin(&app.db).await?;
    let progress = retention::step(app, &mut tx, started_at, limit).await?;
    tx.commit().await?;
    Ok(progress)
}
