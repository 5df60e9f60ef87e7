//! Says that this node lives, and learns how many do.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::within;
use crate::app::App;
use crate::store::nodes;

const TICK: Duration = Duration::from_secs(5);

/// Runs until `stop` is cancelled; `jobs::finish` takes the node's row away.
pub async fn run(app: App, stop: CancellationToken) {
    while !stop.is_cancelled() {
        tick(&app).await;
        tokio::select! {
            () = stop.cancelled() => {}
            () = tokio::time::sleep(TICK) => {}
        }
    }
}

/// One beat. If Postgres does not answer, the last known number of nodes stands.
pub async fn tick(app: &App) {
    let addr = app.config.internal_advertise.as_ref();
    let beating = nodes::beat(&app.db, app.boot_id, addr.map(|url| url.as_str()));
    match within(TICK, beating).await {
        Ok(living) => {
            app.limits.set_live_nodes(living.nodes);
            app.hashes_names.store(!living.has_old, Ordering::Relaxed);
        }
        Err(error) => tracing::warn!(error = %error, "cannot say that this node lives"),
    }
    app.limits.forget_past();
}
