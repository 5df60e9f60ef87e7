//! The notices about a merge or an unlink. They go to every identity but the one that asked for it, so that its
//! owner learns of a change that someone else made.

use chrono::{DateTime, Utc};

use crate::domain::people::user::{Identity, IdentityRecord};
use crate::error::Result;
use crate::ids::IdentityId;
use crate::store::TenantTx;
use crate::store::bridge::outbox;

/// Sends a notice to all `identities` but `by`.
pub async fn send(
    tx: &mut TenantTx,
    identities: &[IdentityRecord],
    by: Option<IdentityId>,
    text: &str,
    now: DateTime<Utc>,
) -> Result<()> {
    let others: Vec<Identity> = identities
        .iter()
        .filter(|identity| Some(identity.id) != by)
        .map(IdentityRecord::identity)
        .collect();
    outbox::insert_security(tx, &others, text, now).await
}

pub fn merge_text(identities: &[IdentityRecord]) -> String {
    let names: Vec<String> = identities.iter().map(|one| one.name.to_string()).collect();
    format!(
        "{} now belongs to you here: your conversations are shared between your accounts. \
         If that was not you, unlink it.",
        names.join(", ")
    )
}

pub fn unlink_text(identity: &IdentityRecord) -> String {
    format!(
        "{} no longer belongs to your other accounts here. Within 30 days that can be undone.",
        identity.name
    )
}
