//! Checking chains: `throughline audit verify`. It reads page by page, so a chain of any length is
//! walked in the same memory, and it locks nothing.

use std::fmt;

use crate::app::App;
use crate::auth::OperatorCaller;
use crate::clock::Clock;
use crate::config::Config;
use crate::crypto::{BadMac, Keyring};
use crate::domain::tenant::TenantState;
use crate::domain::tenant::audit::{Action, GENESIS_HASH, Link};
use crate::domain::values::paging::{MAX_LIMIT, PageRequest};
use crate::error::Result;
use crate::ids::TenantId;
use crate::store::TenantTx;
use crate::store::tenant::audit::{self, ChainRow, SignedHead};
use crate::store::tenant::tenants;

const ROWS_AT_ONCE: i64 = 500;

/// What became of a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    Whole { entries: i64 },
    Broken(Flaw),
}

/// The first thing that is wrong with a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Flaw {
    Entry { seq: i64, why: Why },
    Head(Why),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Why {
    Changed,
    Missing,
    /// Made with a key that we do not have.
    UnknownKey(String),
    /// A tenant's chain begins with its making: this one was emptied and begun again.
    BegunAgain,
    /// The head is one of ours, and leads to another entry than the last.
    Mismatch {
        head: i64,
        last: i64,
    },
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole { entries } => write!(f, "{entries} entries, ok"),
            Self::Broken(Flaw::Entry { seq, why }) => write!(f, "BROKEN at entry {seq}: {why}"),
            Self::Broken(Flaw::Head(why)) => write!(f, "BROKEN at the head: {why}"),
        }
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Changed => write!(f, "changed"),
            Self::Missing => write!(f, "missing"),
            Self::UnknownKey(key) => {
                write!(f, "made with the key {key}, not in THROUGHLINE_SECRET_KEY")
            }
            Self::BegunAgain => write!(f, "not the making of the tenant, with which it began"),
            Self::Mismatch { head, last } => {
                write!(f, "mismatch, it is at entry {head} and the last is {last}")
            }
        }
    }
}

impl Why {
    fn of(bad: BadMac, key_id: &[u8]) -> Self {
        match bad {
            BadMac::UnknownKey => Self::UnknownKey(hex::encode(key_id)),
            BadMac::Wrong => Self::Changed,
        }
    }
}

/// How far a walk has come: the chain is whole up to `seq`, which hashes to `hash`.
struct Walked {
    seq: i64,
    hash: Vec<u8>,
}

/// Walks the chain of the tenant that `tx` is in.
pub async fn verify(keyring: &Keyring, tx: &mut TenantTx) -> Result<Verdict> {
    let mut walked = Walked {
        seq: 0,
        hash: GENESIS_HASH.to_vec(),
    };
    // From before the first, so that an entry with a number below 1 is seen too.
    let mut after = None;
    loop {
        // Before the rows: an entry added in between is walked, and then the head is read again.
        let head = audit::find_head(tx).await?;
        let rows = audit::list_chain(tx, after, ROWS_AT_ONCE).await?;
        if rows.is_empty() {
            return Ok(judge_head(keyring, tx.tenant_id(), head.as_ref(), &walked));
        }
        for row in rows {
            if let Err(flaw) = check_row(keyring, tx.tenant_id(), &row, &walked) {
                return Ok(Verdict::Broken(flaw));
            }
            after = Some(row.seq);
            walked = Walked {
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
    walked: &Walked,
) -> std::result::Result<(), Flaw> {
    let expected = walked.seq + 1;
    if row.seq > expected {
        return Err(Flaw::Entry {
            seq: expected,
            why: Why::Missing,
        });
    }
    let broken = |why| Flaw::Entry { seq: row.seq, why };
    let detail = serde_json::from_str(&row.detail).map_err(|_| broken(Why::Changed))?;
    let link = Link {
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
        .map_err(|bad| broken(Why::of(bad, &row.key_id)))?;
    if row.seq != expected || row.prev_hash != walked.hash {
        return Err(broken(Why::Changed));
    }
    let making = tenant_id == TenantId::OPERATOR || row.action == Action::TenantCreate.as_str();
    if row.seq == 1 && !making {
        return Err(broken(Why::BegunAgain));
    }
    Ok(())
}

fn judge_head(
    keyring: &Keyring,
    tenant_id: TenantId,
    head: Option<&SignedHead>,
    walked: &Walked,
) -> Verdict {
    let Some(signed) = head else {
        // The operator's own plane has a chain from its first entry on; a tenant is made with one.
        return if walked.seq == 0 && tenant_id == TenantId::OPERATOR {
            Verdict::Whole { entries: 0 }
        } else {
            Verdict::Broken(Flaw::Head(Why::Missing))
        };
    };
    if let Err(bad) = super::check_head(keyring, tenant_id, signed) {
        return Verdict::Broken(Flaw::Head(Why::of(bad, &signed.key_id)));
    }
    let head = &signed.head;
    if head.seq > walked.seq {
        return Verdict::Broken(Flaw::Entry {
            seq: walked.seq + 1,
            why: Why::Missing,
        });
    }
    if head.seq < walked.seq || head.hash != walked.hash {
        return Verdict::Broken(Flaw::Head(Why::Mismatch {
            head: head.seq,
            last: walked.seq,
        }));
    }
    Verdict::Whole {
        entries: walked.seq,
    }
}

/// `throughline audit verify`: a line for each chain, and a failure if one is broken.
pub async fn verify_from_command_line(
    config: Config,
    tenant: Option<TenantId>,
) -> anyhow::Result<()> {
    let app = App::build(config, Clock::system()).await?;
    let broken = match tenant {
        Some(id) => {
            let known = id == TenantId::OPERATOR || tenants::find(&app.db, id).await?.is_some();
            anyhow::ensure!(known, "there is no tenant {id}");
            u64::from(!report(&app, id).await?)
        }
        None => report_all(&app).await?,
    };
    app.db.close().await;
    anyhow::ensure!(broken == 0, "chains that are broken: {broken}");
    Ok(())
}

/// The operator's own plane and every tenant; answers how many chains are broken.
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

/// Prints what became of one chain; true if it is whole.
async fn report(app: &App, tenant_id: TenantId) -> Result<bool> {
    let mut tx = OperatorCaller::local().begin(&app.db).await?;
    tx.operator_enter(tenant_id).await?;
    let verdict = verify(&app.keyring, &mut tx).await?;
    tx.commit().await?;
    println!("{tenant_id} {verdict}");
    Ok(matches!(verdict, Verdict::Whole { .. }))
}
