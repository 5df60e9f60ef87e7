//! What people are told when their accounts are joined or parted, on every account but the one that did
//! it: whoever did not do it themselves must hear of it.

use chrono::{DateTime, Utc};

use crate::domain::people::user::{Identity, IdentityRecord};
use crate::error::Result;
use crate::ids::IdentityId;
use crate::store::TenantTx;
use crate::store::bridge::outbox;

/// Tells all of `accounts` but `by`.
pub async fn tell(
    tx: &mut TenantTx,
    accounts: &[IdentityRecord],
    by: Option<IdentityId>,
    text: &str,
    now: DateTime<Utc>,
) -> Result<()> {
    let others: Vec<Identity> = accounts
        .iter()
        .filter(|account| Some(account.id) != by)
        .map(IdentityRecord::identity)
        .collect();
    outbox::insert_security(tx, &others, text, now).await
}

pub fn joined(accounts: &[IdentityRecord]) -> String {
    let names: Vec<String> = accounts.iter().map(|one| one.name.to_string()).collect();
    format!(
        "{} now belongs to you here: your conversations are shared between your accounts. \
         If that was not you, unlink it.",
        names.join(", ")
    )
}

pub fn parted(account: &IdentityRecord) -> String {
    format!(
        "{} no longer belongs to your other accounts here. Within 30 days that can be taken back.",
        account.name
    )
}
