//! How many turns of a tenant run. A count is exact only while no start is under way that is not committed: who
//! needs that holds the tenant's count lock alone; a start far below the limit shares it with others.

use crate::error::Result;
use crate::store::TenantTx;

/// The lock's key, in a statement whose first parameter is the tenant.
macro_rules! count_lock {
    () => {
        "hashtextextended('turns of ' || $1::text, 0)"
    };
}

/// Whether fewer than `$most` turns of the tenant run; null: however many do.
macro_rules! fewer_run {
    ($most:literal) => {
        concat!(
            "(",
            $most,
            "::bigint is null
               or (",
            $most,
            " > 0
                   and not exists (select 1
                                     from turns r
                                    where r.tenant_id = $1
                                      and r.state = 'running'
                                   offset greatest(",
            $most,
            " - 1, 0))))"
        )
    };
}

/// Shares the count lock until the transaction ends, or is false: somebody counts. Asked last, when nothing can be
/// in the way of the start any more: who shares the lock and then waits for it alone would deadlock.
macro_rules! share_count {
    ($most:literal) => {
        concat!(
            "(",
            $most,
            "::bigint is null or pg_try_advisory_xact_lock_shared(",
            $crate::store::turn::turn_counts::count_lock!(),
            "))"
        )
    };
}

pub(in crate::store) use {count_lock, fewer_run, share_count};

/// Waits until nobody counts, and lets nobody count until `tx` ends, or goes back to before this.
pub async fn share(tx: &mut TenantTx) -> Result<()> {
    let lock = concat!("select pg_advisory_xact_lock_shared(", count_lock!(), ")");
    sqlx::query(lock)
        .bind(tx.tenant_id())
        .execute(tx.connection())
        .await?;
    Ok(())
}

/// Keeps every other start of the tenant's turns from happening until `tx` ends.
pub async fn lock(tx: &mut TenantTx) -> Result<()> {
    let lock = concat!("select pg_advisory_xact_lock(", count_lock!(), ")");
    sqlx::query(lock)
        .bind(tx.tenant_id())
        .execute(tx.connection())
        .await?;
    Ok(())
}

/// The same without waiting; false: somebody else counts, or starts a turn.
pub async fn try_lock(tx: &mut TenantTx) -> Result<bool> {
    let lock = concat!("select pg_try_advisory_xact_lock(", count_lock!(), ")");
    Ok(sqlx::query_scalar(lock)
        .bind(tx.tenant_id())
        .fetch_one(tx.connection())
        .await?)
}

/// `share` without waiting; false: somebody counts.
pub async fn try_share(tx: &mut TenantTx) -> Result<bool> {
    let lock = concat!(
        "select pg_try_advisory_xact_lock_shared(",
        count_lock!(),
        ")"
    );
    Ok(sqlx::query_scalar(lock)
        .bind(tx.tenant_id())
        .fetch_one(tx.connection())
        .await?)
}

/// Whether fewer than `most` turns of the tenant run, as far as they are committed.
pub async fn is_below(tx: &mut TenantTx, most: i64) -> Result<bool> {
    Ok(sqlx::query_scalar(concat!("select ", fewer_run!("$2")))
        .bind(tx.tenant_id())
        .bind(most)
        .fetch_one(tx.connection())
        .await?)
}
