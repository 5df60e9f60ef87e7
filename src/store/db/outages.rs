//! When the database last did not answer this node. A lease that expired meanwhile says nothing about its
//! owner.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

#[derive(Debug, Default)]
pub struct Outages {
    until: Mutex<Option<Instant>>,
}

impl Outages {
    /// Records that the database has just not answered. Owners of leases have `grace` to renew them.
    pub fn record(&self, grace: Duration) {
        let mut until = self.until.lock().unwrap_or_else(PoisonError::into_inner);
        *until = Some(Instant::now() + grace);
    }

    pub fn is_recent(&self) -> bool {
        let until = *self.until.lock().unwrap_or_else(PoisonError::into_inner);
        until.is_some_and(|until| Instant::now() < until)
    }
}
