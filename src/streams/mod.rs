//! What the open streams of a node share: one reader for each conversation, one check for each reader's
//! right and one for each credential. An idle stream costs no transaction of its own. Nothing here is the
//! truth: events are read, and rights are checked, in Postgres.

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

/// A verdict that is older is made again by the stream itself. Streams end within five seconds after their
/// reader lost its right.
pub const FRESH: Duration = Duration::from_secs(3);
/// How often the verdicts of all open streams are renewed together.
pub const RENEWED: Duration = Duration::from_secs(2);
/// How many conversations or rights one statement looks at.
const BATCH: usize = 500;

/// What the streams of one node share.
#[derive(Default)]
pub struct Streams {
    pub tails: Tails,
    pub rights: Rights,
    pub credentials: Credentials,
}

/// What was found at the last check, and when; whoever holds one hears of a refusal at once.
struct Verdict {
    state: watch::Sender<State>,
}

#[derive(Debug, Clone)]
struct State {
    /// When the check that found this began: it saw everything that was committed before.
    checked_at: Option<Instant>,
    /// When somebody last tried: while the database is away, the last verdict stands.
    tried_at: Instant,
    refused: Option<(Code, String)>,
}

impl Verdict {
    /// Of somebody who was just let in.
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

    /// Whether somebody tried less than `FRESH` ago.
    fn is_fresh(&self) -> bool {
        self.state.borrow().tried_at.elapsed() < FRESH
    }

    fn is_checked_since(&self, since: Instant) -> bool {
        let checked_at = self.state.borrow().checked_at;
        checked_at.is_some_and(|checked_at| checked_at >= since)
    }

    /// A refusal stands: whoever has lost a right does not read on because it came back.
    fn set(&self, began: Instant, found: Result<()>) {
        self.state.send_if_modified(|state| {
            let refused = match found {
                Ok(()) => None,
                // Nobody could ask: the verdict grows old, and its readers wait.
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

    /// Waits until it is a refusal.
    async fn refused(&self) {
        let mut state = self.state.subscribe();
        // The sender lives as long as this.
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
        verdict.set(opened - FRESH, Err(away()));
        assert!(!verdict.is_fresh());
        verdict.set(opened, Err(away()));
        assert!(verdict.is_fresh() && verdict.read().is_ok());
        assert!(!verdict.is_checked_since(opened));
        let verdict = Verdict::new();
        verdict.set(opened - FRESH, Err(away()));
        verdict.set(opened, Err(Error::busy("the tenant is busy")));
        assert!(!verdict.is_fresh() && verdict.read().is_ok());
        verdict.set(opened, Err(Error::not_found("session")));
        verdict.refused().await;
        verdict.set(opened, Ok(()));
        assert!(verdict.is_refused() && verdict.is_checked_since(opened));
    }
}
