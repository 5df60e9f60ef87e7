//! Public keys that issuers publish at a URL: fetched through the guarded client, remembered, and
//! asked for again once when a token names a key that is not there.

use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use moka::future::Cache;
use serde_json::Value;
use tokio::sync::Mutex;

use crate::clock::Clock;
use crate::domain::issuer::{TokenAlgorithm, VerifyingKey, verifying_keys};
use crate::error::{Error, Result};
use crate::ids::TenantId;
use crate::upstream::GuardedClient;

const FRESH: TimeDelta = TimeDelta::minutes(10);
/// A publisher that is down for a while does not lock everyone out.
const STALE_BUT_GOOD: TimeDelta = TimeDelta::hours(1);
/// Made-up key ids must not become a load on the publisher.
const REFETCH_EVERY: TimeDelta = TimeDelta::minutes(1);
/// After a failure, so that a dead publisher costs one waiting request and not all of them.
const RETRY_EVERY: TimeDelta = TimeDelta::seconds(5);
const MAX_BYTES: usize = 256 * 1024;
const DEADLINE: Duration = Duration::from_secs(5);
const REMEMBERED: u64 = 10_000;

#[derive(Default)]
struct KeySet {
    document: Option<Arc<Value>>,
    fetched_at: Option<DateTime<Utc>>,
    tried_at: Option<DateTime<Utc>>,
    refetched_at: Option<DateTime<Utc>>,
}

pub struct KeySets {
    client: GuardedClient,
    clock: Clock,
    /// One lock a URL: while one request fetches, the others wait for its answer.
    sets: Cache<(TenantId, String), Arc<Mutex<KeySet>>>,
}

impl KeySets {
    pub fn new(client: GuardedClient, clock: Clock) -> Self {
        let sets = Cache::builder().max_capacity(REMEMBERED).build();
        Self {
            client,
            clock,
            sets,
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
        let set = self.sets.get_with(name, async { Arc::default() }).await;
        let mut set = set.lock().await;
        let now = self.clock.now();
        let older =
            |at: Option<DateTime<Utc>>, than: TimeDelta| at.is_none_or(|at| now - at > than);
        let mut last_failure = None;
        if older(set.fetched_at, FRESH) && older(set.tried_at, RETRY_EVERY) {
            last_failure = self.fetch(url, &mut set, now).await.err();
        }
        let mut found = select(&set, algorithm, kid);
        if found.is_empty()
            && set.fetched_at.is_some_and(|at| at != now)
            && older(set.refetched_at, REFETCH_EVERY)
        {
            set.refetched_at = Some(now);
            last_failure = self.fetch(url, &mut set, now).await.err();
            found = select(&set, algorithm, kid);
        }
        if older(set.fetched_at, STALE_BUT_GOOD) {
            let cause =
                last_failure.unwrap_or_else(|| anyhow::anyhow!("fetching failed just before"));
            return Err(Error::unavailable("the issuer's key set", cause));
        }
        Ok(found)
    }

    async fn fetch(&self, url: &str, set: &mut KeySet, now: DateTime<Utc>) -> anyhow::Result<()> {
        set.tried_at = Some(now);
        let url = self.client.check_url(url)?;
        let bytes = self.client.get_bytes(&url, MAX_BYTES, DEADLINE).await?;
        set.document = Some(Arc::new(serde_json::from_slice(&bytes)?));
        set.fetched_at = Some(now);
        Ok(())
    }
}

fn select(set: &KeySet, algorithm: TokenAlgorithm, kid: Option<&str>) -> Vec<VerifyingKey> {
    match &set.document {
        Some(document) => matching(verifying_keys(document, algorithm), kid),
        None => Vec::new(),
    }
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
