//! Verifies API keys. A node caches an answer for less than a second (`ShortCache`), so a revoked key stops
//! everywhere within one second and no message has to arrive for that.

use std::sync::atomic::{AtomicBool, Ordering};

use chrono::{DateTime, TimeDelta, Utc};

use super::KeyCaller;
use crate::cache::ShortCache;
use crate::clock::Clock;
use crate::domain::tenant::api_key::PresentedKey;
use crate::error::{Code, Error, Result};
use crate::store::tenant::api_keys::{self, KeyMatch};
use crate::store::{Db, Urgency};

/// `last_used_at` is written at most this often for one key.
const USE_NOTED_EVERY: TimeDelta = TimeDelta::minutes(1);

pub struct KeyVerifier {
    db: Db,
    clock: Clock,
    /// By digest. Unknown keys are cached too, so that hammering with one costs no query each.
    keys: ShortCache<[u8; 32], Option<KeyMatch>>,
}

impl KeyVerifier {
    pub fn new(db: Db, clock: Clock) -> Self {
        Self {
            db,
            keys: ShortCache::new(clock.clone()),
            clock,
        }
    }

    pub async fn verify(&self, text: &str) -> Result<KeyCaller> {
        let presented = PresentedKey::parse(text)
            .map_err(|_| Error::unauthorized("the token is no API key and no JWT"))?;
        let found = self
            .find(&presented)
            .await?
            .ok_or_else(|| Error::unauthorized("unknown API key"))?;
        self.check_usable(&found)?;
        Ok(KeyCaller {
            tenant_id: found.tenant_id,
            key_id: found.id,
            scopes: found.scopes,
            platforms: found.platforms,
            terms: found.terms,
        })
    }

    /// Checks keys again, all with one statement, past the cache.
    pub async fn recheck(&self, texts: &[&str]) -> Vec<Result<()>> {
        let parsed: Vec<_> = texts.iter().map(|text| PresentedKey::parse(text)).collect();
        let asked: Vec<&PresentedKey> = parsed.iter().flatten().collect();
        let found = match api_keys::list_presented(&self.db, &asked).await {
            Ok(found) => found,
            Err(error) => {
                let code = error.code;
                let detail = error.detail;
                let failed = |_: &&str| Err(Error::new(code, detail.clone()));
                return texts.iter().map(failed).collect();
            }
        };
        let unknown = || Error::unauthorized("unknown API key");
        let mut places = 0..;
        let mut check = |is_key: bool| {
            let place = if is_key { places.next() } else { None };
            let key = place.and_then(|place| found.get(&place));
            self.check_usable(key.ok_or_else(unknown)?)
        };
        parsed.iter().map(|parsed| check(parsed.is_ok())).collect()
    }

    async fn find(&self, presented: &PresentedKey) -> Result<Option<KeyMatch>> {
        let has_asked = AtomicBool::new(false);
        let ask = || {
            has_asked.store(true, Ordering::Relaxed);
            api_keys::find_presented(&self.db, presented)
        };
        let key = self.keys.get_with(presented.digest, ask).await?;
        // By the one that asked, and not while the others wait: a write may wait for a lock.
        if let Some(found) = &key
            && has_asked.into_inner()
        {
            self.note_use(found).await;
        }
        Ok(key)
    }

    fn check_usable(&self, key: &KeyMatch) -> Result<()> {
        if key.revoked_at.is_some() {
            return Err(Error::new(Code::KeyRevoked, "the API key was revoked"));
        }
        if key.expires_at.is_some_and(|at| at <= self.clock.now()) {
            return Err(Error::new(Code::KeyExpired, "the API key has expired"));
        }
        key.terms.check_state()
    }

    /// Once a minute at most. A failure never fails the request: it is logged, and the next use tries again.
    async fn note_use(&self, key: &KeyMatch) {
        let now = self.clock.now();
        let due = now - USE_NOTED_EVERY;
        if self.check_usable(key).is_err() || key.last_used_at.is_some_and(|at| at > due) {
            return;
        }
        if let Err(error) = self.write_use(key, now, due).await {
            tracing::warn!(tenant = %key.tenant_id, key = %key.id, error = %error, "key usage update failed");
        }
    }

    async fn write_use(
        &self,
        key: &KeyMatch,
        now: DateTime<Utc>,
        due: DateTime<Utc>,
    ) -> Result<()> {
        let mut tx = self
            .db
            .begin_tenant(key.tenant_id, Urgency::Request)
            .await?;
        api_keys::update_last_used(&mut tx, key.id, now, due).await?;
        tx.commit().await
    }
}
