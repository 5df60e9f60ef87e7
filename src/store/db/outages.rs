//! When the database last did not answer this node. A lease that ran out meanwhile says nothing about its
//! holder.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

#[derive(Debug, Default)]
pub struct Outages {
    until: Mutex<Option<Instant>>,
}

impl Outages {
    /// The database did not answer just now; `grace` is what holders of leases get to renew them.
    pub fn note(&self, grace: Duration) {
        let mut until = self.until.lock().unwrap_or_else(PoisonError::into_inner);
        *until = Some(Instant::now() + grace);
    }

    pub fn is_recent(&self) -> bool {
        let until = *self.until.lock().unwrap_or_else(PoisonError::into_inner);
        until.is_some_and(|until| Instant::now() < until)
    }
}
