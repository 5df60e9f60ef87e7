//! `DeliveryFeed`: a bridge that waits for deliveries, in a long poll or a stream. What it gives out is leased.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::coverage;
use crate::app::App;
use crate::auth::KeyCaller;
use crate::domain::bridge::delivery::Delivery;
use crate::domain::people::platform::PlatformScope;
use crate::error::Result;
use crate::limits::StreamGuard;
use crate::notifications::Subscription;
use crate::shutdown::Departure;
use crate::store::bridge::deliveries::CoveredPlatforms;
use crate::store::bridge::delivery_leases;
use crate::streams::CheckedCredential;

/// How often deliveries are looked for without a notification.
const POLL_EVERY: Duration = Duration::from_secs(1);

pub struct DeliveryFeed {
    app: App,
    key: KeyCaller,
    credential: Arc<CheckedCredential>,
    covered: CoveredPlatforms,
    subscription: Subscription,
    departure: Departure,
    on_outage: OnOutage,
    /// Held as long as it is open.
    _guard: StreamGuard,
}

/// What happens while the database does not answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnOutage {
    Fail,
    Wait,
}

pub enum FeedUpdate {
    Leased(Vec<Delivery>),
    /// Nothing came in the time given.
    Idle,
    /// The node stops: the bridge should come back to another one.
    Departing,
}

impl DeliveryFeed {
    /// Of the platforms that the key serves, or of one of them.
    pub fn open(
        app: &App,
        key: KeyCaller,
        credential: Arc<CheckedCredential>,
        platform: Option<&PlatformScope>,
        on_outage: OnOutage,
    ) -> Result<Self> {
        let covered = coverage::served(&key, platform)?;
        let open_streams = key.limits().open_streams;
        let guard = app.limits.open_stream(key.tenant_id(), open_streams)?;
        Ok(Self {
            app: app.clone(),
            subscription: app.notifications.subscribe_deliveries(key.tenant_id()),
            key,
            credential,
            covered,
            departure: Departure::default(),
            on_outage,
            _guard: guard,
        })
    }

    pub fn is_departing(&mut self) -> bool {
        self.departure.is_due(&self.app.shutdown)
    }

    /// Leases what is due, at most `limit`; waits for it until `until`.
    pub async fn next(&mut self, limit: i64, until: Instant) -> Result<FeedUpdate> {
        loop {
            self.credential.check(&self.app.verifiers).await?;
            let leased = self.lease(limit).await?;
            if !leased.is_empty() {
                return Ok(FeedUpdate::Leased(leased));
            }
            if self.is_departing() {
                return Ok(FeedUpdate::Departing);
            }
            if Instant::now() >= until {
                return Ok(FeedUpdate::Idle);
            }
            let poll_at = until.min(Instant::now() + POLL_EVERY);
            tokio::select! {
                _ = timeout_at(poll_at, self.subscription.changed()) => {}
                () = self.credential.refused() => {}
                () = self.departure.due(&self.app.shutdown) => {}
            }
        }
    }

    async fn lease(&self, limit: i64) -> Result<Vec<Delivery>> {
        match self.try_lease(limit).await {
            Err(error) if error.is_transient() && self.on_outage == OnOutage::Wait => {
                Ok(Vec::new())
            }
            leased => leased,
        }
    }

    async fn try_lease(&self, limit: i64) -> Result<Vec<Delivery>> {
        let mut tx = self.key.begin(&self.app.db).await?;
        let leased = delivery_leases::lease(&mut tx, &self.covered, limit).await?;
        tx.commit().await?;
        Ok(leased)
    }
}
