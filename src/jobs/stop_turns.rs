//! Stops turns that a tenant's nodes accepted during its suspension or deletion.

use chrono::{DateTime, TimeDelta, Utc};

use crate::app::App;
use crate::error::Result;
use crate::ids::TenantId;
use crate::tenants;

/// While some are left.
const RETRY_AFTER: TimeDelta = TimeDelta::seconds(2);
/// A suspension schedules the job earlier.
const WHILE_IDLE: TimeDelta = TimeDelta::days(1);

pub async fn run(app: &App, tenant_id: TenantId) -> Result<DateTime<Utc>> {
    let left = tenants::stop_turns(app, tenant_id).await?;
    let pause = if left { RETRY_AFTER } else { WHILE_IDLE };
    Ok(app.clock.now() + pause)
}
