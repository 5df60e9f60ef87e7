//! Retention: a sweep passes over all conversations of a tenant and deletes those that were idle for too long. A
//! step is one batch in one transaction and stores its progress, so that the next one neither repeats nor skips
//! a conversation, on whichever node it runs.

use chrono::{DateTime, Utc};

use super::delete::delete_locked;
use crate::app::App;
use crate::audit;
use crate::domain::tenant::audit::{Action, Detail, Entry};
use crate::domain::tenant::retention::{Sweep, check_days, cutoff};
use crate::error::{Code, Error, Result};
use crate::ids::SessionId;
use crate::store::TenantTx;
use crate::store::db::jobs;
use crate::store::tenant::retention::{self, OldCounts};
use crate::store::tenant::tenants;

/// The job that sweeps.
pub const SWEEP_JOB: &str = "sweep_conversations";
/// The actor of a sweep's audit entry.
const ACTOR: &str = "retention";

/// Plans that job for now.
pub async fn plan(tx: &mut TenantTx, now: DateTime<Utc>) -> Result<()> {
    jobs::insert(tx, SWEEP_JOB, now).await
}

/// A tenant's retention, and the progress of its sweep.
#[derive(Debug)]
pub struct Overview {
    pub conversations_days: Option<u32>,
    /// Conversations that were idle since before this time are too old.
    pub cutoff: Option<DateTime<Utc>>,
    /// The running sweep, or the last one.
    pub sweep: Option<Sweep>,
}

pub async fn overview(tx: &mut TenantTx, now: DateTime<Utc>) -> Result<Overview> {
    let own = tenants::get_own(tx).await?;
    let conversations_days = own.settings.retention.conversations_days;
    Ok(Overview {
        conversations_days,
        cutoff: conversations_days.map(|days| cutoff(now, days)),
        sweep: retention::find_sweep(tx).await?,
    })
}

/// Plans a sweep for now, if the tenant has a retention.
pub async fn sweep_now(tx: &mut TenantTx, now: DateTime<Utc>) -> Result<Overview> {
    let overview = overview(tx, now).await?;
    if overview.conversations_days.is_none() {
        return Err(not_set());
    }
    plan(tx, now).await?;
    Ok(overview)
}

/// What a sweep would delete now.
#[derive(Debug)]
pub struct SweepPreview {
    pub conversations_days: u32,
    pub cutoff: DateTime<Utc>,
    pub old: OldCounts,
}

/// Counts what a sweep would delete now, with the given days or the tenant's.
pub async fn preview(
    tx: &mut TenantTx,
    days: Option<u32>,
    now: DateTime<Utc>,
) -> Result<SweepPreview> {
    let wrong = days.and_then(|days| check_days(days, "/conversations_days"));
    Error::check(wrong.into_iter().collect())?;
    let days = match days {
        Some(days) => days,
        None => overview(tx, now)
            .await?
            .conversations_days
            .ok_or_else(not_set)?,
    };
    let cutoff = cutoff(now, days);
    Ok(SweepPreview {
        conversations_days: days,
        cutoff,
        old: retention::count_old(tx, cutoff).await?,
    })
}

fn not_set() -> Error {
    let detail = "set retention.conversations_days of the tenant first";
    Error::new(Code::RetentionNotSet, detail)
}

/// Continues the running sweep or starts one, and returns its start time. `None` if the tenant keeps everything.
pub async fn begin(app: &App, tx: &mut TenantTx) -> Result<Option<DateTime<Utc>>> {
    let days = retention::lock_days(tx).await?;
    if let Some(running) = lock_running(app, tx, days).await? {
        return Ok(Some(running.started_at));
    }
    let Some(days) = days else {
        return Ok(None);
    };
    let now = app.clock.now();
    retention::upsert_sweep(tx, cutoff(now, days), now).await?;
    let started = retention::find_sweep(tx).await?;
    Ok(started.map(|sweep| sweep.started_at))
}

/// The state of a sweep after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    Running,
    Finished,
    /// The tenant now keeps conversations for longer, or another node ended the sweep: start again.
    Restart,
}

/// Runs the next step of the sweep that started at `started_at`: it examines up to `batch` conversations.
pub async fn step(
    app: &App,
    tx: &mut TenantTx,
    started_at: DateTime<Utc>,
    batch: i64,
) -> Result<Progress> {
    let days = retention::lock_days(tx).await?;
    let running = lock_running(app, tx, days).await?;
    let Some(mut sweep) = running.filter(|sweep| sweep.started_at == started_at) else {
        return Ok(Progress::Restart);
    };
    let examined = retention::list_conversations(tx, sweep.reached, sweep.cutoff, batch).await?;
    let old: Vec<SessionId> = examined
        .iter()
        .filter(|(_, old)| *old)
        .map(|(id, _)| *id)
        .collect();
    sweep.deleted += delete_old(app, tx, &old, sweep.cutoff).await?;
    sweep.examined += examined.len() as i64;
    sweep.reached = examined.last().map(|(id, _)| *id).or(sweep.reached);
    if (examined.len() as i64) < batch {
        finish(app, tx, sweep).await?;
        return Ok(Progress::Finished);
    }
    retention::update_sweep(tx, &sweep).await?;
    Ok(Progress::Running)
}

/// Locks the running sweep until `tx` ends. A sweep that would delete what the tenant now keeps ends here.
async fn lock_running(app: &App, tx: &mut TenantTx, days: Option<u32>) -> Result<Option<Sweep>> {
    match retention::lock_running(tx).await? {
        Some(running) if !running.conforms_to(days) => {
            finish(app, tx, running).await?;
            Ok(None)
        }
        running => Ok(running),
    }
}

/// Deletes those of `ids` that are still too old and not in use. The next sweep examines the others again.
async fn delete_old(
    app: &App,
    tx: &mut TenantTx,
    ids: &[SessionId],
    cutoff: DateTime<Utc>,
) -> Result<i64> {
    if ids.is_empty() {
        return Ok(0);
    }
    let mut old = retention::lock_old(tx, ids, cutoff).await?;
    let locked: Vec<SessionId> = old.iter().map(|name| name.conversation_id).collect();
    let in_use = retention::lock_slots(tx, &locked).await?;
    old.retain(|name| !in_use.contains(&name.conversation_id));
    Ok(delete_locked(tx, &old, app.clock.now()).await? as i64)
}

/// Ends a locked sweep. One audit entry covers all deletions.
async fn finish(app: &App, tx: &mut TenantTx, sweep: Sweep) -> Result<()> {
    let now = app.clock.now();
    let finished_at = Some(now);
    let sweep = Sweep {
        finished_at,
        ..sweep
    };
    retention::update_sweep(tx, &sweep).await?;
    if sweep.deleted == 0 {
        return Ok(());
    }
    let detail = Detail::default()
        .count("examined", sweep.examined)
        .count("deleted", sweep.deleted);
    let entry = Entry::new(ACTOR, Action::RetentionSweep, &tx.tenant_id()).with(detail);
    audit::append(&app.keyring, tx, entry, now).await
}
