//! Deletes a tenant's rows, a batch at a time, until nothing of it is left.

use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};

use super::batches::BatchSize;
use crate::app::App;
use crate::error::Result;
use crate::ids::TenantId;
use crate::store::tenant::tenants;

const BATCH: i64 = 1000;
/// Well within the job's lease. The rest is left to the next run.
const MAX_TIME: Duration = Duration::from_secs(20);

pub async fn run(app: &App, tenant_id: TenantId) -> Result<DateTime<Utc>> {
    let started = Instant::now();
    let mut size = BatchSize::new(BATCH);
    while started.elapsed() < MAX_TIME && !app.shutdown.is_stopping() {
        match tenants::erase(&app.db, tenant_id, size.rows()).await {
            // The last batch deletes the tenant's row and this very job with it.
            Ok(0) => break,
            Ok(_) => {}
            Err(error) => size.shrink(error)?,
        }
    }
    Ok(app.clock.now())
}
