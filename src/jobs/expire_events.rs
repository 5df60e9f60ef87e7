//! Removes events a day after they happened: what was said stays in the transcript.

use chrono::{DateTime, TimeDelta, Utc};

use crate::app::App;
use crate::auth::JobCaller;
use crate::error::Result;
use crate::store::events;

/// How long a stream can be resumed.
pub const KEPT: TimeDelta = TimeDelta::hours(24);
const BATCH: i64 = 5000;
const INTERVAL: TimeDelta = TimeDelta::minutes(10);

pub async fn run(app: &App, caller: &JobCaller) -> Result<DateTime<Utc>> {
    let now = app.clock.now();
    let mut tx = caller.begin(&app.db).await?;
    let deleted = events::delete(&mut tx, now - KEPT, BATCH).await?;
    tx.commit().await?;
    match deleted < BATCH as u64 {
        true => Ok(now + INTERVAL),
        false => Ok(now),
    }
}
