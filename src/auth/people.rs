//! First contact: an account that is vouched for becomes a person, once, under the limit of new
//! identities. Who vouches has been judged before.

use crate::clock::Clock;
use crate::domain::people::user::{IdentityOwner, NewIdentity};
use crate::domain::tenant::limits::Limits;
use crate::error::{Error, Result};
use crate::ids::TenantId;
use crate::limits::{Bucket, Demand, Limiter};
use crate::store::people::identities;
use crate::store::{Db, Urgency};

/// As often as an account may come and go under us before we give up.
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

    /// Whose account it is now; made if nobody's. Not for who holds a transaction: it opens its own.
    pub async fn contact(
        &self,
        tenant_id: TenantId,
        account: &NewIdentity,
        limits: &Limits,
    ) -> Result<IdentityOwner> {
        let mut tx = self.db.begin_tenant(tenant_id, Urgency::Request).await?;
        let known = identities::find(&mut tx, &account.name).await?;
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
            let made = identities::insert_with_user(&mut tx, account, self.clock.now()).await?;
            let known = match made {
                Some(made) => Some(made),
                // Someone else was first, and has committed: the insert waited for that.
                None => identities::find(&mut tx, &account.name).await?,
            };
            tx.commit().await?;
            if let Some(known) = known {
                return Ok(known);
            }
            // It was there, and its person was erased before we looked.
        }
        Err(Error::unavailable(
            "the person",
            anyhow::anyhow!("the user is erased repeatedly"),
        ))
    }
}
