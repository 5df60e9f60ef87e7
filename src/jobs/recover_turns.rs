//! Finds turns that no node runs, several times a second, on every node.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::{MAX_RUN, within};
use crate::app::App;
use crate::turns;

const TICK: Duration = Duration::from_millis(500);

/// Runs until `stop` is cancelled.
pub async fn run(app: App, stop: CancellationToken) {
    // A node that has just started cannot tell whether the database was away before.
    app.db.outages.record(app.config.turn_lease);
    while !stop.is_cancelled() {
        if let Err(error) = within(MAX_RUN, turns::sweep(&app)).await {
            tracing::warn!(error = %error, "turn recovery poll failed");
        }
        if let Err(error) = within(MAX_RUN, turns::deliver_unclaimed(&app)).await {
            tracing::warn!(error = %error, "unclaimed answer poll failed");
        }
        tokio::select! {
            () = stop.cancelled() => {}
            () = tokio::time::sleep(TICK) => {}
        }
    }
}
