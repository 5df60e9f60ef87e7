//! Deletes stored answers after a day, and the secrets in them as soon as they are no longer replayed. The
//! operator's own run also deletes answers of tenants that no longer exist.

use chrono::{DateTime, TimeDelta, Utc};

use super::expire::expire_all;
use crate::app::App;
use crate::auth::ServiceCaller;
use crate::error::Result;
use crate::idempotency::{ANSWER_RETENTION, SECRET_RETENTION};
use crate::ids::TenantId;
use crate::store::db::idempotency;
use crate::store::tenant::expiry::Expiring;

/// Answers of deleted tenants per statement.
const LOST_BATCH: i32 = 1000;
/// Often while there are secrets to erase, rarely otherwise.
const INTERVALS: (TimeDelta, TimeDelta) = (TimeDelta::minutes(1), TimeDelta::hours(1));

pub async fn run(app: &App, caller: &ServiceCaller) -> Result<DateTime<Utc>> {
    let kinds = [
        (Expiring::AnswerSecrets, SECRET_RETENTION),
        (Expiring::Answers, ANSWER_RETENTION),
    ];
    let next = expire_all(app, caller, &kinds, INTERVALS).await?;
    if caller.tenant_id() == TenantId::OPERATOR {
        while idempotency::delete_orphaned(&app.db, LOST_BATCH).await? == LOST_BATCH {}
    }
    Ok(next)
}
