//! Deleting what was kept long enough, of several kinds.

use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};

use super::batches::{Task, finish};
use crate::app::App;
use crate::auth::ServiceCaller;
use crate::error::Result;
use crate::store::tenant::expiry::{self, Expiring};

/// Then the other kinds get their turn; what is left is for the next run.
const AT_ONCE: Duration = Duration::from_secs(5);

/// What is left of a kind.
enum Left {
    Nothing,
    /// What will be old enough then, or is and is still needed.
    Until(DateTime<Utc>),
    /// More than there was time for.
    More,
}

async fn expire(
    app: &App,
    caller: &ServiceCaller,
    what: Expiring,
    kept: TimeDelta,
) -> Result<Left> {
    let task = Task::Expire(what, app.clock.now() - kept);
    if !finish(app, caller, task, Instant::now() + AT_ONCE).await? {
        return Ok(Left::More);
    }
    let mut tx = caller.begin(&app.db).await?;
    let oldest = expiry::find_oldest(&mut tx, what).await?;
    tx.commit().await?;
    Ok(oldest.map_or(Left::Nothing, |oldest| Left::Until(oldest + kept)))
}

/// The next run of a job that expires several kinds: when the first of them is due, within limits. The failure
/// of one kind keeps none of the others, and is the job's.
pub async fn expire_all(
    app: &App,
    caller: &ServiceCaller,
    kinds: &[(Expiring, TimeDelta)],
    (soonest, latest): (TimeDelta, TimeDelta),
) -> Result<DateTime<Utc>> {
    let now = app.clock.now();
    let mut next = now + latest;
    let mut outcome = Ok(());
    for (what, kept) in kinds {
        match expire(app, caller, *what, *kept).await {
            Ok(Left::More) => next = now,
            Ok(Left::Until(due)) => next = next.min(due.max(now + soonest)),
            Ok(Left::Nothing) => {}
            Err(error) => outcome = Err(error),
        }
    }
    outcome.map(|()| next)
}
