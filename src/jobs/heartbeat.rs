//! The heartbeat: publishes that this node is alive and where it listens, and reads the same of the others.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::within;
use crate::app::App;
use crate::store::db::nodes;

const TICK: Duration = Duration::from_secs(5);

/// Runs until `stop` is cancelled; `jobs::finish` deletes the node's row.
pub async fn run(app: App, stop: CancellationToken) {
    while !stop.is_cancelled() {
        tick(&app).await;
        tokio::select! {
            () = stop.cancelled() => {}
            () = tokio::time::sleep(TICK) => {}
        }
    }
}

/// One beat. If Postgres does not answer, the last state of the other nodes stands.
pub async fn tick(app: &App) {
    let addr = app.config.internal_advertise.as_ref();
    let addr = addr.map(|url| url.as_str());
    let place = app.upstream.own_place();
    let beating = nodes::upsert(&app.db, app.boot_id, addr, &place);
    match within(TICK, beating).await {
        Ok(others) => {
            app.limits.set_live_nodes(others.live);
            app.hashes_names.store(!others.has_old, Ordering::Relaxed);
            app.upstream.set_other_nodes(others.places);
        }
        Err(error) => tracing::warn!(error = %error, "heartbeat failed"),
    }
    app.limits.forget_history();
}
