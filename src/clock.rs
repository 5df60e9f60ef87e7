//! The one clock. Every comparison of times gets its "now" from here, so that a test can move it.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use chrono::{DateTime, SubsecRound, Utc};

/// The wall clock, plus an offset that only tests move. All clones share the offset.
#[derive(Debug, Clone, Default)]
pub struct Clock {
    offset_ms: Arc<AtomicI64>,
}

impl Clock {
    pub fn system() -> Self {
        Self::default()
    }

    /// Now, in the microseconds of Postgres: a stored time compares equal to the given one.
    #[allow(clippy::disallowed_methods, reason = "the home of the clock")]
    pub fn now(&self) -> DateTime<Utc> {
        let offset = chrono::Duration::milliseconds(self.offset_ms.load(Ordering::Relaxed));
        (Utc::now() + offset).trunc_subsecs(6)
    }

    /// Moves this clock and all its clones forward.
    pub fn advance(&self, by: Duration) {
        let by = i64::try_from(by.as_millis()).unwrap_or(i64::MAX);
        self.offset_ms.fetch_add(by, Ordering::Relaxed);
    }
}
