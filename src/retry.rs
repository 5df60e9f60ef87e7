//! Pauses between attempts: exponential backoff with full jitter, so that clients of a dependency that was away
//! do not all come back at one time. Whether an error is worth another attempt is decided by the caller.

use std::time::Duration;

use crate::crypto;

/// The pauses of one operation that is tried several times.
#[derive(Debug, Clone)]
pub struct Backoff {
    first: Duration,
    max: Duration,
    attempt: u32,
}

impl Backoff {
    /// The first pause is at most `first`, and each bound twice the one before, up to `max`.
    pub const fn new(first: Duration, max: Duration) -> Self {
        Self {
            first,
            max,
            attempt: 0,
        }
    }

    /// How long to wait before the next attempt.
    pub fn next_pause(&mut self) -> Duration {
        let bound = exponential(self.first, self.max, self.attempt);
        self.attempt = self.attempt.saturating_add(1);
        full_jitter(bound)
    }

    /// After a success: the next pause is a first one again.
    pub fn reset(&mut self) {
        self.attempt = 0;
    }
}

/// `first` doubled `attempt` times, and at most `max`. Without jitter: for schedules that are stored and tested.
pub fn exponential(first: Duration, max: Duration, attempt: u32) -> Duration {
    let factor = 1u32.checked_shl(attempt).unwrap_or(u32::MAX);
    first.saturating_mul(factor).min(max)
}

/// A random time below `bound`. Without randomness it is `bound`: a pause too long is better than none.
pub fn full_jitter(bound: Duration) -> Duration {
    match crypto::random() {
        Ok(bytes) => bound.mul_f64(f64::from(u32::from_be_bytes(bytes)) / 2f64.powi(32)),
        Err(_) => bound,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Duration = Duration::from_millis(100);
    const MAX: Duration = Duration::from_secs(1);

    #[test]
    fn bounds_double_up_to_the_longest() {
        let bounds: Vec<u128> = (0..6)
            .map(|attempt| exponential(FIRST, MAX, attempt).as_millis())
            .collect();
        assert_eq!(bounds, [100, 200, 400, 800, 1000, 1000]);
        for attempt in [31, 32, 1000, u32::MAX] {
            assert_eq!(exponential(FIRST, MAX, attempt), MAX);
        }
        assert_eq!(exponential(Duration::ZERO, MAX, 5), Duration::ZERO);
    }

    #[test]
    fn every_pause_is_below_its_bound_and_they_differ() {
        let mut firsts = Vec::new();
        for _ in 0..200 {
            let mut backoff = Backoff::new(FIRST, MAX);
            for attempt in 0..8 {
                let pause = backoff.next_pause();
                assert!(pause < exponential(FIRST, MAX, attempt), "{pause:?}");
                if attempt == 0 {
                    firsts.push(pause);
                }
            }
        }
        assert!(firsts.iter().any(|pause| *pause < FIRST / 4));
        assert!(firsts.iter().any(|pause| *pause > FIRST * 3 / 4));
    }

    #[test]
    fn after_a_success_it_begins_with_the_first_pause() {
        let mut backoff = Backoff::new(FIRST, MAX);
        for _ in 0..10 {
            backoff.next_pause();
        }
        backoff.reset();
        assert!(backoff.next_pause() < FIRST);
    }
}
