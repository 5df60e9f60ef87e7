//! First contact: an account that is vouched for becomes a person, once, under the limit of new
//! identities. Who vouches has been judged before.

use crate::clock::Clock;
use crate::domain::limits::Limits;
use crate::domain::user::{Account, KnownIdentity};
use crate::error::{Error, Result};
use crate::ids::TenantId;
use crate::limits::{Bucket, Demand, Limiter};
use crate::store::{Db, identities};

#[derive(Clone)]
pub struct People {
    db: Db,
    clock: Clock,
    limiter: Limiter,
}

impl People {
    pub fn new(db: Db, clock: Clock, limiter: Limiter) -> Self {
        Self { db, clock, limiter }
    }

    /// Whose account it is now; made if nobody's. Not for who holds a transaction: it opens its own.
    pub async fn contact(
        &self,
        tenant_id: TenantId,
        account: &Account,
        limits: &Limits,
    ) -> Result<KnownIdentity> {
        let mut tx = self.db.begin_tenant(tenant_id).await?;
        if let Some(known) = identities::find(&mut tx, &account.name).await? {
            return Ok(known);
        }
        // The limiter may wait for Redis: not while a connection is held.
        drop(tx);
        let demand = Demand::one(Bucket::NewIdentities, limits.new_identities_per_hour);
        let admitted = self.limiter.take(tenant_id, &[demand]).await;
        admitted.map_err(|refused| refused.refusal())?;
        let mut tx = self.db.begin_tenant(tenant_id).await?;
        let made = identities::insert_with_user(&mut tx, account, self.clock.now()).await?;
        let identity = match made {
            Some(made) => made,
            // Someone else was first, and has committed: the insert waited for that.
            None => identities::find(&mut tx, &account.name)
                .await?
                .ok_or_else(|| {
                    Error::internal(anyhow::anyhow!("an identity vanished at first contact"))
                })?,
        };
        tx.commit().await?;
        Ok(identity)
    }
}
