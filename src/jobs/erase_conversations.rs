//! Removes the rows of deleted conversations until none is left: of some conversations at a time, first what they
//! hold, in batches, and then the conversations.

use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};

use crate::app::App;
use crate::auth::JobCaller;
use crate::error::{Code, Result};
use crate::ids::SessionId;
use crate::store::conversations::{self, Part};

const CONVERSATIONS: i64 = 100;
const BATCH: i64 = 1000;
const MIN_BATCH: i64 = 10;
/// Well within the job's lease; what is left is for the next run.
const AT_ONCE: Duration = Duration::from_secs(20);
/// Whoever deletes a conversation brings the job forward.
const WHILE_IDLE: TimeDelta = TimeDelta::days(1);

pub async fn run(app: &App, caller: &JobCaller) -> Result<DateTime<Utc>> {
    let until = Instant::now() + AT_ONCE;
    loop {
        let mut tx = caller.begin(&app.db).await?;
        let deleted = conversations::list_deleted(&mut tx, CONVERSATIONS).await?;
        tx.commit().await?;
        if deleted.is_empty() {
            return Ok(app.clock.now() + WHILE_IDLE);
        }
        for part in Part::ALL {
            if !erase(app, caller, part, &deleted, until).await? {
                return Ok(app.clock.now());
            }
        }
    }
}

/// Whether nothing of the part is left. A batch that takes too long is tried again as a smaller one.
async fn erase(
    app: &App,
    caller: &JobCaller,
    part: Part,
    deleted: &[SessionId],
    until: Instant,
) -> Result<bool> {
    let mut batch = BATCH;
    loop {
        if Instant::now() >= until || app.draining.is_cancelled() {
            return Ok(false);
        }
        match erase_batch(app, caller, part, deleted, batch).await {
            Ok(erased) if erased < batch as u64 => return Ok(true),
            Ok(_) => {}
            Err(error) if error.code == Code::Timeout && batch > MIN_BATCH => {
                batch = (batch / 10).max(MIN_BATCH);
            }
            Err(error) => return Err(error),
        }
    }
}

async fn erase_batch(
    app: &App,
    caller: &JobCaller,
    part: Part,
    deleted: &[SessionId],
    batch: i64,
) -> Result<u64> {
    let mut tx = caller.begin(&app.db).await?;
    let erased = conversations::erase(&mut tx, part, deleted, batch).await?;
    tx.commit().await?;
    Ok(erased)
}
