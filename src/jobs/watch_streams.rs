//! Keeps the open streams of this node right, for all of them together: whether there is news that nobody
//! told, and whether their readers may still read.

use std::time::{Duration, Instant};

use futures_util::FutureExt;
use tokio_util::sync::CancellationToken;

use super::{LOOK, within};
use crate::app::App;
use crate::notifications::Unsure;
use crate::streams::RENEWED;

const TICK: Duration = Duration::from_secs(1);
/// Others that become unsure meanwhile are looked at together.
const GATHER: Duration = Duration::from_millis(50);
/// How often is looked although nobody said that there is news: notifications can be lost.
const SAFETY: Duration = Duration::from_secs(30);
/// Turns can be ended without an event: of a deleted conversation, or a suspended tenant.
const TURNS: Duration = Duration::from_secs(5);

/// Looks for news until `stop` is cancelled.
pub async fn find_news(app: App, stop: CancellationToken) {
    let mut last = Looks {
        all: Instant::now(),
        turns: Instant::now(),
    };
    while !stop.is_cancelled() {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(TICK) => {}
            () = app.live.became_unsure() => tokio::time::sleep(GATHER).await,
        }
        let looking = last.look(&app);
        warn(within(LOOK, looking.map(Ok)).await);
    }
}

/// When was looked.
struct Looks {
    all: Instant,
    turns: Instant,
}

impl Looks {
    async fn look(&mut self, app: &App) {
        let tails = &app.streams.tails;
        let Unsure { all, conversations } = app.live.take_unsure();
        // While other nodes are not heard, this is how their news arrive.
        let deaf = !app.live.is_connected();
        if all || deaf || self.all.elapsed() >= SAFETY {
            self.all = Instant::now();
            warn(tails.find_news(&app.db, None).await);
        } else if !conversations.is_empty() {
            warn(tails.find_news(&app.db, Some(&conversations)).await);
        }
        if deaf || self.turns.elapsed() >= TURNS {
            self.turns = Instant::now();
            warn(tails.find_ended_turns(&app.db).await);
            tails.forget_taken();
        }
    }
}

/// Checks the rights of readers until `stop` is cancelled.
pub async fn check_rights(app: App, stop: CancellationToken) {
    while !stop.is_cancelled() {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(RENEWED) => {}
        }
        let checking = async {
            app.streams.credentials.renew(&app.verifiers).await;
            app.streams.rights.renew(&app.db, app.clock.now()).await
        };
        warn(within(LOOK, checking).await);
    }
}

fn warn(outcome: crate::error::Result<()>) {
    if let Err(error) = outcome {
        tracing::warn!(error = %error, cause = ?error.cause, "stream watch failed");
    }
}
