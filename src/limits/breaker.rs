//! Keeps requests from waiting for a Redis that does not answer: after a failure nobody asks for a
//! second, then one asks for all.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const PAUSE: Duration = Duration::from_secs(1);
const CLOSED: u64 = 0;

pub struct Breaker {
    began: Instant,
    /// Milliseconds since `began` until which nobody asks.
    open_until: AtomicU64,
}

impl Breaker {
    pub fn new() -> Self {
        Self {
            began: Instant::now(),
            open_until: AtomicU64::new(CLOSED),
        }
    }

    fn pause_from(&self, elapsed: Duration) -> u64 {
        u64::try_from((elapsed + PAUSE).as_millis()).unwrap_or(u64::MAX)
    }

    /// Whether the caller may ask now. While open, one caller a second may.
    pub fn lets_through(&self) -> bool {
        let until = self.open_until.load(Ordering::Relaxed);
        if until == CLOSED {
            return true;
        }
        let elapsed = self.began.elapsed();
        if elapsed.as_millis() < u128::from(until) {
            return false;
        }
        let next = self.pause_from(elapsed);
        let swapped =
            self.open_until
                .compare_exchange(until, next, Ordering::Relaxed, Ordering::Relaxed);
        swapped.is_ok()
    }

    pub fn open(&self) {
        let until = self.pause_from(self.began.elapsed());
        self.open_until.store(until, Ordering::Relaxed);
    }

    pub fn close(&self) {
        self.open_until.store(CLOSED, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_failure_nobody_asks_until_one_may_try() {
        let breaker = Breaker::new();
        assert!(breaker.lets_through());
        breaker.open();
        assert!(!breaker.lets_through());
        // As if the second were over.
        breaker.open_until.store(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(2));
        assert!(breaker.lets_through());
        assert!(!breaker.lets_through(), "only one tries");
        breaker.close();
        assert!(breaker.lets_through());
    }
}
