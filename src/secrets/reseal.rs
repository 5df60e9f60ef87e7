//! `throughline secrets reseal`: seals and signs long-lived data again with the first key, one batch in one
//! transaction. Nodes go on serving: a concurrent change wins. After an interruption it is run again.

use super::status::{count, print};
use super::{all_tenants, enter};
use crate::agent_runtime::key_context;
use crate::app::App;
use crate::audit;
use crate::auth::{OperatorCaller, secret_context};
use crate::clock::Clock;
use crate::config::Config;
use crate::domain::tenant::audit::{Action, Detail, Entry};
use crate::error::Result;
use crate::ids::TenantId;
use crate::store::bridge::inbound_receipts::seal_context;
use crate::store::db::sealed;

const BATCH: i64 = 100;
/// Most receipts have no answer of a command.
const RECEIPT_BATCH: i64 = 5_000;

#[derive(Debug, Default)]
struct Progress {
    resealed: i64,
    /// Sealed with a key that is not configured, or damaged.
    unopened: i64,
}

impl Progress {
    fn add(&mut self, more: &Self) {
        self.resealed += more.resealed;
        self.unopened += more.unopened;
    }
}

/// Seals a text again with the first key; `None` if it does not open.
fn seal_again(app: &App, context: &str, old: &[u8]) -> Result<Option<Vec<u8>>> {
    match app.keyring.open(context, old) {
        Ok(plain) => Ok(Some(app.keyring.seal(context, &plain)?)),
        Err(_) => Ok(None),
    }
}

async fn reseal_agents(app: &App, tenant_id: TenantId) -> Result<Progress> {
    let mut progress = Progress::default();
    let mut after = String::new();
    loop {
        let mut tx = enter(app, tenant_id).await?;
        let first = app.keyring.first_id();
        let page = sealed::list_agents(&mut tx, first, &after, BATCH).await?;
        let Some((last, _)) = page.last() else {
            return Ok(progress);
        };
        after.clone_from(last);
        for (name, old) in &page {
            match seal_again(app, &key_context(tenant_id, name), old)? {
                Some(new) => {
                    let replaced = sealed::update_agent_key(&mut tx, name, old, &new).await?;
                    progress.resealed += i64::from(replaced);
                }
                None => progress.unopened += 1,
            }
        }
        tx.commit().await?;
    }
}

async fn reseal_issuers(app: &App, tenant_id: TenantId) -> Result<Progress> {
    let mut progress = Progress::default();
    let mut after = String::new();
    loop {
        let mut tx = enter(app, tenant_id).await?;
        let first = app.keyring.first_id();
        let page = sealed::list_issuers(&mut tx, first, &after, BATCH).await?;
        let Some((last, _)) = page.last() else {
            return Ok(progress);
        };
        after.clone_from(last);
        for (name, old) in &page {
            match seal_again(app, &secret_context(tenant_id, name), old)? {
                Some(new) => {
                    let replaced = sealed::update_issuer_secret(&mut tx, name, old, &new).await?;
                    progress.resealed += i64::from(replaced);
                }
                None => progress.unopened += 1,
            }
        }
        tx.commit().await?;
    }
}

async fn reseal_receipts(app: &App, tenant_id: TenantId) -> Result<Progress> {
    let mut progress = Progress::default();
    let mut after = None;
    let first = app.keyring.first_id();
    loop {
        let mut tx = enter(app, tenant_id).await?;
        let page = sealed::list_receipt_keys(&mut tx, after.as_ref(), RECEIPT_BATCH).await?;
        let is_old = |key: &&sealed::ReceiptKey| key.answer.as_ref().is_some_and(|id| *id != first);
        for name in page.iter().filter(is_old) {
            let Some(old) = sealed::find_receipt(&mut tx, name).await? else {
                continue;
            };
            let chat = [&name.platform, &name.scope, &name.chat_ref].map(String::as_str);
            let context = seal_context(tenant_id, chat, name.identity_id, &name.message_id);
            match seal_again(app, &context, &old)? {
                Some(new) => {
                    let replaced = sealed::update_receipt(&mut tx, name, &old, &new).await?;
                    progress.resealed += i64::from(replaced);
                }
                None => progress.unopened += 1,
            }
        }
        tx.commit().await?;
        match page.into_iter().next_back() {
            Some(last) => after = Some(last),
            None => return Ok(progress),
        }
    }
}

async fn sign_head_again(app: &App, tenant_id: TenantId) -> Result<Progress> {
    let mut tx = enter(app, tenant_id).await?;
    let signed = audit::sign_again(&app.keyring, &mut tx).await?;
    tx.commit().await?;
    Ok(match signed {
        audit::SignOutcome::Yes => Progress {
            resealed: 1,
            unopened: 0,
        },
        audit::SignOutcome::NotNeeded => Progress::default(),
        audit::SignOutcome::NotOurs => Progress {
            resealed: 0,
            unopened: 1,
        },
    })
}

pub async fn reseal_from_command_line(config: Config) -> anyhow::Result<()> {
    let app = App::build(config, Clock::system()).await?;
    let mut agents = Progress::default();
    let mut issuers = Progress::default();
    let mut receipts = Progress::default();
    let mut heads = Progress::default();
    for tenant_id in all_tenants(&app).await? {
        agents.add(&reseal_agents(&app, tenant_id).await?);
        issuers.add(&reseal_issuers(&app, tenant_id).await?);
        receipts.add(&reseal_receipts(&app, tenant_id).await?);
        heads.add(&sign_head_again(&app, tenant_id).await?);
    }
    let all = [
        ("agents", &agents),
        ("issuers", &issuers),
        ("receipts", &receipts),
        ("audit_heads", &heads),
    ];
    let resealed: i64 = all.iter().map(|(_, progress)| progress.resealed).sum();
    if resealed > 0 {
        record(&app, resealed).await?;
    }
    for (kind, progress) in all {
        let resealed = progress.resealed;
        let unopened = progress.unopened;
        println!("{kind:<15} {resealed:>9} resealed, {unopened} do not open");
    }
    print(&app.keyring, &count(&app).await?);
    app.db.close().await;
    let unopened: i64 = all.iter().map(|(_, progress)| progress.unopened).sum();
    anyhow::ensure!(unopened == 0, "things that do not open: {unopened}");
    Ok(())
}

/// Writes the entry in the operator's own audit.
async fn record(app: &App, resealed: i64) -> Result<()> {
    let operator = OperatorCaller::local();
    let mut tx = operator.begin(&app.db).await?;
    let key = hex::encode(app.keyring.first_id());
    let detail = Detail::default().count("resealed", resealed);
    let entry = Entry::new(&operator.principal(), Action::SecretsReseal, &key).with(detail);
    audit::append(&app.keyring, &mut tx, entry, app.clock.now()).await?;
    tx.commit().await
}
