//! Removes the rows of deleted conversations until none is left: some conversations at a time, first their contents,
//! in batches, and then the conversations.

use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};

use super::batches::{Task, finish};
use crate::app::App;
use crate::auth::ServiceCaller;
use crate::error::Result;
use crate::store::conversation::conversations::{self, Part};

const CONVERSATIONS: i64 = 100;
/// Well within the job's lease. The rest is left to the next run.
const MAX_TIME: Duration = Duration::from_secs(20);
/// A deletion schedules the job earlier.
const WHILE_IDLE: TimeDelta = TimeDelta::days(1);

pub async fn run(app: &App, caller: &ServiceCaller) -> Result<DateTime<Utc>> {
    let until = Instant::now() + MAX_TIME;
    loop {
        let mut tx = caller.begin(&app.db).await?;
        let deleted = conversations::list_deleted(&mut tx, CONVERSATIONS).await?;
        tx.commit().await?;
        if deleted.is_empty() {
            return Ok(app.clock.now() + WHILE_IDLE);
        }
        for part in Part::ALL {
            if !finish(app, caller, Task::Erase(part, &deleted), until).await? {
                return Ok(app.clock.now());
            }
        }
    }
}
