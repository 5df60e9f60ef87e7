//! Forgets stored answers after a day, and the secrets in them as soon as they are no longer replayed.

use chrono::{DateTime, TimeDelta, Utc};

use crate::app::App;
use crate::auth::JobCaller;
use crate::error::Result;
use crate::idempotency::{KEPT, SECRETS_KEPT};
use crate::store::idempotency;

const WHILE_IDLE: TimeDelta = TimeDelta::hours(1);

/// Often while there are answers to forget, rarely while there are none.
pub async fn run(app: &App, caller: &JobCaller) -> Result<DateTime<Utc>> {
    let now = app.clock.now();
    let mut tx = caller.begin(&app.db).await?;
    idempotency::delete(&mut tx, now - KEPT).await?;
    idempotency::delete_secrets(&mut tx, now - SECRETS_KEPT).await?;
    let oldest = idempotency::oldest(&mut tx).await?;
    tx.commit().await?;
    Ok(now
        + if oldest.is_some() {
            SECRETS_KEPT
        } else {
            WHILE_IDLE
        })
}
