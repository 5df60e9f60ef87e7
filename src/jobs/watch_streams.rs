//! Keeps the open streams of this node right, all of them together: finds events whose notification was lost, and
//! rechecks the rights of the readers.

use std::time::{Duration, Instant};

use futures_util::FutureExt;
use tokio_util::sync::CancellationToken;

use super::{QUERY_TIMEOUT, within};
use crate::app::App;
use crate::notifications::Missed;
use crate::streams::RECHECK_EVERY;

const TICK: Duration = Duration::from_secs(1);
/// Further conversations that become unsure meanwhile are checked in the same query.
const GATHER: Duration = Duration::from_millis(50);
/// The poll interval without any notification: notifications can be lost.
const POLL_EVERY: Duration = Duration::from_secs(30);
/// Turns can end without an event: in a deleted conversation, or a suspended tenant.
const POLL_TURNS_EVERY: Duration = Duration::from_secs(5);

/// Polls for missed events until `stop` is cancelled.
pub async fn poll_events(app: App, stop: CancellationToken) {
    let mut last = LastPolls {
        all: Instant::now(),
        turns: Instant::now(),
    };
    while !stop.is_cancelled() {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(TICK) => {}
            () = app.notifications.has_missed() => tokio::time::sleep(GATHER).await,
        }
        let polling = last.poll(&app);
        warn(within(QUERY_TIMEOUT, polling.map(Ok)).await);
    }
}

/// The times of the last polls.
struct LastPolls {
    all: Instant,
    turns: Instant,
}

impl LastPolls {
    async fn poll(&mut self, app: &App) {
        let tails = &app.streams.tails;
        let Missed { all, conversations } = app.notifications.take_missed();
        // Without the subscription to other nodes, polling is how their events arrive.
        let disconnected = !app.notifications.is_connected();
        if all || disconnected || self.all.elapsed() >= POLL_EVERY {
            self.all = Instant::now();
            warn(tails.wake_missed(&app.db, None).await);
        } else if !conversations.is_empty() {
            warn(tails.wake_missed(&app.db, Some(&conversations)).await);
        }
        if disconnected || self.turns.elapsed() >= POLL_TURNS_EVERY {
            self.turns = Instant::now();
            warn(tails.wake_ended_turns(&app.db).await);
            tails.drop_read_events();
        }
    }
}

/// Rechecks the rights of readers until `stop` is cancelled.
pub async fn check_rights(app: App, stop: CancellationToken) {
    while !stop.is_cancelled() {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(RECHECK_EVERY) => {}
        }
        let checking = async {
            app.streams.credentials.renew(&app.verifiers).await;
            app.streams.rights.renew(&app.db, app.clock.now()).await
        };
        warn(within(QUERY_TIMEOUT, checking).await);
    }
}

fn warn(outcome: crate::error::Result<()>) {
    if let Err(error) = outcome {
        tracing::warn!(error = %error, cause = ?error.cause, "stream watch failed");
    }
}
