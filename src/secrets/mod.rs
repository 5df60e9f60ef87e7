//! Finds the keys in `SECRET_KEY` that stored data needs: a warning when a node starts, `throughline secrets status`
//! and `throughline secrets reseal`. Opens one tenant at a time, and shows only ids of keys and counts.
//! All functions are operations.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use crate::app::App;
use crate::auth::OperatorCaller;
use crate::crypto::Keyring;
use crate::domain::tenant::TenantState;
use crate::domain::values::paging::{MAX_LIMIT, PageRequest};
use crate::error::Result;
use crate::ids::TenantId;
use crate::store::TenantTx;
use crate::store::db::sealed;
use crate::store::tenant::tenants;

mod reseal;
mod status;

pub use reseal::reseal_from_command_line;
pub use status::status_from_command_line;

/// How many stored answers of each tenant a starting node examines.
const SAMPLE: i32 = 20;

/// The kinds of stored data that name a key, in the order of the output.
const KINDS: [&str; 7] = [
    "agents",
    "issuers",
    "audit_heads",
    "receipts",
    "stored_answers",
    "pending_links",
    "audit_entries",
];

/// How many rows of each kind name each key.
#[derive(Debug, Default)]
struct KeyUses(BTreeMap<Vec<u8>, BTreeMap<String, i64>>);

impl KeyUses {
    fn add(&mut self, kind: &str, key_id: Vec<u8>, rows: i64) {
        let kinds = self.0.entry(key_id).or_default();
        *kinds.entry(kind.to_owned()).or_default() += rows;
    }

    fn rows(&self, key_id: &[u8], kind: &str) -> i64 {
        let kinds = self.0.get(key_id);
        kinds.and_then(|all| all.get(kind)).copied().unwrap_or(0)
    }

    /// The keys that stored data needs and the keyring does not have.
    fn missing(&self, keyring: &Keyring) -> BTreeSet<Vec<u8>> {
        let own: Vec<&[u8]> = keyring.key_ids().map(|id| id.as_slice()).collect();
        let used = self.0.keys().filter(|id| !own.contains(&id.as_slice()));
        used.cloned().collect()
    }

    /// The data that needs one of `keys`, like `agents 3, issuers 1`.
    fn summary(&self, keys: &BTreeSet<Vec<u8>>) -> String {
        let mut summary = String::new();
        for kind in KINDS {
            let rows: i64 = keys.iter().map(|key| self.rows(key, kind)).sum();
            if rows > 0 {
                let comma = if summary.is_empty() { "" } else { ", " };
                // Writing to a text does not fail.
                let _ = write!(summary, "{comma}{kind} {rows}");
            }
        }
        summary
    }
}

fn ids(keys: &BTreeSet<Vec<u8>>) -> String {
    let ids: Vec<String> = keys.iter().map(hex::encode).collect();
    ids.join(", ")
}

/// Logs in one line which keys are missing. Some data of some tenants fails then, and all else works: so the node
/// runs.
pub async fn warn_of_missing_keys(app: App) {
    let mut uses = KeyUses::default();
    match sealed::list_in_use(&app.db, SAMPLE).await {
        Ok(found) => {
            for used in found {
                uses.add(&used.place, used.key_id, used.rows);
            }
        }
        Err(error) => {
            tracing::warn!(error = %error, "secret key check failed");
            return;
        }
    }
    let missing = uses.missing(&app.keyring);
    if !missing.is_empty() {
        tracing::warn!(
            missing_keys = ids(&missing),
            needed_by = uses.summary(&missing),
            hint = "put the missing keys behind the first; see `throughline secrets status`",
            "THROUGHLINE_SECRET_KEY lacks keys that stored data needs"
        );
    }
}

/// The operator's own tenant and every tenant that is not being deleted.
async fn all_tenants(app: &App) -> Result<Vec<TenantId>> {
    let mut found = vec![TenantId::OPERATOR];
    let mut request = PageRequest {
        limit: MAX_LIMIT,
        after: None,
    };
    loop {
        let page = tenants::list(&app.db, &request).await?;
        let living = page
            .rows
            .iter()
            .filter(|tenant| tenant.state != TenantState::Deleting);
        found.extend(living.map(|tenant| tenant.id));
        if page.next.is_none() {
            return Ok(found);
        }
        request.after = page.next;
    }
}

/// A transaction of the local operator in `tenant_id`.
async fn enter(app: &App, tenant_id: TenantId) -> Result<TenantTx> {
    let mut tx = OperatorCaller::local().begin(&app.db).await?;
    tx.operator_enter(tenant_id).await?;
    Ok(tx)
}
