//! Removes the rows of deleted conversations, a batch at a time, until none is left.

use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};

use crate::app::App;
use crate::auth::JobCaller;
use crate::error::Result;
use crate::store::conversations;

const BATCH: i64 = 1000;
/// Well within the job's lease; what is left is for the next run.
const AT_ONCE: Duration = Duration::from_secs(20);
/// Whoever deletes a conversation brings the job forward.
const WHILE_IDLE: TimeDelta = TimeDelta::days(1);

pub async fn run(app: &App, caller: &JobCaller) -> Result<DateTime<Utc>> {
    let started = Instant::now();
    while started.elapsed() < AT_ONCE && !app.draining.is_cancelled() {
        let mut tx = caller.begin(&app.db).await?;
        let mut erased = conversations::erase_messages(&mut tx, BATCH).await?;
        if erased < BATCH as u64 {
            erased += conversations::erase(&mut tx, BATCH).await?;
        }
        tx.commit().await?;
        if erased == 0 {
            return Ok(app.clock.now() + WHILE_IDLE);
        }
    }
    Ok(app.clock.now())
}
