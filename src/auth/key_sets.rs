//! Public keys that issuers publish at a URL: fetched through the guarded client, remembered, and
//! asked for again once when a token names a key that is not there.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context;
use chrono::{DateTime, TimeDelta, Utc};
use moka::future::Cache;
use serde_json::Value;

use crate::clock::Clock;
use crate::domain::tenant::issuer::{TokenAlgorithm, VerifyingKey, verifying_keys};
use crate::domain::values::json_text;
use crate::domain::values::outside_text::normalise_json;
use crate::error::{Error, Result};
use crate::ids::TenantId;
use crate::upstream::GuardedClient;

const FRESH: TimeDelta = TimeDelta::minutes(10);
/// A publisher that is down for a while does not lock everyone out.
const STALE_BUT_GOOD: TimeDelta = TimeDelta::hours(1);
/// Made-up key ids must not become a load on the publisher.
const REFETCH_EVERY: TimeDelta = TimeDelta::minutes(1);
/// After a failure, so that a dead publisher costs one waiting request and not all of them.
const RETRY_EVERY: TimeDelta = TimeDelta::seconds(10);
const MAX_BYTES: usize = 256 * 1024;
/// What one comes to in memory.
const MAX_COST: usize = 8 * 1024 * 1024;
const DEADLINE: Duration = Duration::from_secs(3);
const REMEMBERED: u64 = 10_000;

#[derive(Default)]
struct Publisher {
    /// Held while someone fetches: who needs the answer waits, who has good keys goes on with them.
    fetching: tokio::sync::Mutex<()>,
    known: Mutex<CachedKeySet>,
}

#[derive(Default, Clone)]
struct CachedKeySet {
    document: Option<Arc<Value>>,
    fetched_at: Option<DateTime<Utc>>,
    failed_at: Option<DateTime<Utc>>,
    refetched_at: Option<DateTime<Utc>>,
}

impl Publisher {
    fn known(&self) -> MutexGuard<'_, CachedKeySet> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CachedKeySet {
    fn is_within(&self, age: TimeDelta, now: DateTime<Utc>) -> bool {
        self.fetched_at.is_some_and(|at| now - at <= age)
    }

    /// Whether this is a time to ask the publisher.
    fn wants_fetch(&self, found: bool, now: DateTime<Utc>) -> bool {
        let older = |at: Option<DateTime<Utc>>, than| at.is_none_or(|at| now - at > than);
        let stale = !self.is_within(FRESH, now);
        let rotated = !found && older(self.refetched_at, REFETCH_EVERY);
        (stale || rotated) && older(self.failed_at, RETRY_EVERY)
    }

    fn select(&self, algorithm: TokenAlgorithm, kid: Option<&str>) -> Vec<VerifyingKey> {
        match &self.document {
            Some(document) => matching(verifying_keys(document, algorithm), kid),
            None => Vec::new(),
        }
    }
}

pub struct KeySets {
    client: GuardedClient,
    clock: Clock,
    publishers: Cache<(TenantId, String), Arc<Publisher>>,
}

impl KeySets {
    pub fn new(client: GuardedClient, clock: Clock) -> Self {
        let publishers = Cache::builder().max_capacity(REMEMBERED).build();
        Self {
            client,
            clock,
            publishers,
        }
    }

    /// The keys at `url` that fit `algorithm` and `kid`.
    pub async fn find(
        &self,
        tenant_id: TenantId,
        url: &str,
        algorithm: TokenAlgorithm,
        kid: Option<&str>,
    ) -> Result<Vec<VerifyingKey>> {
        let name = (tenant_id, url.to_owned());
        let publisher = self
            .publishers
            .get_with(name, async { Arc::default() })
            .await;
        let now = self.clock.now();
        let good = |known: &CachedKeySet| {
            let keys = known.select(algorithm, kid);
            (!keys.is_empty() && known.is_within(STALE_BUT_GOOD, now)).then_some(keys)
        };
        let known = publisher.known().clone();
        let keys = good(&known);
        if !known.wants_fetch(keys.is_some(), now) {
            return answer(keys, &known, now);
        }
        let fetching = match &keys {
            Some(_) => publisher.fetching.try_lock().ok(),
            None => Some(publisher.fetching.lock().await),
        };
        // The task that held the lock may have fetched them, or failed to.
        let wanted = publisher.known().wants_fetch(keys.is_some(), now);
        if fetching.is_some() && wanted {
            self.fetch(&publisher, url, known.fetched_at.is_some())
                .await;
        }
        let known = publisher.known().clone();
        answer(good(&known), &known, now)
    }

    async fn fetch(&self, publisher: &Publisher, url: &str, again: bool) {
        let fetched = self.fetch_document(url).await;
        let now = self.clock.now();
        let mut known = publisher.known();
        if again {
            known.refetched_at = Some(now);
        }
        match fetched {
            Ok(document) => {
                known.document = Some(Arc::new(document));
                known.fetched_at = Some(now);
                known.failed_at = None;
            }
            Err(error) => {
                tracing::warn!(error = format!("{error:#}"), "key set fetch failed");
                known.failed_at = Some(now);
            }
        }
    }

    async fn fetch_document(&self, url: &str) -> anyhow::Result<Value> {
        let url = self.client.check_url(url)?;
        let bytes = self.client.get_bytes(&url, MAX_BYTES, DEADLINE).await?;
        let text = String::from_utf8(normalise_json(&bytes).into_owned())?;
        let document =
            json_text::read_value(&text, MAX_COST).context("it is no JSON, or too large")?;
        // An error page that happens to be JSON must not push good keys out.
        let has_keys = document["keys"]
            .as_array()
            .is_some_and(|keys| !keys.is_empty());
        anyhow::ensure!(has_keys, "the document is no key set");
        Ok(document)
    }
}

/// No key is a fault of the token, unless there is no key set to look it up in.
fn answer(
    keys: Option<Vec<VerifyingKey>>,
    known: &CachedKeySet,
    now: DateTime<Utc>,
) -> Result<Vec<VerifyingKey>> {
    if keys.is_none() && !known.is_within(STALE_BUT_GOOD, now) {
        let cause = anyhow::anyhow!("it could not be fetched");
        return Err(Error::unavailable("the issuer's key set", cause));
    }
    Ok(keys.unwrap_or_default())
}

/// The keys a token may mean: the one it names, or, if it names none, the only one there is.
pub fn matching(keys: Vec<VerifyingKey>, kid: Option<&str>) -> Vec<VerifyingKey> {
    match kid {
        Some(kid) => keys
            .into_iter()
            .filter(|key| key.kid.as_deref() == Some(kid))
            .collect(),
        None if keys.len() == 1 => keys,
        None => Vec::new(),
    }
}
