//! First contact: an identity that is new gets a user, once, under the limit of new identities. The credential that
//! vouches for it was verified before.

use crate::clock::Clock;
use crate::domain::people::user::{IdentityOwner, NewIdentity};
use crate::domain::tenant::limits::Limits;
use crate::error::{Error, Result};
use crate::ids::TenantId;
use crate::limits::{Bucket, Demand, Limiter};
use crate::store::people::identities;
use crate::store::{Db, Urgency};

/// How often an identity may be made and erased by others before the request fails.
const ATTEMPTS: usize = 5;

#[derive(Clone)]
pub struct FirstContact {
    db: Db,
    clock: Clock,
    limiter: Limiter,
}

impl FirstContact {
    pub fn new(db: Db, clock: Clock, limiter: Limiter) -> Self {
        Self { db, clock, limiter }
    }

    /// The present owner of the identity; a new user if it has none. Call it before a transaction is open: it opens its
    /// own.
    pub async fn contact(
        &self,
        tenant_id: TenantId,
        identity: &NewIdentity,
        limits: &Limits,
    ) -> Result<IdentityOwner> {
        let mut tx = self.db.begin_tenant(tenant_id, Urgency::Request).await?;
        let known = identities::find(&mut tx, &identity.name).await?;
        // The limiter may wait for Redis: not while a connection is held.
        tx.end().await?;
        if let Some(known) = known {
            return Ok(known);
        }
        let demand = Demand::one(Bucket::NewIdentities, limits.new_identities_per_hour);
        let admitted = self.limiter.take(tenant_id, &[demand]).await;
        admitted.map_err(|refused| refused.refusal())?;
        for _ in 0..ATTEMPTS {
            let mut tx = self.db.begin_tenant(tenant_id, Urgency::Request).await?;
            let made = identities::insert_with_user(&mut tx, identity, self.clock.now()).await?;
            let known = match made {
                Some(made) => Some(made),
                // Someone else was first, and has committed: the insert waited for that.
                None => identities::find(&mut tx, &identity.name).await?,
            };
            tx.commit().await?;
            if let Some(known) = known {
                return Ok(known);
            }
            // It was there, and its user was erased before it was read.
        }
        Err(Error::unavailable(
            "the user",
            anyhow::anyhow!("the user is erased repeatedly"),
        ))
    }
}
