//! The shared state of a node's open streams: one reader for each conversation, one check for each reader's right
//! and one for each credential. An idle stream costs no transaction of its own. Postgres alone decides: events are
//! read, and rights are checked, there.

mod credentials;
mod rights;
mod tail;

pub use credentials::{CheckedCredential, Credentials};
pub use rights::{Right, Rights, Subject};
pub use tail::{MAX_BATCH, Read, Tail, Tails};

use std::sync::Mutex;
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::error::{Code, Error, Result};

/// A stream renews an older verdict itself. Streams end within five seconds after their reader lost the right.
pub const VERDICT_TTL: Duration = Duration::from_secs(3);
/// How often the verdicts of all open streams are renewed together.
pub const RECHECK_EVERY: Duration = Duration::from_secs(2);
/// Conversations or rights per statement.
const BATCH: usize = 500;

/// The shared state of one node's streams.
#[derive(Default)]
pub struct Streams {
    pub tails: Tails,
    pub rights: Rights,
    pub credentials: Credentials,
}

/// The result of the last check and its time. Every holder is notified of a refusal at once.
struct Verdict {
    state: watch::Sender<State>,
}

#[derive(Debug, Clone)]
struct State {
    /// When the check with this result began: it saw everything that was committed before.
    checked_at: Option<Instant>,
    /// The time of the last attempt: during an outage of the database, the last verdict stands.
    tried_at: Instant,
    refused: Option<(Code, String)>,
}

impl Verdict {
    /// The verdict for a reader that was just accepted.
    fn new() -> Self {
        let state = State {
            checked_at: None,
            tried_at: Instant::now(),
            refused: None,
        };
        Self {
            state: watch::Sender::new(state),
        }
    }

    fn is_refused(&self) -> bool {
        self.state.borrow().refused.is_some()
    }

    fn read(&self) -> Result<()> {
        match &self.state.borrow().refused {
            Some((code, detail)) => Err(Error::new(*code, detail.clone())),
            None => Ok(()),
        }
    }

    /// Whether the last attempt is more recent than `VERDICT_TTL`.
    fn is_fresh(&self) -> bool {
        self.state.borrow().tried_at.elapsed() < VERDICT_TTL
    }

    fn is_checked_since(&self, since: Instant) -> bool {
        let checked_at = self.state.borrow().checked_at;
        checked_at.is_some_and(|checked_at| checked_at >= since)
    }

    /// A refusal is final: a reader that lost a right does not read on when it comes back.
    fn set(&self, began: Instant, found: Result<()>) {
        self.state.send_if_modified(|state| {
            let refused = match found {
                Ok(()) => None,
                // No check was possible: the verdict gets stale, and its readers wait.
                Err(error) if error.code == Code::Busy => return false,
                Err(error) if error.is_outage() => {
                    state.tried_at = began;
                    return false;
                }
                Err(error) => Some((error.code, error.detail)),
            };
            state.tried_at = began;
            state.checked_at = Some(began);
            if state.refused.is_none() {
                state.refused = refused;
            }
            state.refused.is_some()
        });
    }

    /// Waits for a refusal.
    async fn refused(&self) {
        let mut state = self.state.subscribe();
        // `self` holds the sender, so the wait never ends by its drop.
        let refused = state.wait_for(|state| state.refused.is_some());
        drop(refused.await);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_refusal_stands_and_an_absent_database_refuses_nobody() {
        let verdict = Verdict::new();
        let opened = Instant::now();
        let away = || Error::unavailable("the database", anyhow::anyhow!("gone"));
        assert!(verdict.is_fresh() && verdict.read().is_ok());
        assert!(!verdict.is_checked_since(opened));
        verdict.set(opened - VERDICT_TTL, Err(away()));
        assert!(!verdict.is_fresh());
        verdict.set(opened, Err(away()));
        assert!(verdict.is_fresh() && verdict.read().is_ok());
        assert!(!verdict.is_checked_since(opened));
        let verdict = Verdict::new();
        verdict.set(opened - VERDICT_TTL, Err(away()));
        verdict.set(opened, Err(Error::busy("the tenant is busy")));
        assert!(!verdict.is_fresh() && verdict.read().is_ok());
        verdict.set(opened, Err(Error::not_found("session")));
        verdict.refused().await;
        verdict.set(opened, Ok(()));
        assert!(verdict.is_refused() && verdict.is_checked_since(opened));
    }
}
