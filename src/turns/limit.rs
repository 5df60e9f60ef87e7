//! `concurrent_turns`: no more turns of a tenant run than its limit says, on all nodes together.

use crate::app::App;
use crate::domain::turn::too_many_turns;
use crate::error::Result;
use crate::store::{TenantTx, turn_counts};

/// How many turns of a tenant may run for another one to start beside other starts. Every transaction that starts
/// one has a connection; so many may have started one that is not committed, and not counted, yet. Twice that,
/// because nodes may have joined since they were counted.
pub(super) fn uncounted(app: &App, concurrent_turns: u32) -> i64 {
    let connections = i64::from(app.config.database_pool) * i64::from(app.limits.live_nodes());
    (i64::from(concurrent_turns) - 2 * connections).max(0)
}

/// Allows one more turn to run, or refuses. Until `tx` ends no other turn of the tenant starts. The caller holds the
/// conversation, and takes no lock afterwards that others hold while they wait for this one.
pub(super) async fn allow_one(tx: &mut TenantTx, concurrent_turns: u32) -> Result<()> {
    turn_counts::lock(tx).await?;
    let is_below = turn_counts::is_below(tx, i64::from(concurrent_turns)).await?;
    is_below
        .then_some(())
        .ok_or_else(|| too_many_turns(concurrent_turns))
}
