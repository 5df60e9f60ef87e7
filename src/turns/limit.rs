//! `concurrent_turns`: no more turns of a tenant run than its limit says, on all nodes together.

use crate::app::App;
use crate::domain::turn::too_many_turns;
use crate::error::Result;
use crate::store::TenantTx;
use crate::store::turn::turn_counts;

/// How many turns of a tenant may run for another one to start beside other starts. Every transaction that starts
/// one has a connection; so many may have started one that is not committed, and not counted, yet. Twice that,
/// because nodes may have joined since they were counted.
pub(super) fn uncounted(app: &App, concurrent_turns: u32) -> i64 {
    let connections = i64::from(app.config.database_pool) * i64::from(app.limits.live_nodes());
    (i64::from(concurrent_turns) - 2 * connections).max(0)
}

/// Allows one more turn to run, or refuses. The caller holds the conversation. The count is a statement of its own after
/// the lock: it sees every start that the lock was waited for.
pub(super) async fn allow_one(app: &App, tx: &mut TenantTx, concurrent_turns: u32) -> Result<()> {
    let uncounted = uncounted(app, concurrent_turns);
    if uncounted > 0 {
        tx.mark().await?;
        turn_counts::share(tx).await?;
        if turn_counts::is_below(tx, uncounted).await? {
            return Ok(());
        }
        // Who shares the lock and wants it alone would wait for others who do the same.
        tx.roll_back_to_mark().await?;
    }
    turn_counts::lock(tx).await?;
    let is_below = turn_counts::is_below(tx, i64::from(concurrent_turns)).await?;
    is_below
        .then_some(())
        .ok_or_else(|| too_many_turns(concurrent_turns))
}

/// The same for a turn that can wait: false if the limit, or somebody who counts, is in the way.
pub(super) async fn try_allow_one(
    app: &App,
    tx: &mut TenantTx,
    concurrent_turns: u32,
) -> Result<bool> {
    let uncounted = uncounted(app, concurrent_turns);
    if uncounted > 0 {
        tx.mark().await?;
        if turn_counts::try_share(tx).await? && turn_counts::is_below(tx, uncounted).await? {
            return Ok(true);
        }
        tx.roll_back_to_mark().await?;
    }
    let alone = turn_counts::try_lock(tx).await?;
    Ok(alone && turn_counts::is_below(tx, i64::from(concurrent_turns)).await?)
}
