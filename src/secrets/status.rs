//! `throughline secrets status`: reads the data of every tenant, page by page, and changes nothing.

use super::{KINDS, KeyUses, all_tenants, enter, ids};
use crate::app::App;
use crate::clock::Clock;
use crate::config::Config;
use crate::crypto::Keyring;
use crate::error::Result;
use crate::ids::TenantId;
use crate::store::db::sealed;

const PAGE: i64 = 5_000;

/// Stored data that does not name its key.
const NOT_COUNTED: &str = "Not counted: link codes (10 minutes), cursors of lists, names of retryable requests (a day), \
     and the signatures of exports. A key that encrypted is kept for a day after another took its place.";

pub(super) async fn count(app: &App) -> Result<KeyUses> {
    let mut uses = KeyUses::default();
    for tenant_id in all_tenants(app).await? {
        let mut tx = enter(app, tenant_id).await?;
        for used in sealed::list_small(&mut tx).await? {
            uses.add(&used.place, used.key_id, used.rows);
        }
        tx.commit().await?;
        count_entries(app, tenant_id, &mut uses).await?;
        count_answers(app, tenant_id, &mut uses).await?;
        count_receipts(app, tenant_id, &mut uses).await?;
    }
    Ok(uses)
}

async fn count_entries(app: &App, tenant_id: TenantId, uses: &mut KeyUses) -> Result<()> {
    let mut after = 0;
    loop {
        let mut tx = enter(app, tenant_id).await?;
        let page = sealed::list_audit_keys(&mut tx, after, PAGE).await?;
        tx.commit().await?;
        let Some(last) = page.iter().map(|(_, _, last)| *last).max() else {
            return Ok(());
        };
        after = last;
        for (key_id, rows, _) in page {
            uses.add("audit_entries", key_id, rows);
        }
    }
}

async fn count_answers(app: &App, tenant_id: TenantId, uses: &mut KeyUses) -> Result<()> {
    let mut after = None;
    loop {
        let mut tx = enter(app, tenant_id).await?;
        let page = sealed::list_answer_keys(&mut tx, after.as_ref(), PAGE).await?;
        tx.commit().await?;
        for row in &page {
            for key_id in [&row.answer, &row.secrets].into_iter().flatten() {
                uses.add("stored_answers", key_id.clone(), 1);
            }
        }
        match page.into_iter().next_back() {
            Some(last) => after = Some(last.into_name()),
            None => return Ok(()),
        }
    }
}

async fn count_receipts(app: &App, tenant_id: TenantId, uses: &mut KeyUses) -> Result<()> {
    let mut after = None;
    loop {
        let mut tx = enter(app, tenant_id).await?;
        let page = sealed::list_receipt_keys(&mut tx, after.as_ref(), PAGE).await?;
        tx.commit().await?;
        for key_id in page.iter().filter_map(|row| row.answer.clone()) {
            uses.add("receipts", key_id, 1);
        }
        match page.into_iter().next_back() {
            Some(last) => after = Some(last),
            None => return Ok(()),
        }
    }
}

/// Prints a line for each key, and the data that needs it.
pub(super) fn print(keyring: &Keyring, uses: &KeyUses) {
    let first = keyring.first_id();
    let own: Vec<Vec<u8>> = keyring.key_ids().map(|id| id.to_vec()).collect();
    let missing = uses.missing(keyring);
    for key in own.iter().chain(&missing) {
        let role = if *key == first {
            "first: encrypts and signs"
        } else if own.contains(key) {
            "configured"
        } else {
            "MISSING in THROUGHLINE_SECRET_KEY"
        };
        println!("key {}  {role}", hex::encode(key));
        for kind in KINDS {
            let rows = uses.rows(key, kind);
            if rows > 0 {
                println!("  {:<15} {rows:>9}  {}", kind, fate(kind, *key == first));
            }
        }
        if *key != first && own.contains(key) && !uses.0.contains_key(key) {
            println!("  nothing that is stored needs it: it can be dropped");
        }
    }
    println!("{NOT_COUNTED}");
}

/// How data of a kind is freed from an old key.
fn fate(kind: &str, is_first: bool) -> &'static str {
    match kind {
        _ if is_first => "",
        "agents" | "issuers" | "audit_heads" => "`throughline secrets reseal` moves them",
        "receipts" => "`throughline secrets reseal` moves them, or 30 days pass",
        "stored_answers" => "gone within a day",
        "pending_links" => "gone within two minutes",
        _ => "for good: without the key `throughline audit verify` cannot check them",
    }
}

/// Prints the status. Fails if a key is missing, for scripts.
pub async fn status_from_command_line(config: Config) -> anyhow::Result<()> {
    let app = App::build(config, Clock::system()).await?;
    let uses = count(&app).await?;
    print(&app.keyring, &uses);
    app.db.close().await;
    let missing = uses.missing(&app.keyring);
    anyhow::ensure!(
        missing.is_empty(),
        "keys that are missing: {}",
        ids(&missing)
    );
    Ok(())
}
