//! Bodies of answers whose clients must read them. The server has no deadline for writing: what a body holds is
//! taken from it by a task of its own when its client has taken nothing for a while, and the body then breaks off.

use std::cell::RefCell;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use actix_web::rt;
use actix_web::web::Bytes;
use futures_util::Stream;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use crate::error::{Code, Error, Result};

/// How long a client may take nothing.
const STALL_LIMIT: Duration = Duration::from_secs(30);

type Source = Pin<Box<dyn Stream<Item = Result<Bytes>>>>;

/// When a client is too slow.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// For one piece.
    piece: Duration,
    /// For all of them.
    whole: Option<Duration>,
}

impl Patience {
    /// For a body that is written while it is read.
    pub const fn endless() -> Self {
        Self {
            piece: STALL_LIMIT,
            whole: None,
        }
    }

    pub const fn within(whole: Duration) -> Self {
        Self {
            piece: STALL_LIMIT,
            whole: Some(whole),
        }
    }
}

/// A body that is watched.
pub struct WatchedBody {
    state: Rc<RefCell<State>>,
    watch: JoinHandle<()>,
}

struct State {
    /// None when it has ended or was broken off.
    source: Option<Source>,
    is_broken: bool,
    /// When the client last took a piece. None while it waits for one.
    taken_at: Option<Instant>,
    waker: Option<Waker>,
}

impl WatchedBody {
    /// What `source` holds is dropped when its client is too slow, and when `refused` is over.
    pub fn new(
        source: impl Stream<Item = Result<Bytes>> + 'static,
        patience: Patience,
        refused: impl Future<Output = ()> + 'static,
    ) -> Self {
        let state = Rc::new(RefCell::new(State {
            source: Some(Box::pin(source)),
            is_broken: false,
            taken_at: Some(Instant::now()),
            waker: None,
        }));
        let watched = state.clone();
        let watch = rt::spawn(async move {
            tokio::select! {
                () = stalled(&watched, patience) => {}
                () = refused => {}
            }
            break_off(&watched);
        });
        Self { state, watch }
    }
}

/// Waits until the client is too slow.
async fn stalled(state: &RefCell<State>, patience: Patience) {
    let end = patience.whole.map(|whole| Instant::now() + whole);
    loop {
        let taken_at = state.borrow().taken_at.unwrap_or_else(Instant::now);
        let due = taken_at + patience.piece;
        let due = end.map_or(due, |end| end.min(due));
        if Instant::now() >= due {
            return;
        }
        sleep_until(due).await;
    }
}

fn break_off(state: &RefCell<State>) {
    let (source, waker) = {
        let mut state = state.borrow_mut();
        state.is_broken = state.source.is_some();
        (state.source.take(), state.waker.take())
    };
    drop(source);
    if let Some(waker) = waker {
        waker.wake();
    }
}

impl Stream for WatchedBody {
    type Item = Result<Bytes>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut state = self.state.borrow_mut();
        let Some(source) = &mut state.source else {
            let broken = state.is_broken;
            state.is_broken = false;
            let detail = "the response was not read in time, or access to it has ended";
            return Poll::Ready(broken.then(|| Err(Error::new(Code::RequestTimeout, detail))));
        };
        let next = source.as_mut().poll_next(context);
        if next.is_pending() {
            state.taken_at = None;
            state.waker = Some(context.waker().clone());
        } else {
            state.taken_at = Some(Instant::now());
        }
        if let Poll::Ready(None) = next {
            state.source = None;
        }
        next
    }
}

impl Drop for WatchedBody {
    fn drop(&mut self) {
        self.watch.abort();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use futures_util::{StreamExt, stream};
    use tokio::task::LocalSet;
    use tokio::time::sleep;

    use super::*;

    const SHORT: Duration = Duration::from_millis(100);

    /// An endless body that holds what is answered with it.
    fn held(patience: Patience, pause: Duration) -> (WatchedBody, Arc<()>) {
        let held = Arc::new(());
        let source = stream::unfold(held.clone(), move |held| async move {
            sleep(pause).await;
            Some((Ok(Bytes::from_static(b"piece")), held))
        });
        let watched = WatchedBody::new(source, patience, std::future::pending());
        (watched, held)
    }

    async fn released(held: &Arc<()>) {
        while Arc::strong_count(held) > 1 {
            sleep(Duration::from_millis(5)).await;
        }
    }

    #[tokio::test]
    async fn what_a_client_does_not_read_is_released_and_breaks_off() {
        let test = async {
            let patience = Patience {
                piece: SHORT,
                whole: None,
            };
            let (mut watched, held) = held(patience, Duration::ZERO);
            assert!(watched.next().await.unwrap().is_ok());
            released(&held).await;
            assert!(watched.next().await.unwrap().is_err());
            assert!(watched.next().await.is_none());
        };
        LocalSet::new().run_until(test).await;
    }

    #[tokio::test]
    async fn a_client_that_waits_for_the_next_piece_is_not_slow() {
        let test = async {
            let patience = Patience {
                piece: SHORT,
                whole: None,
            };
            let (mut watched, _held) = held(patience, SHORT * 3);
            assert!(watched.next().await.unwrap().is_ok());
            assert!(watched.next().await.unwrap().is_ok());
        };
        LocalSet::new().run_until(test).await;
    }

    #[tokio::test]
    async fn a_client_that_reads_little_at_a_time_is_broken_off_in_the_end() {
        let test = async {
            let patience = Patience {
                piece: SHORT,
                whole: Some(SHORT * 4),
            };
            let (mut watched, held) = held(patience, SHORT / 5);
            let begun = Instant::now();
            while watched.next().await.is_some_and(|piece| piece.is_ok()) {}
            assert!(begun.elapsed() >= SHORT * 3);
            released(&held).await;
        };
        LocalSet::new().run_until(test).await;
    }
}
