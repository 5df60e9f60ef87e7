//! Deliveries on their way to bridges: leased in the order of their chats, then acknowledged, retried or dead. A key
//! sees the deliveries of its platforms alone.
//!
//! Every function here is an operation.

mod coverage;
mod feed;

use uuid::Uuid;

use crate::app::App;
use crate::auth::KeyCaller;
use crate::domain::bridge::delivery::{AfterFailure, Delivery, after_failure};
use crate::domain::values::paging::{Page, PageRequest};
use crate::error::{Code, Error, Result};
use crate::ids::DeliveryId;
use crate::store::bridge::deliveries::{self, DeliveryEnd, EndOutcome};

pub use feed::{DeliveryFeed, FeedUpdate, OnOutage};

/// Longest error text of a bridge that is kept.
const MAX_ERROR_CHARS: usize = 500;

/// A delivery that a bridge holds.
#[derive(Debug, Clone, Copy)]
pub struct LeasedDelivery {
    pub id: DeliveryId,
    pub lease: Uuid,
}

/// Ends a delivery that was sent.
pub async fn acknowledge(
    app: &App,
    key: &KeyCaller,
    delivery: LeasedDelivery,
    external_message_id: Option<&str>,
) -> Result<()> {
    let covered = coverage::served(key, None)?;
    let end = DeliveryEnd::Delivered {
        external_message_id,
    };
    let mut tx = key.begin(&app.db).await?;
    let outcome = deliveries::end(&mut tx, &covered, delivery.id, delivery.lease, end).await?;
    tx.commit().await?;
    check(outcome)
}

/// What a bridge says of a delivery that it could not send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// Another attempt may succeed.
    Temporary,
    Permanent,
}

/// Retries a delivery later, or ends it as dead.
pub async fn reject(
    app: &App,
    key: &KeyCaller,
    delivery: LeasedDelivery,
    failure: Failure,
    error: &str,
) -> Result<()> {
    let covered = coverage::served(key, None)?;
    let error: String = error
        .chars()
        .filter(|c| *c != '\0')
        .take(MAX_ERROR_CHARS)
        .collect();
    let mut tx = key.begin(&app.db).await?;
    let Some(attempt) = deliveries::find_attempt(&mut tx, &covered, delivery.id).await? else {
        tx.end().await?;
        return Err(Error::not_found("delivery"));
    };
    let end = match (failure, after_failure(attempt)) {
        (Failure::Temporary, AfterFailure::RetryAfter(after)) => DeliveryEnd::Later {
            after,
            error: &error,
        },
        (Failure::Temporary, AfterFailure::DeadLetter) | (Failure::Permanent, _) => {
            DeliveryEnd::DeadLetter { error: &error }
        }
    };
    let outcome = deliveries::end(&mut tx, &covered, delivery.id, delivery.lease, end).await?;
    tx.commit().await?;
    check(outcome)
}

fn check(outcome: EndOutcome) -> Result<()> {
    match outcome {
        EndOutcome::Applied => Ok(()),
        EndOutcome::Missing => Err(Error::not_found("delivery")),
        EndOutcome::StaleLease => {
            let detail = "the lease is not the delivery's, or has expired";
            Err(Error::new(Code::StaleLease, detail))
        }
    }
}

/// Dead deliveries, newest first.
pub async fn list_dead_letters(
    app: &App,
    key: &KeyCaller,
    page: &PageRequest,
) -> Result<Page<Delivery>> {
    let covered = coverage::readable(key);
    let mut tx = key.begin(&app.db).await?;
    let page = deliveries::list_dead_letters(&mut tx, &covered, page).await?;
    tx.end().await?;
    Ok(page)
}

/// Lets a dead delivery be tried again.
pub async fn replay_dead_letter(app: &App, key: &KeyCaller, id: DeliveryId) -> Result<Delivery> {
    let covered = coverage::served(key, None)?;
    let mut tx = key.begin(&app.db).await?;
    let delivery = deliveries::replay_dead_letter(&mut tx, &covered, id).await?;
    tx.commit().await?;
    delivery.ok_or_else(|| Error::not_found("dead delivery"))
}
