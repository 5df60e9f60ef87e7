//! What this node holds of each limit in the present window. Memory only: locks are held for a few
//! instructions and never while something is awaited.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::{Bucket, Demand};
use crate::ids::TenantId;
use crate::redis::limits::Grant;

const SHARDS: usize = 64;
/// More buckets than this in one shard push others out: those ask Redis again.
const MAX_IN_SHARD: usize = 50_000 / SHARDS;

pub type Key = (TenantId, Bucket);

/// Answered when the ask it belongs to has ended, also when it ended badly.
pub type PendingAnswer = watch::Receiver<()>;

/// What a bucket can do about a demand.
pub enum Step {
    /// Spent; this much of the limit is left, as far as this node knows.
    Granted { remaining: u32 },
    /// The window has no more.
    Refused,
    /// Somebody asks Redis already: wait for that, and look again.
    Wait(PendingAnswer),
    /// Ask Redis for `amount`, settle, drop `done`.
    Ask {
        amount: u64,
        done: watch::Sender<()>,
        asked: PendingAnswer,
    },
}

/// Whether Redis may be asked.
pub enum Source<'a> {
    /// If the function says so; it is asked only when it matters. Otherwise this node has its share.
    RedisIf(&'a (dyn Fn() -> bool + Sync)),
    /// Redis has had its chance.
    Share,
}

/// One limit in one window. Without a window of its own it is as new.
#[derive(Default)]
struct LocalGrant {
    window: i64,
    /// Granted by Redis, and not yet spent.
    left: u64,
    /// Spent by this node in this window.
    spent: u64,
    /// Spent without Redis: settled with the next grant.
    owed: u64,
    /// Redis has no more for this limit, or a lower one.
    refused_limit: u32,
    /// What all nodes had used when Redis last answered.
    used: u64,
    asking: Option<PendingAnswer>,
}

impl LocalGrant {
    fn enter(&mut self, window: i64) {
        if window > self.window {
            *self = Self {
                window,
                ..Self::default()
            };
        }
    }

    fn step(&mut self, demand: &Demand, share: u64, source: &Source) -> Step {
        let limit = u64::from(demand.limit);
        let cost = u64::from(demand.cost);
        // Also after a limit was lowered: no node alone passes it.
        if self.spent + cost > limit {
            return Step::Refused;
        }
        if self.left >= cost {
            self.left -= cost;
            self.spent += cost;
            return Step::Granted {
                remaining: self.remaining(limit),
            };
        }
        if self.refused_limit >= demand.limit {
            return Step::Refused;
        }
        let alive = |asked: &PendingAnswer| asked.has_changed().is_ok();
        match (self.asking.as_ref().filter(|asked| alive(asked)), source) {
            (Some(asked), Source::RedisIf(may)) if may() => Step::Wait(asked.clone()),
            (None, Source::RedisIf(may)) if may() => {
                let (done, asked) = watch::channel(());
                self.asking = Some(asked.clone());
                let amount = chunk(demand).max(cost) + self.owed;
                Step::Ask {
                    amount,
                    done,
                    asked,
                }
            }
            _ => self.take_of_share(cost, share),
        }
    }

    fn take_of_share(&mut self, cost: u64, share: u64) -> Step {
        if self.spent + cost > share {
            return Step::Refused;
        }
        self.spent += cost;
        self.owed += cost;
        Step::Granted {
            remaining: narrow(share - self.spent),
        }
    }

    fn remaining(&self, limit: u64) -> u32 {
        let not_taken = limit.saturating_sub(self.used);
        narrow((self.left + not_taken).min(limit - self.spent))
    }

    fn settle(&mut self, limit: u32, amount: u64, grant: Grant) {
        let paid = self.owed.min(grant.granted);
        self.owed -= paid;
        self.left += grant.granted - paid;
        self.used = grant.used;
        if grant.granted < amount {
            self.refused_limit = self.refused_limit.max(limit);
        }
    }
}

/// A fiftieth of the limit: few asks, and little is left unspent on a node that others could use. Requests are
/// spent one by one, tokens by the hundred.
fn chunk(demand: &Demand) -> u64 {
    let most = match demand.bucket {
        Bucket::Tokens => u32::MAX,
        Bucket::Requests
        | Bucket::KeyRequests(_)
        | Bucket::UserRequests(_)
        | Bucket::NewIdentities => 100,
    };
    u64::from((demand.limit / 50).clamp(1, most))
}

fn narrow(count: u64) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

pub struct Buckets {
    hasher: RandomState,
    shards: Vec<Mutex<HashMap<Key, LocalGrant>>>,
}

impl Buckets {
    pub fn new() -> Self {
        Self {
            hasher: RandomState::new(),
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
        }
    }

    fn shard(&self, key: &Key) -> MutexGuard<'_, HashMap<Key, LocalGrant>> {
        let place = self.hasher.hash_one(key) as usize % SHARDS;
        // Counts are never half-written: a panic elsewhere leaves them good.
        self.shards[place]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Spends what `demand` costs, or says what to do for it.
    pub fn step(
        &self,
        key: Key,
        window: i64,
        demand: &Demand,
        share: u64,
        source: &Source,
    ) -> Step {
        let mut shard = self.shard(&key);
        if shard.len() >= MAX_IN_SHARD && !shard.contains_key(&key) {
            make_room(&mut shard, key.1, window);
        }
        let held = shard.entry(key).or_default();
        held.enter(window);
        held.step(demand, share, source)
    }

    /// Spends what `demand` costs if this node has it already.
    pub fn take_held(&self, key: Key, window: i64, demand: &Demand) -> bool {
        let cost = u64::from(demand.cost);
        match self.shard(&key).get_mut(&key) {
            Some(held) if held.window == window && held.left >= cost => {
                held.left -= cost;
                held.spent += cost;
                true
            }
            Some(_) | None => false,
        }
    }

    /// Takes back what another limit of the same request refused.
    pub fn give_back(&self, key: Key, window: i64, cost: u32) {
        if let Some(held) = self.shard(&key).get_mut(&key)
            && held.window == window
        {
            held.spent = held.spent.saturating_sub(cost.into());
            held.left += u64::from(cost);
        }
    }

    /// Enters what Redis answered to an ask for `amount`; nothing if it did not.
    pub fn settle(&self, key: Key, window: i64, limit: u32, amount: u64, grant: Option<Grant>) {
        if let Some(held) = self.shard(&key).get_mut(&key)
            && held.window == window
        {
            held.asking = None;
            if let Some(grant) = grant {
                held.settle(limit, amount, grant);
            }
        }
    }

    /// Forgets windows that are over.
    pub fn forget_history(&self, now: i64) {
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            shard.retain(|(_, bucket), held| held.window >= bucket.window_at(now));
            shard.shrink_to(MAX_IN_SHARD / 16);
        }
    }
}

/// Windows are numbered by their own length: only those of the same length can be over.
fn make_room(shard: &mut HashMap<Key, LocalGrant>, wanted: Bucket, window: i64) {
    let length = wanted.window_seconds();
    shard.retain(|(_, bucket), held| bucket.window_seconds() != length || held.window >= window);
    if shard.len() >= MAX_IN_SHARD
        && let Some(any) = shard.keys().next().copied()
    {
        shard.remove(&any);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: u32 = 100;

    fn demand(limit: u32) -> Demand {
        Demand {
            bucket: Bucket::Requests,
            limit,
            cost: 1,
        }
    }

    fn ask(held: &mut LocalGrant, limit: u32) -> Step {
        held.step(&demand(limit), 50, &Source::RedisIf(&|| true))
    }

    fn grant(held: &mut LocalGrant, limit: u32, granted: u64, used: u64) {
        let Step::Ask { amount, .. } = ask(held, limit) else {
            panic!("did not ask");
        };
        held.asking = None;
        held.settle(limit, amount, Grant { granted, used });
    }

    #[test]
    fn a_chunk_is_spent_without_asking_and_an_empty_window_is_not_asked_again() {
        let mut held = LocalGrant::default();
        grant(&mut held, LIMIT, 2, 98);
        assert!(matches!(
            ask(&mut held, LIMIT),
            Step::Granted { remaining: 3 }
        ));
        assert!(matches!(
            ask(&mut held, LIMIT),
            Step::Granted { remaining: 2 }
        ));
        grant(&mut held, LIMIT, 0, 100);
        assert!(matches!(ask(&mut held, LIMIT), Step::Refused));
        // A raised limit is asked for; the lower one stays refused.
        assert!(matches!(ask(&mut held, LIMIT + 1), Step::Ask { .. }));
        assert!(matches!(ask(&mut held, LIMIT), Step::Refused));
        held.enter(1);
        assert!(matches!(ask(&mut held, LIMIT), Step::Ask { .. }));
    }

    #[test]
    fn one_asks_and_the_others_wait() {
        let mut held = LocalGrant::default();
        let Step::Ask { done, .. } = ask(&mut held, LIMIT) else {
            panic!("did not ask");
        };
        assert!(matches!(ask(&mut held, LIMIT), Step::Wait(_)));
        // The one that asked died without an answer.
        drop(done);
        assert!(matches!(ask(&mut held, LIMIT), Step::Ask { .. }));
    }

    #[test]
    fn without_redis_a_node_has_its_share_and_settles_it_later() {
        let mut held = LocalGrant::default();
        for _ in 0..50 {
            let step = held.step(&demand(LIMIT), 50, &Source::Share);
            assert!(matches!(step, Step::Granted { .. }));
        }
        let step = held.step(&demand(LIMIT), 50, &Source::Share);
        assert!(matches!(step, Step::Refused));
        let Step::Ask { amount, .. } = ask(&mut held, LIMIT) else {
            panic!("did not ask");
        };
        assert_eq!(amount, 52);
        held.settle(
            LIMIT,
            amount,
            Grant {
                granted: 52,
                used: 52,
            },
        );
        assert_eq!((held.left, held.owed), (2, 0));
    }

    #[test]
    fn a_lowered_limit_holds_for_what_a_node_has_already() {
        let mut held = LocalGrant::default();
        grant(&mut held, 5000, 100, 100);
        for _ in 0..3 {
            assert!(matches!(ask(&mut held, 3), Step::Granted { .. }));
        }
        assert!(matches!(ask(&mut held, 3), Step::Refused));
        assert!(matches!(ask(&mut held, 5000), Step::Granted { .. }));
    }

    #[test]
    fn the_number_of_buckets_is_bounded_and_past_windows_go() {
        let buckets = Buckets::new();
        let tenant = TenantId::generate();
        let fill = |window| {
            for _ in 0..60_000 {
                let key = (
                    tenant,
                    Bucket::KeyRequests(crate::ids::ApiKeyId::generate()),
                );
                buckets.step(key, window, &demand(LIMIT), 50, &Source::Share);
            }
            let sizes = buckets.shards.iter().map(|s| s.lock().unwrap().len());
            assert!(sizes.sum::<usize>() <= 50_000);
        };
        fill(0);
        fill(1);
        buckets.forget_history(120);
        assert!(buckets.shards.iter().all(|s| s.lock().unwrap().is_empty()));
    }
}
