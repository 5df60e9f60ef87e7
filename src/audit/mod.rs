//! The audit: the actions in a tenant, as a chain of entries. Without the service's keys it cannot be changed,
//! shortened or forked unnoticed. An entry is written in the transaction of its action: all functions are steps.

use chrono::{DateTime, Utc};

use crate::crypto::{BadMac, Keyring, Mac};
use crate::domain::tenant::audit::{AuditHead, AuditLink, Entry, GENESIS_HASH};
use crate::error::{Error, Result};
use crate::ids::TenantId;
use crate::store::TenantTx;
use crate::store::db::sealed;
use crate::store::tenant::audit::{self, SignedHead};

pub mod verify;

/// Separates the two uses of a MAC: a head is no entry.
const ENTRY: &str = "audit/entry";
const HEAD: &str = "audit/head";

/// Adds `entry` to the chain of the tenant that `tx` is in. Locks the chain's head until `tx` ends, so
/// call it when every other lock is held.
pub async fn append(
    keyring: &Keyring,
    tx: &mut TenantTx,
    entry: Entry,
    now: DateTime<Utc>,
) -> Result<()> {
    let tenant_id = tx.tenant_id();
    let last = lock_head(keyring, tx, now).await?;
    // Otherwise a forged head would now be signed as ours.
    check_head(keyring, tenant_id, &last).map_err(|bad| {
        Error::internal(anyhow::anyhow!(
            "the head of the audit of {tenant_id} is {bad}: run `throughline audit verify`"
        ))
    })?;
    let detail = entry.detail.into_value();
    let link = AuditLink {
        tenant_id,
        seq: last.head.seq + 1,
        at: now,
        actor: &entry.actor,
        action: entry.action.as_str(),
        target: entry.target.as_deref(),
        detail: &detail,
        prev_hash: &last.head.hash,
    };
    let hash = keyring.mac(ENTRY, &link.encode());
    let head = AuditHead {
        seq: link.seq,
        hash: hash.tag.to_vec(),
        at: now,
    };
    let mac = sign_head(keyring, tenant_id, &head);
    audit::insert(tx, &link, &hash, &head, &mac).await
}

/// The result of signing a head again with the first key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SignOutcome {
    Yes,
    /// The first key signed it already, or there is no head yet.
    NotNeeded,
    /// None of the configured keys signed it: it stays as it is.
    NotOurs,
}

/// Signs the head of the tenant that `tx` is in with the first key. Its entries stay as they are.
pub async fn sign_again(keyring: &Keyring, tx: &mut TenantTx) -> Result<SignOutcome> {
    let tenant_id = tx.tenant_id();
    let Some(signed) = audit::lock_head(tx).await? else {
        return Ok(SignOutcome::NotNeeded);
    };
    if check_head(keyring, tenant_id, &signed).is_err() {
        return Ok(SignOutcome::NotOurs);
    }
    if signed.key_id == keyring.first_id() {
        return Ok(SignOutcome::NotNeeded);
    }
    let mac = sign_head(keyring, tenant_id, &signed.head);
    sealed::update_head_mac(tx, &mac).await?;
    Ok(SignOutcome::Yes)
}

/// Locks the head of the chain. Starts the chain if it has none.
async fn lock_head(keyring: &Keyring, tx: &mut TenantTx, now: DateTime<Utc>) -> Result<SignedHead> {
    if let Some(head) = audit::lock_head(tx).await? {
        return Ok(head);
    }
    let head = AuditHead {
        seq: 0,
        hash: GENESIS_HASH.to_vec(),
        at: now,
    };
    let mac = sign_head(keyring, tx.tenant_id(), &head);
    audit::insert_head(tx, &head, &mac).await?;
    audit::lock_head(tx)
        .await?
        .ok_or_else(|| Error::internal(anyhow::anyhow!("an audit head vanished")))
}

fn sign_head(keyring: &Keyring, tenant_id: TenantId, head: &AuditHead) -> Mac {
    keyring.mac(HEAD, &head.encode(tenant_id))
}

fn check_head(
    keyring: &Keyring,
    tenant_id: TenantId,
    signed: &SignedHead,
) -> std::result::Result<(), BadMac> {
    let message = signed.head.encode(tenant_id);
    keyring.check_mac(HEAD, &message, &signed.key_id, &signed.mac)
}
