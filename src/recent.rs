//! Recent actions on this node, so that a repetition is not written again.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Mutex, PoisonError};

use chrono::{DateTime, TimeDelta, Utc};

/// Above it, expired entries are dropped.
const CAPACITY: usize = 10_000;

pub struct Recent<K> {
    ttl: TimeDelta,
    noted: Mutex<HashMap<K, DateTime<Utc>>>,
}

impl<K: Eq + Hash> Recent<K> {
    pub fn new(ttl: TimeDelta) -> Self {
        Self {
            ttl,
            noted: Mutex::default(),
        }
    }

    pub fn contains(&self, key: &K, now: DateTime<Utc>) -> bool {
        let noted = self.noted.lock().unwrap_or_else(PoisonError::into_inner);
        noted.get(key).is_some_and(|at| self.is_recent(*at, now))
    }

    pub fn note(&self, key: K, now: DateTime<Utc>) {
        let mut noted = self.noted.lock().unwrap_or_else(PoisonError::into_inner);
        if noted.len() >= CAPACITY {
            noted.retain(|_, at| self.is_recent(*at, now));
        }
        // A repeated write costs less than more memory than this.
        if noted.len() < CAPACITY {
            noted.insert(key, now);
        }
    }

    fn is_recent(&self, at: DateTime<Utc>, now: DateTime<Utc>) -> bool {
        now >= at && now - at < self.ttl
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_lasts_for_its_time_and_takes_so_much_memory() {
        let recent = Recent::new(TimeDelta::seconds(60));
        let start = DateTime::UNIX_EPOCH;
        recent.note(0, start);
        assert!(recent.contains(&0, start + TimeDelta::seconds(59)));
        assert!(!recent.contains(&0, start + TimeDelta::seconds(60)));
        assert!(!recent.contains(&1, start));
        for key in 0..3 * CAPACITY {
            recent.note(key, start);
        }
        assert!(!recent.contains(&(3 * CAPACITY - 1), start));
        recent.note(3 * CAPACITY, start + TimeDelta::seconds(60));
        assert!(recent.contains(&(3 * CAPACITY), start + TimeDelta::seconds(60)));
    }
}
