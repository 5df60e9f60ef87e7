//! Counting what tenants use. Counts are kept in memory and added to the database each second, so a
//! request pays for an addition. A node that is killed loses its last second.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::auth::JobCaller;
use crate::domain::usage::{UsageCounts, UsageName};
use crate::error::{Code, Result};
use crate::ids::TenantId;
use crate::store::{Db, usage};

const SHARDS: usize = 16;

type Counted = HashMap<UsageName, UsageCounts>;

/// What this node has counted and not yet written.
#[derive(Default)]
pub struct UsageMeter {
    shards: [Mutex<HashMap<TenantId, Counted>>; SHARDS],
}

impl UsageMeter {
    /// The last bits of an id are random.
    fn shard(&self, tenant_id: TenantId) -> MutexGuard<'_, HashMap<TenantId, Counted>> {
        let place = tenant_id.as_uuid().as_u128() as usize % SHARDS;
        self.shards[place]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub fn count(&self, tenant_id: TenantId, name: UsageName, counts: &UsageCounts) {
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

    /// Adds everything to the database. What cannot be written is kept for the next time; if a commit
    /// succeeds and its answer is lost, a second is counted twice rather than not at all.
    pub async fn flush(&self, db: &Db) -> Result<()> {
        let mut outcome = Ok(());
        for tenant_id in self.tenants() {
            let Some(counted) = self.shard(tenant_id).remove(&tenant_id) else {
                continue;
            };
            let mut rows: Vec<_> = counted.into_iter().collect();
            rows.sort_by(|(one, _), (other, _)| one.cmp(other));
            if let Err(error) = write(db, tenant_id, &rows).await {
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

async fn write(db: &Db, tenant_id: TenantId, rows: &[(UsageName, UsageCounts)]) -> Result<()> {
    let mut tx = JobCaller::of_served_tenant(tenant_id).begin(db).await?;
    usage::add(&mut tx, rows).await?;
    tx.commit().await
}
