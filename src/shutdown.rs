//! The shutdown of a node, in two phases. While it drains it is not ready and serves everything, so that its clients
//! can notice. When it stops, its listening sockets are closed, and running work is finished or released. One
//! deadline holds for everything that stops.

use std::sync::OnceLock;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};
use tokio_util::sync::{CancellationToken, WaitForCancellationFuture};

use crate::config::Config;
use crate::error::{Error, Result};
use crate::retry::full_jitter;

/// The part of the grace period in which turns may end. The rest of them is released then.
const TURNS_PART: f64 = 0.6;
/// After the grace period, which may be zero: turns are released in any case.
const RELEASE_TIME: Duration = Duration::from_secs(1);

pub struct Shutdown {
    drain: Duration,
    grace: Duration,
    draining: CancellationToken,
    stopping: CancellationToken,
    drain_began: OnceLock<Instant>,
    stop_began: OnceLock<Instant>,
}

impl Shutdown {
    pub fn new(config: &Config) -> Self {
        Self {
            drain: config.drain,
            grace: config.shutdown_grace,
            draining: CancellationToken::new(),
            stopping: CancellationToken::new(),
            drain_began: OnceLock::new(),
            stop_began: OnceLock::new(),
        }
    }

    /// From now on the node is not ready, and its connections are not kept alive.
    pub fn begin_draining(&self) {
        self.drain_began.get_or_init(Instant::now);
        self.draining.cancel();
    }

    /// From now on no loop starts new work, and the deadline of running work is fixed.
    pub fn begin_stopping(&self) {
        self.begin_draining();
        self.stop_began.get_or_init(Instant::now);
        self.stopping.cancel();
    }

    pub fn is_draining(&self) -> bool {
        self.draining.is_cancelled()
    }

    pub fn is_stopping(&self) -> bool {
        self.stopping.is_cancelled()
    }

    pub fn stopping(&self) -> WaitForCancellationFuture<'_> {
        self.stopping.cancelled()
    }

    /// For a loop that runs until the node stops.
    pub fn stop_token(&self) -> CancellationToken {
        self.stopping.clone()
    }

    /// When the drain ends.
    pub fn drained_at(&self) -> Instant {
        *self.drain_began.get_or_init(Instant::now) + self.drain
    }

    /// When turns that still run are released.
    pub fn turns_end_at(&self) -> Instant {
        *self.stop_began.get_or_init(Instant::now) + self.grace.mul_f64(TURNS_PART)
    }

    /// When the node ends, even if work still runs.
    pub fn deadline(&self) -> Instant {
        *self.stop_began.get_or_init(Instant::now) + self.grace + RELEASE_TIME
    }

    /// Fails if no time is left for a turn.
    pub fn check_accepts_turns(&self) -> Result<()> {
        if self.is_stopping() && Instant::now() >= self.turns_end_at() {
            return Err(Error::shutting_down());
        }
        Ok(())
    }

    /// A moment in the second half of the drain: by then balancers have noticed.
    fn departure(&self) -> Instant {
        let end = self.drained_at();
        let earliest = Instant::now().max(end - self.drain / 2);
        earliest + full_jitter(end.saturating_duration_since(earliest))
    }
}

/// When an open stream sends its client to another node. Each has a moment of its own, so that the clients do not
/// all reconnect at once.
#[derive(Default)]
pub struct Departure {
    at: Option<Instant>,
}

impl Departure {
    /// Waits for that moment. The future can be dropped without a loss.
    pub async fn due(&mut self, shutdown: &Shutdown) {
        shutdown.draining.cancelled().await;
        let at = *self.at.get_or_insert_with(|| shutdown.departure());
        tokio::select! {
            () = sleep_until(at) => {}
            () = shutdown.stopping() => {}
        }
    }

    pub fn is_due(&mut self, shutdown: &Shutdown) -> bool {
        if !shutdown.is_draining() {
            return false;
        }
        let at = *self.at.get_or_insert_with(|| shutdown.departure());
        shutdown.is_stopping() || Instant::now() >= at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn begun(drain: Duration, ago: Duration) -> Shutdown {
        let ago = Instant::now() - ago;
        let shutdown = Shutdown {
            drain,
            grace: 10 * SECOND,
            draining: CancellationToken::new(),
            stopping: CancellationToken::new(),
            drain_began: OnceLock::from(ago),
            stop_began: OnceLock::from(ago),
        };
        shutdown.begin_draining();
        shutdown
    }

    #[test]
    fn streams_leave_one_by_one_in_the_second_half_of_the_drain() {
        let shutdown = begun(10 * SECOND, SECOND);
        let end = shutdown.drained_at();
        let mut times: Vec<Instant> = (0..100).map(|_| shutdown.departure()).collect();
        assert!(times.iter().all(|at| (end - 5 * SECOND..end).contains(at)));
        times.sort();
        assert!(times[50] > times[0] + SECOND && times[99] > times[50] + SECOND);
        // A stream that opens late leaves late, and not at once.
        let late = begun(10 * SECOND, 8 * SECOND);
        let now = Instant::now();
        let times = (0..100).map(|_| late.departure());
        assert!(times.filter(|at| *at > now + SECOND / 2).count() > 20);
    }

    #[tokio::test]
    async fn a_node_that_stops_takes_turns_as_long_as_they_have_time() {
        let soon = begun(Duration::ZERO, Duration::ZERO);
        assert!(soon.check_accepts_turns().is_ok() && !soon.is_stopping());
        soon.begin_stopping();
        assert!(soon.check_accepts_turns().is_ok());
        let late = begun(Duration::ZERO, 7 * SECOND);
        assert!(late.check_accepts_turns().is_ok(), "it only drains");
        late.begin_stopping();
        assert!(late.check_accepts_turns().is_err());
        let mut departure = Departure::default();
        departure.due(&late).await;
        assert!(departure.is_due(&late));
    }
}
