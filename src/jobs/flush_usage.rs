//! Writes this node's usage counts of its tenants each second; with many tenants, some in each.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::app::App;

const TICK: Duration = Duration::from_secs(1);

/// Runs until `stop` is cancelled; `jobs::finish` writes the rest.
pub async fn run(app: App, stop: CancellationToken) {
    while !stop.is_cancelled() {
        tokio::select! {
            () = stop.cancelled() => {}
            () = tokio::time::sleep(TICK) => tick(&app).await,
        }
    }
}

pub async fn tick(app: &App) {
    if let Err(error) = app.usage.flush_due(&app.db).await {
        tracing::warn!(
            error = %error, cause = ?error.cause, "usage flush failed"
        );
    }
}
