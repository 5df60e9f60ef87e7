//! Deletes rows of several kinds after their retention.

use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};

use super::batches::{Task, finish};
use crate::app::App;
use crate::auth::ServiceCaller;
use crate::error::Result;
use crate::store::tenant::expiry::{self, Expiring};

/// The time for one kind, so that the others get theirs. The rest is left to the next run.
const MAX_TIME: Duration = Duration::from_secs(5);

/// What is left of a kind.
enum Remaining {
    Nothing,
    /// The oldest row expires then, or has expired and is still needed.
    Until(DateTime<Utc>),
    /// More than the time allowed.
    More,
}

async fn expire(
    app: &App,
    caller: &ServiceCaller,
    what: Expiring,
    retention: TimeDelta,
) -> Result<Remaining> {
    let task = Task::Expire(what, app.clock.now() - retention);
    if !finish(app, caller, task, Instant::now() + MAX_TIME).await? {
        return Ok(Remaining::More);
    }
    let mut tx = caller.begin(&app.db).await?;
    let oldest = expiry::find_oldest(&mut tx, what).await?;
    tx.commit().await?;
    Ok(oldest.map_or(Remaining::Nothing, |oldest| {
        Remaining::Until(oldest + retention)
    }))
}

/// The next run of a job that expires several kinds: when the first of them is due, within limits. The failure of
/// one kind does not stop the others; it becomes the job's.
pub async fn expire_all(
    app: &App,
    caller: &ServiceCaller,
    kinds: &[(Expiring, TimeDelta)],
    (soonest, latest): (TimeDelta, TimeDelta),
) -> Result<DateTime<Utc>> {
    let now = app.clock.now();
    let mut next = now + latest;
    let mut outcome = Ok(());
    for (what, retention) in kinds {
        match expire(app, caller, *what, *retention).await {
            Ok(Remaining::More) => next = now,
            Ok(Remaining::Until(due)) => next = next.min(due.max(now + soonest)),
            Ok(Remaining::Nothing) => {}
            Err(error) => outcome = Err(error),
        }
    }
    outcome.map(|()| next)
}
