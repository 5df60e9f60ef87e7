//! Verifies chains: `throughline audit verify`. It reads page by page, so that a chain of any length takes the same
//! memory, and it locks nothing.

use std::fmt;

use crate::app::App;
use crate::auth::OperatorCaller;
use crate::clock::Clock;
use crate::config::Config;
use crate::crypto::{BadMac, Keyring};
use crate::domain::tenant::TenantState;
use crate::domain::tenant::audit::{Action, AuditLink, GENESIS_HASH};
use crate::domain::values::paging::{MAX_LIMIT, PageRequest};
use crate::error::Result;
use crate::ids::TenantId;
use crate::store::TenantTx;
use crate::store::tenant::audit::{self, ChainRow, SignedHead};
use crate::store::tenant::tenants;

const PAGE: i64 = 500;

/// The result for one chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    Whole { entries: i64 },
    Broken(Flaw),
}

/// The first fault of a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Flaw {
    Entry { seq: i64, cause: Cause },
    AuditHead(Cause),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cause {
    Changed,
    Missing,
    /// Signed with a key that is not configured.
    UnknownKey(String),
    /// A tenant's chain starts with the creation of the tenant: this one was emptied and started again.
    Restarted,
    /// The head is authentic, and points to another entry than the last.
    Mismatch {
        head: i64,
        last: i64,
    },
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole { entries } => write!(f, "{entries} entries, ok"),
            Self::Broken(Flaw::Entry { seq, cause }) => write!(f, "BROKEN at entry {seq}: {cause}"),
            Self::Broken(Flaw::AuditHead(cause)) => write!(f, "BROKEN at the head: {cause}"),
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Changed => write!(f, "changed"),
            Self::Missing => write!(f, "missing"),
            Self::UnknownKey(key) => {
                write!(f, "made with the key {key}, not in THROUGHLINE_SECRET_KEY")
            }
            Self::Restarted => write!(f, "not the making of the tenant, with which it began"),
            Self::Mismatch { head, last } => {
                write!(f, "mismatch, it is at entry {head} and the last is {last}")
            }
        }
    }
}

impl Cause {
    fn from_bad_mac(bad: BadMac, key_id: &[u8]) -> Self {
        match bad {
            BadMac::UnknownKey => Self::UnknownKey(hex::encode(key_id)),
            BadMac::Wrong => Self::Changed,
        }
    }
}

/// The progress of a verification: the chain is whole up to `seq`, which hashes to `hash`.
struct VerifiedPrefix {
    seq: i64,
    hash: Vec<u8>,
}

/// Verifies the chain of the tenant that `tx` is in.
pub async fn verify(keyring: &Keyring, tx: &mut TenantTx) -> Result<Verdict> {
    let mut verified = VerifiedPrefix {
        seq: 0,
        hash: GENESIS_HASH.to_vec(),
    };
    // Starts before the first entry, so that a number below 1 is seen too.
    let mut after = None;
    loop {
        // The head before the rows: an entry added in between is read, and then the head is read again.
        let head = audit::find_head(tx).await?;
        let rows = audit::list_chain(tx, after, PAGE).await?;
        if rows.is_empty() {
            return Ok(check_end(keyring, tx.tenant_id(), head.as_ref(), &verified));
        }
        for row in rows {
            if let Err(flaw) = check_row(keyring, tx.tenant_id(), &row, &verified) {
                return Ok(Verdict::Broken(flaw));
            }
            after = Some(row.seq);
            verified = VerifiedPrefix {
                seq: row.seq,
                hash: row.hash,
            };
        }
    }
}

fn check_row(
    keyring: &Keyring,
    tenant_id: TenantId,
    row: &ChainRow,
    verified: &VerifiedPrefix,
) -> std::result::Result<(), Flaw> {
    let expected = verified.seq + 1;
    if row.seq > expected {
        return Err(Flaw::Entry {
            seq: expected,
            cause: Cause::Missing,
        });
    }
    let broken = |cause| Flaw::Entry {
        seq: row.seq,
        cause,
    };
    let detail = serde_json::from_str(&row.detail).map_err(|_| broken(Cause::Changed))?;
    let link = AuditLink {
        tenant_id,
        seq: row.seq,
        at: row.at,
        actor: &row.actor,
        action: &row.action,
        target: row.target.as_deref(),
        detail: &detail,
        prev_hash: &row.prev_hash,
    };
    keyring
        .check_mac(super::ENTRY, &link.encode(), &row.key_id, &row.hash)
        .map_err(|bad| broken(Cause::from_bad_mac(bad, &row.key_id)))?;
    if row.seq != expected || row.prev_hash != verified.hash {
        return Err(broken(Cause::Changed));
    }
    let is_creation =
        tenant_id == TenantId::OPERATOR || row.action == Action::TenantCreate.as_str();
    if row.seq == 1 && !is_creation {
        return Err(broken(Cause::Restarted));
    }
    Ok(())
}

fn check_end(
    keyring: &Keyring,
    tenant_id: TenantId,
    head: Option<&SignedHead>,
    verified: &VerifiedPrefix,
) -> Verdict {
    let Some(signed) = head else {
        // The operator's chain starts with its first entry; a tenant is created with one.
        return if verified.seq == 0 && tenant_id == TenantId::OPERATOR {
            Verdict::Whole { entries: 0 }
        } else {
            Verdict::Broken(Flaw::AuditHead(Cause::Missing))
        };
    };
    if let Err(bad) = super::check_head(keyring, tenant_id, signed) {
        return Verdict::Broken(Flaw::AuditHead(Cause::from_bad_mac(bad, &signed.key_id)));
    }
    let head = &signed.head;
    if head.seq > verified.seq {
        return Verdict::Broken(Flaw::Entry {
            seq: verified.seq + 1,
            cause: Cause::Missing,
        });
    }
    if head.seq < verified.seq || head.hash != verified.hash {
        return Verdict::Broken(Flaw::AuditHead(Cause::Mismatch {
            head: head.seq,
            last: verified.seq,
        }));
    }
    Verdict::Whole {
        entries: verified.seq,
    }
}

/// `throughline audit verify`: prints a line for each chain, and fails if one is broken.
pub async fn verify_from_command_line(
    config: Config,
    tenant: Option<TenantId>,
) -> anyhow::Result<()> {
    let app = App::build(config, Clock::system()).await?;
    let broken = match tenant {
        Some(id) => {
            let exists = id == TenantId::OPERATOR || tenants::find(&app.db, id).await?.is_some();
            anyhow::ensure!(exists, "there is no tenant {id}");
            u64::from(!report(&app, id).await?)
        }
        None => report_all(&app).await?,
    };
    app.db.close().await;
    anyhow::ensure!(broken == 0, "chains that are broken: {broken}");
    Ok(())
}

/// Verifies the operator's chain and every tenant's. Returns how many are broken.
async fn report_all(app: &App) -> Result<u64> {
    let mut broken = u64::from(!report(app, TenantId::OPERATOR).await?);
    let mut request = PageRequest {
        limit: MAX_LIMIT,
        after: None,
    };
    loop {
        let page = tenants::list(&app.db, &request).await?;
        for tenant in page.rows {
            if tenant.state == TenantState::Deleting {
                println!("{} is being deleted, its entries with it", tenant.id);
            } else {
                broken += u64::from(!report(app, tenant.id).await?);
            }
        }
        if page.next.is_none() {
            return Ok(broken);
        }
        request.after = page.next;
    }
}

/// Prints the result for one chain; true if it is whole.
async fn report(app: &App, tenant_id: TenantId) -> Result<bool> {
    let mut tx = OperatorCaller::local().begin(&app.db).await?;
    tx.operator_enter(tenant_id).await?;
    let verdict = verify(&app.keyring, &mut tx).await?;
    tx.commit().await?;
    println!("{tenant_id} {verdict}");
    Ok(matches!(verdict, Verdict::Whole { .. }))
}
