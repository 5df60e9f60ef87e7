//! Deleting what was kept long enough, of one kind: batches in transactions of their own, smaller ones when the
//! database has no time for a large one.

use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};

use crate::app::App;
use crate::auth::JobCaller;
use crate::error::{Code, Result};
use crate::store::expiry::{self, Expiring};

const BATCH: i64 = 1000;
const MIN_BATCH: i64 = 10;
/// Then the others get their turn; what is left is for the next run.
const AT_ONCE: Duration = Duration::from_secs(5);

/// When there is more to expire of `what`, which is kept for `kept`; `None` if there is nothing at all.
pub async fn expire(
    app: &App,
    caller: &JobCaller,
    what: Expiring,
    kept: TimeDelta,
) -> Result<Option<DateTime<Utc>>> {
    let now = app.clock.now();
    let started = Instant::now();
    let mut batch = BATCH;
    loop {
        match delete(app, caller, what, now - kept, batch).await {
            Ok(deleted) if deleted < batch as u64 => break,
            Ok(_) if started.elapsed() >= AT_ONCE || app.draining.is_cancelled() => {
                return Ok(Some(now));
            }
            Ok(_) => {}
            Err(error) if error.code == Code::Timeout && batch > MIN_BATCH => {
                batch = (batch / 10).max(MIN_BATCH);
            }
            Err(error) => return Err(error),
        }
    }
    let mut tx = caller.begin(&app.db).await?;
    let oldest = expiry::find_oldest(&mut tx, what).await?;
    tx.commit().await?;
    Ok(oldest.map(|oldest| oldest + kept))
}

async fn delete(
    app: &App,
    caller: &JobCaller,
    what: Expiring,
    before: DateTime<Utc>,
    batch: i64,
) -> Result<u64> {
    let mut tx = caller.begin(&app.db).await?;
    let deleted = expiry::delete(&mut tx, what, before, batch).await?;
    tx.commit().await?;
    Ok(deleted)
}

/// The next run of a job that expires several kinds: when the first of them is due, within limits. The failure
/// of one kind keeps none of the others, and is the job's.
pub async fn expire_all(
    app: &App,
    caller: &JobCaller,
    kinds: &[(Expiring, TimeDelta)],
    (soonest, latest): (TimeDelta, TimeDelta),
) -> Result<DateTime<Utc>> {
    let now = app.clock.now();
    let mut next = now + latest;
    let mut outcome = Ok(());
    for (what, kept) in kinds {
        match expire(app, caller, *what, *kept).await {
            Ok(Some(due)) if due <= now => next = now,
            Ok(Some(due)) => next = next.min(due.max(now + soonest)),
            Ok(None) => {}
            Err(error) => outcome = Err(error),
        }
    }
    outcome.map(|()| next)
}
