//! A cache of what the database said less than a second ago. Callers that miss together ask once: the others wait
//! for the same answer. An answer counts from before it was asked for, so no caller gets one that was older than the
//! TTL when the caller came.

use std::fmt;
use std::future::ready;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use moka::future::Cache;

use crate::clock::Clock;
use crate::error::{Error, Result};

/// What changes on another node (a key revoked, an issuer deleted, an agent changed) holds here within this.
const TTL: Duration = Duration::from_millis(800);
const CAPACITY: u64 = 10_000;
/// A key that nobody asks for is forgotten after this.
const IDLE_TTL: Duration = Duration::from_secs(60);

/// Time as a cached answer needs it: by a clock that never goes back, and by the node's own, which tests move.
#[derive(Debug, Clone, Copy)]
struct Moment {
    monotonic: Instant,
    wall: DateTime<Utc>,
}

impl Moment {
    /// Whether an answer that was asked for at `asked_at` is fresh now.
    fn is_within_ttl_of(self, asked_at: Self) -> bool {
        let age = (self.wall - asked_at.wall).to_std().unwrap_or_default();
        age < TTL && self.monotonic.saturating_duration_since(asked_at.monotonic) < TTL
    }
}

pub struct ShortCache<K, V> {
    clock: Clock,
    entries: Cache<K, Arc<Entry<V>>>,
}

/// What is known of one key.
struct Entry<V> {
    last: Mutex<Last<V>>,
    /// Held by the caller that asks. A caller that is dropped leaves the question to the next one.
    asking: tokio::sync::Mutex<()>,
}

struct Last<V> {
    answer: Option<Answer<V>>,
    failure: Option<Failure>,
    /// When the value was changed: answers from before are not used.
    changed_at: Option<Instant>,
}

struct Answer<V> {
    asked_at: Moment,
    value: V,
}

struct Failure {
    failed_at: Instant,
    error: Error,
}

impl<V> Default for Entry<V> {
    fn default() -> Self {
        let last = Last {
            answer: None,
            failure: None,
            changed_at: None,
        };
        Self {
            last: Mutex::new(last),
            asking: tokio::sync::Mutex::default(),
        }
    }
}

impl<V: Clone> Last<V> {
    /// The answer, for a caller that came at `came_at`.
    fn fresh(&self, came_at: Moment) -> Option<V> {
        let answer = self.answer.as_ref()?;
        let is_current = self
            .changed_at
            .is_none_or(|changed_at| changed_at < answer.asked_at.monotonic);
        let is_fresh = is_current && came_at.is_within_ttl_of(answer.asked_at);
        is_fresh.then(|| answer.value.clone())
    }

    /// The failure that a caller waited for which came at `came_at`.
    fn failure_since(&self, came_at: Moment) -> Option<Error> {
        let failure = self.failure.as_ref()?;
        (failure.failed_at >= came_at.monotonic).then(|| copy_of(&failure.error))
    }
}

impl<V> Entry<V> {
    fn last(&self) -> MutexGuard<'_, Last<V>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K, V> ShortCache<K, V>
where
    K: Eq + Hash + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
{
    pub fn new(clock: Clock) -> Self {
        Self {
            clock,
            entries: Cache::builder()
                .max_capacity(CAPACITY)
                .time_to_idle(IDLE_TTL)
                .build(),
        }
    }

    /// The cached answer, or that of `ask`, which runs once for all who miss together. A failure is not cached;
    /// those who waited for it get it too, so that a database that is away is not asked by each in turn.
    pub async fn get_with<F>(&self, key: K, ask: impl FnOnce() -> F) -> Result<V>
    where
        F: Future<Output = Result<V>>,
    {
        let came_at = self.now();
        let entry = self.entries.get_with(key, ready(Arc::default())).await;
        if let Some(value) = entry.last().fresh(came_at) {
            return Ok(value);
        }
        // Boxed: a hit should not carry the room that a miss needs.
        Box::pin(self.ask(&entry, came_at, ask)).await
    }

    async fn ask<F>(&self, entry: &Entry<V>, came_at: Moment, ask: impl FnOnce() -> F) -> Result<V>
    where
        F: Future<Output = Result<V>>,
    {
        let _asking = entry.asking.lock().await;
        {
            // However long the question took that this caller waited for, its answer is as good as one that the
            // caller would have found. So no one waits for more than one other question.
            let last = entry.last();
            if let Some(value) = last.fresh(came_at) {
                return Ok(value);
            }
            if let Some(error) = last.failure_since(came_at) {
                return Err(error);
            }
        }
        let asked_at = self.now();
        let outcome = ask().await;
        let mut last = entry.last();
        match &outcome {
            Ok(value) => {
                let value = value.clone();
                last.answer = Some(Answer { asked_at, value });
                last.failure = None;
            }
            Err(error) => {
                let error = copy_of(error);
                let failed_at = Instant::now();
                last.failure = Some(Failure { failed_at, error });
            }
        }
        outcome
    }

    /// The value has changed: no answer that was asked for before now is used again. Call it after the commit.
    pub async fn invalidate(&self, key: &K) {
        // An entry that comes into being later is asked for later.
        if let Some(entry) = self.entries.get(key).await {
            entry.last().changed_at = Some(Instant::now());
        }
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
fn copy_of(error: &Error) -> Error {
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
                cache.invalidate(&"key").await;
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

    #[test]
    fn those_who_wait_for_a_slow_question_share_its_answer() {
        block_on(async {
            let clock = Clock::system();
            let cache = ShortCache::new(clock.clone());
            let (asked, answer) = (AtomicUsize::new(0), Notify::new());
            let ask = || async {
                let number = asked.fetch_add(1, Ordering::Relaxed);
                answer.notified().await;
                Ok(number)
            };
            let waiting = join_all((0..5).map(|_| cache.get_with("key", ask)));
            let late = async {
                // The question has taken longer than the TTL. Two more come, and ask one question of their own.
                clock.advance(TTL);
                let late = join_all((0..2).map(|_| cache.get_with("key", ask)));
                let answers = async {
                    answer.notify_one();
                    tokio::task::yield_now().await;
                    answer.notify_one();
                };
                tokio::join!(late, answers).0
            };
            let (waiting, late) = tokio::join!(waiting, late);
            assert!(waiting.into_iter().all(|answer| answer.unwrap() == 0));
            assert!(late.into_iter().all(|answer| answer.unwrap() == 1));
            assert_eq!(asked.load(Ordering::Relaxed), 2);
        });
    }

    #[test]
    fn a_caller_that_leaves_leaves_the_question_to_the_next() {
        block_on(async {
            let cache = ShortCache::new(Clock::system());
            let leaving = (0..500).map(|_| cache.get_with("key", std::future::pending));
            let mut leaving: Vec<_> = leaving.map(Box::pin).collect();
            for call in &mut leaving {
                assert!(futures_util::poll!(call).is_pending());
            }
            let last = cache.get_with("key", async || Ok(7));
            let leave = async { leaving.drain(..).for_each(drop) };
            assert_eq!(tokio::join!(last, leave).0.unwrap(), 7);
        });
    }

    #[test]
    fn those_who_wait_for_a_failure_share_it() {
        block_on(async {
            let cache = ShortCache::<_, usize>::new(Clock::system());
            let asked = AtomicUsize::new(0);
            let ask = || async {
                tokio::task::yield_now().await;
                asked.fetch_add(1, Ordering::Relaxed);
                Err(Error::new(Code::Unavailable, "away"))
            };
            let answers = join_all((0..20).map(|_| cache.get_with("key", ask))).await;
            assert!(answers.into_iter().all(|answer| answer.is_err()));
            assert_eq!(asked.load(Ordering::Relaxed), 1);
        });
    }
}
