//! Keeps a model server that fails from being asked again and again: after some failures in a row nobody
//! asks for a while, then one asks for all. And how many retries it may be given: a share of its requests,
//! so that a struggling server is not asked three times as much.

use std::time::{Duration, Instant};

const FAILURES: u32 = 5;
const PAUSE: Duration = Duration::from_secs(10);
/// A retry is earned by so many requests.
const REQUESTS_FOR_A_RETRY: u32 = 10;
const MOST_RETRIES: u32 = 10;

#[derive(Debug)]
pub struct Breaker {
    failures: u32,
    open_until: Option<Instant>,
    /// In tenths.
    retries: u32,
}

impl Default for Breaker {
    fn default() -> Self {
        Self {
            failures: 0,
            open_until: None,
            retries: MOST_RETRIES * REQUESTS_FOR_A_RETRY,
        }
    }
}

impl Breaker {
    /// Whether it may be asked at `now`; `Err` says how long not. While open, one may try each pause.
    pub fn admit(&mut self, now: Instant) -> Result<(), Duration> {
        if let Some(until) = self.open_until {
            if now < until {
                return Err(until - now);
            }
            self.open_until = Some(now + PAUSE);
        }
        self.retries = (self.retries + 1).min(MOST_RETRIES * REQUESTS_FOR_A_RETRY);
        Ok(())
    }

    pub fn succeeded(&mut self) {
        self.failures = 0;
        self.open_until = None;
    }

    pub fn failed(&mut self, now: Instant) {
        self.failures += 1;
        if self.failures >= FAILURES {
            self.open_until = Some(now + PAUSE);
        }
    }

    /// Takes a retry of the budget.
    pub fn take_retry(&mut self) -> bool {
        let left = self.retries.checked_sub(REQUESTS_FOR_A_RETRY);
        if let Some(left) = left {
            self.retries = left;
        }
        left.is_some()
    }

    /// Whether nothing is remembered that matters.
    pub fn is_idle(&self) -> bool {
        self.failures == 0 && self.open_until.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_failures_in_a_row_nobody_asks_until_one_may_try() {
        let mut breaker = Breaker::default();
        let now = Instant::now();
        for _ in 0..FAILURES - 1 {
            breaker.failed(now);
        }
        assert_eq!(breaker.admit(now), Ok(()));
        breaker.succeeded();
        for _ in 0..FAILURES {
            assert_eq!(breaker.admit(now), Ok(()));
            breaker.failed(now);
        }
        assert_eq!(breaker.admit(now), Err(PAUSE));
        let later = now + PAUSE;
        assert_eq!(breaker.admit(later), Ok(()));
        assert_eq!(breaker.admit(later), Err(PAUSE), "only one tries");
        breaker.succeeded();
        assert_eq!(breaker.admit(later), Ok(()));
    }

    #[test]
    fn retries_are_a_tenth_of_the_requests() {
        let mut breaker = Breaker::default();
        let now = Instant::now();
        let first = (0..100).filter(|_| breaker.take_retry()).count();
        assert_eq!(first, MOST_RETRIES as usize);
        let mut taken = 0;
        for _ in 0..1000 {
            breaker.admit(now).unwrap();
            taken += u32::from(breaker.take_retry());
        }
        assert_eq!(taken, 100);
    }
}
