//! Removes what was kept long enough: events a day after they happened (what was said stays in the
//! transcript), and after 30 days which messages of platforms were taken, and what was delivered.

use chrono::{DateTime, TimeDelta, Utc};

use crate::app::App;
use crate::auth::JobCaller;
use crate::error::Result;
use crate::inbound;
use crate::store::{deliveries, events, receipts};

/// How long a stream can be resumed.
pub const KEPT: TimeDelta = TimeDelta::hours(24);
const BATCH: i64 = 5000;
const INTERVAL: TimeDelta = TimeDelta::minutes(10);

pub async fn run(app: &App, caller: &JobCaller) -> Result<DateTime<Utc>> {
    let now = app.clock.now();
    let mut tx = caller.begin(&app.db).await?;
    let events = events::delete(&mut tx, now - KEPT, BATCH).await?;
    let before = now - inbound::REMEMBERED;
    let receipts = receipts::delete(&mut tx, before, BATCH).await?;
    let delivered = deliveries::delete_ended(&mut tx, before, BATCH).await?;
    tx.commit().await?;
    match events.max(receipts).max(delivered) < BATCH as u64 {
        true => Ok(now + INTERVAL),
        false => Ok(now),
    }
}
