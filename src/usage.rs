//! Usage counts of tenants. They are kept in memory and added to the database each second, so that a request pays
//! for an addition. A killed node loses its last second, and one with many tenants its last 16.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::auth::ServiceCaller;
use crate::domain::tenant::usage::{UsageCounts, UsageKey};
use crate::error::{Code, Error, Result};
use crate::ids::TenantId;
use crate::store::Db;
use crate::store::tenant::usage;

const SHARDS: usize = 16;
/// Up to so many tenants are all written each second; with more, one shard is.
const MAX_WRITTEN_AT_ONCE: usize = 20;
/// Longer than a statement may take, even if the database's host vanished.
const WRITE_TIMEOUT: Duration = Duration::from_secs(20);

type TenantCounts = HashMap<UsageKey, UsageCounts>;

/// The counts of this node that are not written yet.
#[derive(Default)]
pub struct UsageMeter {
    shards: [Mutex<HashMap<TenantId, TenantCounts>>; SHARDS],
    next_shard: AtomicUsize,
}

impl UsageMeter {
    /// The last bits of an id are random.
    fn shard(&self, tenant_id: TenantId) -> MutexGuard<'_, HashMap<TenantId, TenantCounts>> {
        let index = tenant_id.as_uuid().as_u128() as usize % SHARDS;
        self.shards[index]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub fn count(&self, tenant_id: TenantId, name: UsageKey, counts: &UsageCounts) {
        self.shard(tenant_id)
            .entry(tenant_id)
            .or_default()
            .entry(name)
            .or_default()
            .add(counts);
    }

    fn tenants(&self) -> Vec<TenantId> {
        self.shards
            .iter()
            .flat_map(|shard| {
                let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
                shard.keys().copied().collect::<Vec<_>>()
            })
            .collect()
    }

    /// The tenants whose counts are written now: all of a few tenants, and of many those of the next shard, so that
    /// each costs a transaction every 16 seconds and not every one.
    fn due(&self) -> Vec<TenantId> {
        let all = self.tenants();
        if all.len() <= MAX_WRITTEN_AT_ONCE {
            return all;
        }
        let next = self.next_shard.fetch_add(1, Ordering::Relaxed) % SHARDS;
        let shard = self.shards[next].lock();
        let shard = shard.unwrap_or_else(PoisonError::into_inner);
        shard.keys().copied().collect()
    }

    /// Adds the counts that are due to the database.
    pub async fn flush_due(&self, db: &Db) -> Result<()> {
        self.write(db, self.due()).await
    }

    /// Adds all counts to the database.
    pub async fn flush(&self, db: &Db) -> Result<()> {
        self.write(db, self.tenants()).await
    }

    /// A failed write is kept for the next time. If a commit succeeds and its answer is lost, a second is counted
    /// twice rather than not at all.
    async fn write(&self, db: &Db, tenants: Vec<TenantId>) -> Result<()> {
        let mut outcome = Ok(());
        for tenant_id in tenants {
            let Some(counted) = self.shard(tenant_id).remove(&tenant_id) else {
                continue;
            };
            let mut rows: Vec<_> = counted.into_iter().collect();
            rows.sort_by(|(one, _), (other, _)| one.cmp(other));
            let writing = tokio::time::timeout(WRITE_TIMEOUT, write(db, tenant_id, &rows));
            let written = writing
                .await
                .unwrap_or_else(|late| Err(Error::unavailable("the database", late)));
            if let Err(error) = written {
                for (name, counts) in rows {
                    self.count(tenant_id, name, &counts);
                }
                let down = matches!(error.code, Code::Unavailable | Code::Timeout);
                outcome = Err(error);
                if down {
                    break;
                }
            }
        }
        outcome
    }
}

async fn write(db: &Db, tenant_id: TenantId, rows: &[(UsageKey, UsageCounts)]) -> Result<()> {
    let mut tx = ServiceCaller::for_tenant(tenant_id).begin(db).await?;
    usage::upsert(&mut tx, rows).await?;
    tx.commit().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_tenants_some_are_written_each_second_and_all_in_sixteen() {
        let meter = UsageMeter::default();
        for _ in 0..1000 {
            let mut shard = meter.shard(TenantId::generate());
            shard.insert(TenantId::generate(), TenantCounts::default());
        }
        let written: Vec<usize> = (0..SHARDS).map(|_| meter.due().len()).collect();
        assert_eq!(written.iter().sum::<usize>(), 1000);
        assert!(written.iter().all(|one| *one < 200), "{written:?}");
    }
}
