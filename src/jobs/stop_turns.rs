//! Stops turns that a tenant's nodes accepted while it was being suspended or deleted.

use chrono::{DateTime, TimeDelta, Utc};

use crate::app::App;
use crate::error::Result;
use crate::ids::TenantId;
use crate::tenants;

/// As long as there are some.
const AGAIN: TimeDelta = TimeDelta::seconds(2);
/// A suspension brings the job forward.
const WHILE_IDLE: TimeDelta = TimeDelta::days(1);

pub async fn run(app: &App, tenant_id: TenantId) -> Result<DateTime<Utc>> {
    let left = tenants::stop_turns(app, tenant_id).await?;
    let pause = if left { AGAIN } else { WHILE_IDLE };
    Ok(app.clock.now() + pause)
}
