//! Making and steering tenants: what the operator does, over HTTP and from the command line.

use chrono::{DateTime, Utc};
use secrecy::{ExposeSecret, SecretString};

use crate::agents;
use crate::api_keys;
use crate::app::App;
use crate::audit;
use crate::auth::OperatorCaller;
use crate::clock::Clock;
use crate::config::Config;
use crate::crypto::Keyring;
use crate::domain::api_key::{NewApiKey, Scope};
use crate::domain::audit::{Action, Entry};
use crate::domain::display_name::DisplayName;
use crate::domain::tenant::{Tenant, TenantState};
use crate::error::{Error, Result};
use crate::idempotency;
use crate::ids::TenantId;
use crate::store::{TenantTx, tenants};

pub struct CreatedTenant {
    pub tenant: Tenant,
    /// The first admin key, shown once.
    pub api_key: SecretString,
}

/// Makes a tenant and its first admin key, both or neither. `tx` is the operator's, and is again
/// when this returns.
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
    let entry = Entry::new(actor, Action::TenantCreate, &id);
    audit::append(keyring, tx, entry, now).await?;
    let first = NewApiKey {
        name: DisplayName::parse("first admin key").map_err(Error::internal)?,
        scopes: vec![Scope::Admin],
        platforms: Vec::new(),
        expires_at: None,
    };
    let key = api_keys::create(keyring, tx, actor, &first, now).await?;
    tx.operator_enter(TenantId::OPERATOR).await?;
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

/// Suspends or resumes a tenant and answers it; doing it again changes nothing. `tx` is the operator's,
/// and is again when this returns.
pub async fn update_state(
    app: &App,
    tx: &mut TenantTx,
    actor: &str,
    id: TenantId,
    state: TenantState,
) -> Result<Tenant> {
    let before = tenants::lock(tx, id)
        .await?
        .ok_or_else(|| Error::not_found("tenant"))?;
    if before.state == state {
        return Ok(before);
    }
    let now = app.clock.now();
    let action = match state {
        TenantState::Suspended => Action::TenantSuspend,
        TenantState::Active => Action::TenantResume,
    };
    tx.operator_enter(id).await?;
    tenants::update_state(tx, state, now).await?;
    audit::append(&app.keyring, tx, Entry::new(actor, action, &id), now).await?;
    tx.operator_enter(TenantId::OPERATOR).await?;
    Ok(Tenant { state, ..before })
}

/// `throughline tenant create`: prints the tenant and its first admin key as JSON.
pub async fn create_from_command_line(config: Config, name: &str) -> anyhow::Result<()> {
    let name = DisplayName::parse(name).map_err(|problem| anyhow::anyhow!("the name {problem}"))?;
    let app = App::build(config, Clock::system()).await?;
    let operator = OperatorCaller::local();
    let mut tx = operator.begin(&app.db).await?;
    let actor = operator.principal();
    let made = create(&app.keyring, &mut tx, &actor, &name, app.clock.now()).await?;
    tx.commit().await?;
    let shown = serde_json::json!({
        "id": made.tenant.id,
        "name": made.tenant.name,
        "state": made.tenant.state,
        "api_key": made.api_key.expose_secret(),
    });
    println!("{shown:#}");
    app.db.close().await;
    Ok(())
}
