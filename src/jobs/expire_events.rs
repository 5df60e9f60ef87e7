//! Deletes rows after their retention: events after a day (the messages stay in the transcript), and later the
//! receipts of inbound messages, deliveries and the history of identity links.

use chrono::{DateTime, TimeDelta, Utc};

use super::expire::expire_all;
use crate::app::App;
use crate::auth::ServiceCaller;
use crate::error::Result;
use crate::inbound;
use crate::store::tenant::expiry::Expiring;

/// How long a stream can be resumed.
pub const EVENT_RETENTION: TimeDelta = TimeDelta::hours(24);
/// OpenCount from their expiry: they are unusable.
const CODE_RETENTION: TimeDelta = TimeDelta::days(30);
/// Longer than any window in which attempts are counted.
const CODE_ATTEMPT_RETENTION: TimeDelta = TimeDelta::days(1);
/// Longer than an unlink can be undone and merges are counted.
const MOVE_RETENTION: TimeDelta = TimeDelta::days(365);
/// The job runs when something is due. A tenant without activity costs a few runs a day.
const INTERVALS: (TimeDelta, TimeDelta) = (TimeDelta::minutes(10), TimeDelta::hours(6));

pub async fn run(app: &App, caller: &ServiceCaller) -> Result<DateTime<Utc>> {
    let kinds = [
        (Expiring::Events, EVENT_RETENTION),
        (Expiring::Receipts, inbound::RECEIPT_RETENTION),
        (Expiring::Deliveries, inbound::RECEIPT_RETENTION),
        (Expiring::Codes, CODE_RETENTION),
        (Expiring::CodeAttempts, CODE_ATTEMPT_RETENTION),
        (Expiring::PendingLinks, TimeDelta::zero()),
        (Expiring::IdentityMoves, MOVE_RETENTION),
    ];
    expire_all(app, caller, &kinds, INTERVALS).await
}
