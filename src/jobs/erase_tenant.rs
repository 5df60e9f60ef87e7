//! Deletes a tenant's rows, a batch at a time, until nothing of it is left.

use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};

use crate::app::App;
use crate::error::Result;
use crate::ids::TenantId;
use crate::store::tenants;

const BATCH: i32 = 1000;
/// Well within the job's lease; what is left is for the next run.
const AT_ONCE: Duration = Duration::from_secs(20);

pub async fn run(app: &App, tenant_id: TenantId) -> Result<DateTime<Utc>> {
    let started = Instant::now();
    while started.elapsed() < AT_ONCE {
        // The last batch takes the tenant's row and this very job with it.
        if tenants::erase(&app.db, tenant_id, BATCH).await? == 0 {
            break;
        }
    }
    Ok(app.clock.now())
}
