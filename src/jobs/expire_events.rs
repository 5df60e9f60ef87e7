//! Removes what was kept long enough: events a day after they happened (what was said stays in the
//! transcript), and later which messages of platforms were taken, what was delivered, and how users were linked.

use chrono::{DateTime, TimeDelta, Utc};

use super::expire::expire_all;
use crate::app::App;
use crate::auth::ServiceCaller;
use crate::error::Result;
use crate::inbound;
use crate::store::tenant::expiry::Expiring;

/// How long a stream can be resumed.
pub const KEPT: TimeDelta = TimeDelta::hours(24);
/// After they expired: nobody can use them.
const CODES_KEPT: TimeDelta = TimeDelta::days(30);
/// Longer than any window in which attempts are counted.
const CODE_ATTEMPTS_KEPT: TimeDelta = TimeDelta::days(1);
/// Longer than an unlink can be undone and merges are counted.
const MOVES_KEPT: TimeDelta = TimeDelta::days(365);
/// The job runs when something is due. A tenant in which nothing happens costs a few runs a day.
const INTERVALS: (TimeDelta, TimeDelta) = (TimeDelta::minutes(10), TimeDelta::hours(6));

pub async fn run(app: &App, caller: &ServiceCaller) -> Result<DateTime<Utc>> {
    let kinds = [
        (Expiring::Events, KEPT),
        (Expiring::Receipts, inbound::RECEIPT_RETENTION),
        (Expiring::Deliveries, inbound::RECEIPT_RETENTION),
        (Expiring::Codes, CODES_KEPT),
        (Expiring::CodeAttempts, CODE_ATTEMPTS_KEPT),
        (Expiring::PendingLinks, TimeDelta::zero()),
        (Expiring::IdentityMoves, MOVES_KEPT),
    ];
    expire_all(app, caller, &kinds, INTERVALS).await
}
