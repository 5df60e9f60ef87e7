//! A cache of what the database said less than a second ago. Callers that miss together ask once: the others wait
//! for the same answer. An answer counts from before it was asked for, so nothing older than the TTL is ever used.

use std::fmt;
use std::hash::Hash;
use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};
use moka::future::Cache;

use crate::clock::Clock;
use crate::error::{Error, Result};

/// What changes on another node (a key revoked, an issuer deleted, an agent changed) holds here within this.
const TTL: Duration = Duration::from_millis(800);
const CAPACITY: u64 = 10_000;
/// Longer than any question takes: an answer that was asked for before a change is not used after it.
const INVALIDATION_TTL: Duration = Duration::from_secs(60);

/// Time as a cached answer needs it: by a clock that never goes back, and by the node's own, which tests move.
#[derive(Clone, Copy)]
struct Moment {
    monotonic: Instant,
    wall: DateTime<Utc>,
}

#[derive(Clone)]
struct Answer<V> {
    asked_at: Moment,
    value: V,
}

pub struct ShortCache<K, V> {
    clock: Clock,
    answers: Cache<K, Answer<V>>,
    invalidated: Cache<K, Instant>,
}

impl<K, V> ShortCache<K, V>
where
    K: Clone + Eq + Hash + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
{
    pub fn new(clock: Clock) -> Self {
        Self {
            clock,
            answers: Cache::builder()
                .max_capacity(CAPACITY)
                .time_to_live(TTL)
                .build(),
            invalidated: Cache::builder()
                .max_capacity(CAPACITY)
                .time_to_live(INVALIDATION_TTL)
                .build(),
        }
    }

    /// The cached answer, or that of `ask`, which runs once for all who miss together. A failure is not cached;
    /// those who waited for it get it too, so that a database that is away is not asked by each in turn.
    pub async fn get_with<F>(&self, key: K, ask: impl Fn() -> F) -> Result<V>
    where
        F: Future<Output = Result<V>>,
    {
        if let Some(answer) = self.answers.get(&key).await
            && self.is_fresh(&key, answer.asked_at).await
        {
            return Ok(answer.value);
        }
        // Boxed: a hit should not carry the room that a miss needs.
        Box::pin(self.ask(key, ask)).await
    }

    async fn ask<F>(&self, key: K, ask: impl Fn() -> F) -> Result<V>
    where
        F: Future<Output = Result<V>>,
    {
        loop {
            let asked_at = self.now();
            let question = async {
                let value = ask().await?;
                Ok::<_, Error>(Answer { asked_at, value })
            };
            let entry = self.answers.entry(key.clone());
            let answer = match entry.or_try_insert_with(question).await {
                Ok(entry) => entry.into_value(),
                Err(error) => return Err(copy_of(&error)),
            };
            // One's own answer is used however long it took. Another's may be too old, or from before a change.
            let is_own = answer.asked_at.monotonic == asked_at.monotonic;
            if is_own || self.is_fresh(&key, answer.asked_at).await {
                return Ok(answer.value);
            }
            self.remove(&key, answer.asked_at).await;
        }
    }

    /// The value has changed: no answer that was asked for before now is used again. Call it after the commit.
    pub async fn invalidate(&self, key: K) {
        self.invalidated.insert(key.clone(), Instant::now()).await;
        self.answers.invalidate(&key).await;
    }

    async fn is_fresh(&self, key: &K, asked_at: Moment) -> bool {
        let now = self.now();
        let age = now.wall - asked_at.wall;
        let is_young = now.monotonic - asked_at.monotonic < TTL
            && age >= TimeDelta::zero()
            && age.to_std().is_ok_and(|age| age < TTL);
        is_young
            && self
                .invalidated
                .get(key)
                .await
                .is_none_or(|at| at < asked_at.monotonic)
    }

    /// Removes the answer of that moment, and no newer one.
    async fn remove(&self, key: &K, asked_at: Moment) {
        let entry = self.answers.entry_by_ref(key);
        entry
            .and_compute_with(|entry| {
                let is_same = entry.is_some_and(|entry| {
                    entry.into_value().asked_at.monotonic == asked_at.monotonic
                });
                std::future::ready(if is_same {
                    moka::ops::compute::Op::Remove
                } else {
                    moka::ops::compute::Op::Nop
                })
            })
            .await;
    }

    fn now(&self) -> Moment {
        Moment {
            monotonic: Instant::now(),
            wall: self.clock.now(),
        }
    }
}

impl<K, V> fmt::Debug for ShortCache<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShortCache").finish_non_exhaustive()
    }
}

/// An error for each who waited. Its cause is in the log of the first; the others name it as text.
fn copy_of(error: &Arc<Error>) -> Error {
    let cause = error.cause.as_ref();
    Error {
        errors: error.errors.clone(),
        retry_after: error.retry_after,
        is_final: error.is_final,
        cause: cause.map(|cause| anyhow::anyhow!("{cause:#}")),
        ..Error::new(error.code, error.detail.clone())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::future::join_all;
    use tokio::sync::Notify;

    use super::*;
    use crate::error::Code;

    fn block_on<F: Future>(test: F) -> F::Output {
        tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap()
            .block_on(test)
    }

    #[test]
    fn callers_that_miss_together_ask_once() {
        block_on(async {
            let cache = ShortCache::new(Clock::system());
            let asked = AtomicUsize::new(0);
            let ask = || async {
                tokio::task::yield_now().await;
                Ok(asked.fetch_add(1, Ordering::Relaxed))
            };
            let answers = join_all((0..20).map(|_| cache.get_with("key", ask))).await;
            assert!(answers.into_iter().all(|answer| answer.unwrap() == 0));
            assert_eq!(asked.load(Ordering::Relaxed), 1);
        });
    }

    #[test]
    fn an_answer_is_used_for_its_time_by_the_nodes_clock() {
        block_on(async {
            let clock = Clock::system();
            let cache = ShortCache::new(clock.clone());
            let asked = AtomicUsize::new(0);
            let ask = || async { Ok(asked.fetch_add(1, Ordering::Relaxed)) };
            assert_eq!(cache.get_with("key", ask).await.unwrap(), 0);
            assert_eq!(cache.get_with("key", ask).await.unwrap(), 0);
            clock.advance(TTL);
            assert_eq!(cache.get_with("key", ask).await.unwrap(), 1);
        });
    }

    #[test]
    fn an_answer_asked_for_before_a_change_is_not_used_after_it() {
        block_on(async {
            let cache = ShortCache::new(Clock::system());
            let asked = AtomicUsize::new(0);
            let change = Notify::new();
            let ask = || async {
                let number = asked.fetch_add(1, Ordering::Relaxed);
                if number == 0 {
                    change.notified().await;
                }
                Ok(number)
            };
            let late = async {
                cache.invalidate("key").await;
                let second = cache.get_with("key", ask);
                change.notify_one();
                second.await.unwrap()
            };
            let (first, second) = tokio::join!(cache.get_with("key", ask), late);
            assert_eq!((first.unwrap(), second), (0, 1));
        });
    }

    #[test]
    fn a_failure_is_not_cached() {
        block_on(async {
            let cache = ShortCache::new(Clock::system());
            let asked = AtomicUsize::new(0);
            let ask = || async {
                match asked.fetch_add(1, Ordering::Relaxed) {
                    0 => Err(Error::new(Code::Unavailable, "away")),
                    number => Ok(number),
                }
            };
            let error = cache.get_with("key", ask).await.unwrap_err();
            assert_eq!(
                (error.code, error.detail.as_str()),
                (Code::Unavailable, "away")
            );
            assert_eq!(cache.get_with("key", ask).await.unwrap(), 1);
        });
    }
}
