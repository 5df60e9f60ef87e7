//! Deletes the conversations that a tenant no longer keeps, a batch at a time. However often it stops or
//! runs twice, the sweep goes on where the last committed step was.

use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};

use crate::app::App;
use crate::auth::JobCaller;
use crate::error::Result;
use crate::sessions::retention::{self, Progress};

/// Small enough that a step, and whoever waits for what it holds, is done in a fraction of a second.
const BATCH: i64 = 500;
/// Well within the job's lease; what is left is for the next run.
const AT_ONCE: Duration = Duration::from_secs(20);
/// Retention is told in days: an hour late is in time.
const BETWEEN_SWEEPS: TimeDelta = TimeDelta::hours(1);
/// Whoever sets a retention brings the job forward.
const WITHOUT_RETENTION: TimeDelta = TimeDelta::days(1);

pub async fn run(app: &App, caller: &JobCaller) -> Result<DateTime<Utc>> {
    let mut tx = caller.begin(&app.db).await?;
    let begun = retention::begin(app, &mut tx).await?;
    tx.commit().await?;
    let Some(started_at) = begun else {
        return Ok(app.clock.now() + WITHOUT_RETENTION);
    };
    let started = Instant::now();
    while started.elapsed() < AT_ONCE && !app.draining.is_cancelled() {
        let mut tx = caller.begin(&app.db).await?;
        let progress = retention::step(app, &mut tx, started_at, BATCH).await?;
        tx.commit().await?;
        match progress {
            Progress::Going => {}
            Progress::Finished => return Ok(app.clock.now() + BETWEEN_SWEEPS),
            Progress::Overtaken => break,
        }
    }
    Ok(app.clock.now())
}
