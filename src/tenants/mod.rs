//! Tenants: the operator's use cases, over HTTP and from the command line, and a tenant's own settings. All are
//! steps, which take `&mut TenantTx` and never commit, except the operations `stop_turns` and
//! `create_from_command_line`.

pub mod agents;
pub mod api_keys;
pub mod issuers;

use chrono::{DateTime, TimeDelta, Utc};
use secrecy::{ExposeSecret, SecretString};

use crate::app::App;
use crate::audit;
use crate::auth::{OperatorCaller, ServiceCaller};
use crate::clock::Clock;
use crate::config::Config;
use crate::crypto::Keyring;
use crate::domain::people::display_name::DisplayName;
use crate::domain::tenant::agent::DmScope;
use crate::domain::tenant::api_key::{NewApiKey, Scope};
use crate::domain::tenant::audit::{Action, Entry};
use crate::domain::tenant::limits::{LimitChanges, LimitOverrides, Limits};
use crate::domain::tenant::origin::Origin;
use crate::domain::tenant::retention::check_days;
use crate::domain::tenant::usage::UsageCounts;
use crate::domain::tenant::{Retention, ServiceState, Tenant, TenantState};
use crate::domain::turn::StopReason;
use crate::error::{Error, FieldError, Result};
use crate::idempotency;
use crate::ids::TenantId;
use crate::sessions;
use crate::store::TenantTx;
use crate::store::db::jobs;
use crate::store::tenant::{tenants, usage};
use crate::store::turn::turn_stops;
use crate::tenants::api_keys::CreatedKey;

/// The job that removes events after their retention.
pub const EXPIRE_EVENTS_JOB: &str = "expire_events";

pub struct CreatedTenant {
    pub tenant: Tenant,
    /// The first admin key, shown once.
    pub api_key: SecretString,
}

/// Creates a tenant and its first admin key, both or neither. `tx` is in the operator's tenant, and is again on
/// return.
pub async fn create(
    keyring: &Keyring,
    tx: &mut TenantTx,
    actor: &str,
    name: &DisplayName,
    now: DateTime<Utc>,
) -> Result<CreatedTenant> {
    let id = TenantId::generate();
    tx.operator_enter(id).await?;
    tenants::insert(tx, name, now).await?;
    agents::create_default(tx, now).await?;
    idempotency::plan_expiry(tx, now).await?;
    jobs::insert(tx, EXPIRE_EVENTS_JOB, now).await?;
    let entry = Entry::new(actor, Action::TenantCreate, &id);
    audit::append(keyring, tx, entry.clone(), now).await?;
    let first = NewApiKey {
        name: "first admin key"
            .parse::<DisplayName>()
            .map_err(Error::internal)?,
        scopes: vec![Scope::Admin],
        platforms: Vec::new(),
        expires_at: None,
    };
    let key = api_keys::create(keyring, tx, actor, &first, now).await?;
    tx.operator_enter(TenantId::OPERATOR).await?;
    audit::append(keyring, tx, entry, now).await?;
    Ok(CreatedTenant {
        tenant: Tenant {
            id,
            name: name.as_str().to_owned(),
            state: TenantState::Active,
            created_at: now,
        },
        api_key: key.text,
    })
}

/// Writes the same entries to the operator's audit and to the tenant's. They are the last writes of `tx`, which is
/// in the operator's tenant, and is again on return.
async fn record(
    app: &App,
    tx: &mut TenantTx,
    id: TenantId,
    entries: impl IntoIterator<Item = Entry> + Clone,
) -> Result<()> {
    let now = app.clock.now();
    // The operator's head first: a transaction that waits for it must not hold up all writers of a tenant.
    for entry in entries.clone() {
        audit::append(&app.keyring, tx, entry, now).await?;
    }
    tx.operator_enter(id).await?;
    for entry in entries {
        audit::append(&app.keyring, tx, entry, now).await?;
    }
    tx.operator_enter(TenantId::OPERATOR).await
}

/// Locks the tenant until `tx` ends. A tenant that is being deleted exists only for the deletion.
async fn lock_living(tx: &mut TenantTx, id: TenantId) -> Result<Tenant> {
    tenants::lock(tx, id)
        .await?
        .filter(|tenant| tenant.state != TenantState::Deleting)
        .ok_or_else(|| Error::not_found("tenant"))
}

/// Suspends or resumes a tenant and returns it. A repetition changes nothing. `tx` is in the operator's tenant, and
/// is again on return.
pub async fn update_state(
    app: &App,
    tx: &mut TenantTx,
    actor: &str,
    id: TenantId,
    state: TenantState,
) -> Result<Tenant> {
    let before = lock_living(tx, id).await?;
    let entry = write_state(app, tx, actor, &before, state).await?;
    record(app, tx, id, entry).await?;
    Ok(Tenant { state, ..before })
}

/// Sets the state of a tenant that `tx` has locked. Returns the audit entry, if the state changed.
async fn write_state(
    app: &App,
    tx: &mut TenantTx,
    actor: &str,
    before: &Tenant,
    state: TenantState,
) -> Result<Option<Entry>> {
    if before.state == state {
        return Ok(None);
    }
    let id = before.id;
    let now = app.clock.now();
    let action = match state {
        TenantState::Suspended => Action::TenantSuspend,
        TenantState::Active => Action::TenantResume,
        TenantState::Deleting => Action::TenantDelete,
    };
    tx.operator_enter(id).await?;
    tenants::update_state(tx, state, now).await?;
    if state == TenantState::Suspended {
        jobs::insert(tx, STOP_TURNS_JOB, now + STOP_TURNS_DELAY).await?;
    }
    tx.operator_enter(TenantId::OPERATOR).await?;
    Ok(Some(Entry::new(actor, action, &id)))
}

/// The job that stops the turns of a tenant that is no longer served.
pub const STOP_TURNS_JOB: &str = "stop_turns";

/// The delay of that job. By then no node has a key of the tenant in its cache, and every turn that was accepted
/// with one is committed.
const STOP_TURNS_DELAY: TimeDelta = TimeDelta::seconds(2);

/// Conversations per transaction that stops turns.
const STOP_BATCH: i64 = 200;

/// An operation: stops the turns of a tenant after its suspension or deletion was committed. Returns whether some
/// are left for the job: those of conversations that another transaction has locked.
pub async fn stop_turns(app: &App, id: TenantId) -> Result<bool> {
    let caller = ServiceCaller::for_tenant(id);
    loop {
        let mut tx = caller.begin(&app.db).await?;
        if tenants::is_active(&mut tx).await? {
            tx.end().await?;
            return Ok(false);
        }
        let busy = turn_stops::lock_busy(&mut tx, STOP_BATCH).await?;
        let reason = StopReason::TenantSuspended;
        let now = app.clock.now();
        let (count, sessions) = turn_stops::stop_all(&mut tx, &busy, None, reason, now).await?;
        for session_id in sessions {
            sessions::close_calls(&mut tx, session_id, "the tenant was suspended", now).await?;
        }
        tx.commit().await?;
        if count == 0 {
            let mut tx = caller.begin(&app.db).await?;
            let has_open = turn_stops::has_open(&mut tx).await?;
            tx.end().await?;
            return Ok(has_open);
        }
    }
}

/// The job that deletes a tenant's rows.
pub const ERASE_JOB: &str = "erase_tenant";

/// Starts the deletion of a tenant; a repetition changes nothing. Only the operator's audit has an entry: the
/// tenant's own is deleted too. `tx` is in the operator's tenant, and is again on return.
pub async fn delete(app: &App, tx: &mut TenantTx, actor: &str, id: TenantId) -> Result<Tenant> {
    let before = tenants::lock(tx, id)
        .await?
        .ok_or_else(|| Error::not_found("tenant"))?;
    if before.state == TenantState::Deleting {
        return Ok(before);
    }
    let now = app.clock.now();
    let state = TenantState::Deleting;
    tx.operator_enter(id).await?;
    tenants::update_state(tx, state, now).await?;
    jobs::insert(tx, STOP_TURNS_JOB, now + STOP_TURNS_DELAY).await?;
    jobs::insert(tx, ERASE_JOB, now).await?;
    tx.operator_enter(TenantId::OPERATOR).await?;
    let entry = Entry::new(actor, Action::TenantDelete, &id);
    audit::append(&app.keyring, tx, entry, now).await?;
    Ok(Tenant { state, ..before })
}

/// Sets a tenant's limits. `tx` is in the operator's tenant, and is again on return.
pub async fn set_limits(
    app: &App,
    tx: &mut TenantTx,
    actor: &str,
    id: TenantId,
    limits: &LimitOverrides,
) -> Result<()> {
    Error::check(limits.errors())?;
    lock_living(tx, id).await?;
    let now = app.clock.now();
    tx.operator_enter(id).await?;
    tenants::update_limits(tx, limits, now).await?;
    tx.operator_enter(TenantId::OPERATOR).await?;
    let entry = Entry::new(actor, Action::TenantLimits, &id);
    record(app, tx, id, [entry]).await
}

/// An operator's change of a tenant. Absent members stay.
#[derive(Default)]
pub struct OperatorChange {
    pub name: Option<DisplayName>,
    pub state: Option<ServiceState>,
    pub limits: LimitsChange,
}

#[derive(Default)]
pub enum LimitsChange {
    #[default]
    Keep,
    /// All limits have their defaults again.
    Reset,
    Some(LimitChanges),
}

/// Changes a tenant, all of it or nothing. `tx` is in the operator's tenant, and is again on return.
pub async fn update(
    app: &App,
    tx: &mut TenantTx,
    actor: &str,
    id: TenantId,
    change: &OperatorChange,
) -> Result<()> {
    if let LimitsChange::Some(limits) = &change.limits {
        let prefixed = |error: FieldError| FieldError {
            pointer: format!("/limits{}", error.pointer),
            ..error
        };
        Error::check(
            limits
                .overrides()
                .errors()
                .into_iter()
                .map(prefixed)
                .collect(),
        )?;
    }
    let before = lock_living(tx, id).await?;
    let now = app.clock.now();
    let mut entries = Vec::new();
    if let Some(name) = &change.name {
        tenants::update_name(tx, id, name, now).await?;
        entries.push(Entry::new(actor, Action::TenantUpdate, &id));
    }
    tx.operator_enter(id).await?;
    match &change.limits {
        LimitsChange::Keep => {}
        LimitsChange::Reset => tenants::update_limits(tx, &LimitOverrides::default(), now).await?,
        LimitsChange::Some(limits) => {
            tenants::update_single_limits(tx, &limits.reset_names(), &limits.overrides(), now)
                .await?;
        }
    }
    tx.operator_enter(TenantId::OPERATOR).await?;
    if !matches!(change.limits, LimitsChange::Keep) {
        entries.push(Entry::new(actor, Action::TenantLimits, &id));
    }
    if let Some(state) = change.state {
        entries.extend(write_state(app, tx, actor, &before, state.into()).await?);
    }
    record(app, tx, id, entries).await
}

/// Creates an admin key for a tenant that may have lost its own: past the tenant's limit of keys, and also during
/// its suspension. `tx` is in the operator's tenant, and is again on return.
pub async fn create_admin_key(
    app: &App,
    tx: &mut TenantTx,
    actor: &str,
    id: TenantId,
    name: DisplayName,
) -> Result<CreatedKey> {
    lock_living(tx, id).await?;
    let now = app.clock.now();
    let new = NewApiKey {
        name,
        scopes: vec![Scope::Admin],
        platforms: Vec::new(),
        expires_at: None,
    };
    tx.operator_enter(id).await?;
    let created = api_keys::insert(tx, &new, now).await?;
    tx.operator_enter(TenantId::OPERATOR).await?;
    record(app, tx, id, [api_keys::created_entry(actor, &created.key)]).await?;
    Ok(created)
}

/// A tenant as its operator sees it: no content, and its usage as sums.
pub struct TenantView {
    pub tenant: Tenant,
    pub limits: Limits,
    pub usage: UsageCounts,
}

/// `tx` is in the operator's tenant, and is again on return.
pub async fn view(
    tx: &mut TenantTx,
    id: TenantId,
    from: DateTime<Utc>,
    to: DateTime<Utc>,
) -> Result<TenantView> {
    let tenant = tenants::find_in(tx, id).await?;
    let tenant = tenant.ok_or_else(|| Error::not_found("tenant"))?;
    tx.operator_enter(id).await?;
    let limits = tenants::get_limits(tx).await?;
    let usage = usage::get_total(tx, from, to).await?;
    tx.operator_enter(TenantId::OPERATOR).await?;
    Ok(TenantView {
        tenant,
        limits,
        usage,
    })
}

/// A tenant's change of its own settings. Absent members stay.
pub struct SettingsChange {
    pub name: Option<DisplayName>,
    pub dm_scope: Option<DmScope>,
    pub allowed_origins: Option<Vec<Origin>>,
    pub retention: Option<Retention>,
}

const MAX_ORIGINS: usize = 50;

impl SettingsChange {
    fn check(&self) -> Result<()> {
        let mut errors = Vec::new();
        let origins = self.allowed_origins.as_ref().map_or(0, Vec::len);
        if origins > MAX_ORIGINS {
            let detail = format!("must have at most {MAX_ORIGINS} entries");
            errors.push(FieldError::new("/allowed_origins", detail));
        }
        let days = self
            .retention
            .and_then(|retention| retention.conversations_days);
        errors.extend(days.and_then(|days| check_days(days, "/retention/conversations_days")));
        Error::check(errors)
    }
}

pub async fn update_settings(
    app: &App,
    tx: &mut TenantTx,
    actor: &str,
    change: SettingsChange,
) -> Result<()> {
    change.check()?;
    tenants::lock(tx, tx.tenant_id()).await?;
    let mut own = tenants::get_own(tx).await?;
    if let Some(name) = change.name {
        own.tenant.name = name.as_str().to_owned();
    }
    if let Some(dm_scope) = change.dm_scope {
        own.settings.dm_scope = dm_scope;
    }
    if let Some(retention) = change.retention {
        own.settings.retention = retention;
    }
    if let Some(origins) = change.allowed_origins {
        own.allowed_origins = origins
            .iter()
            .map(|origin| origin.as_str().to_owned())
            .collect();
    }
    let now = app.clock.now();
    tenants::update_settings(tx, &own, now).await?;
    if change
        .retention
        .is_some_and(|retention| retention.conversations_days.is_some())
    {
        sessions::retention::plan(tx, now).await?;
    }
    let entry = Entry::new(actor, Action::TenantUpdate, &own.tenant.id);
    audit::append(&app.keyring, tx, entry, now).await
}

/// `throughline tenant create`: prints the tenant and its first admin key as JSON. An operation.
pub async fn create_from_command_line(config: Config, name: &str) -> anyhow::Result<()> {
    let name = name
        .parse::<DisplayName>()
        .map_err(|problem| anyhow::anyhow!("the name {problem}"))?;
    let app = App::build(config, Clock::system()).await?;
    let operator = OperatorCaller::local();
    let mut tx = operator.begin(&app.db).await?;
    let actor = operator.principal();
    let created = create(&app.keyring, &mut tx, &actor, &name, app.clock.now()).await?;
    tx.commit().await?;
    let output = serde_json::json!({
        "id": created.tenant.id,
        "name": created.tenant.name,
        "state": created.tenant.state,
        "api_key": created.api_key.expose_secret(),
    });
    println!("{output:#}");
    app.db.close().await;
    Ok(())
}
