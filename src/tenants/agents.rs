//! Agents of a tenant, and the rule that a secret never follows a changed address. All functions are steps.

use chrono::{DateTime, Utc};
use url::Url;

use crate::agent_runtime::key_context;
use crate::app::App;
use crate::audit;
use crate::domain::tenant::agent::{AgentSpec, DEFAULT_AGENT, KeyChange};
use crate::domain::tenant::audit::{Action, Entry};
use crate::domain::tenant::limits::check_room;
use crate::domain::values::resource_name::ResourceName;
use crate::error::{Code, Error, FieldError, Result};
use crate::store::TenantTx;
use crate::store::tenant::agents::{self, AgentRow};
use crate::store::tenant::tenants;

pub struct PutAgent {
    pub agent: AgentRow,
    pub is_new: bool,
}

/// Creates or replaces an agent.
pub async fn put(
    app: &App,
    tx: &mut TenantTx,
    actor: &str,
    name: &ResourceName,
    spec: AgentSpec,
) -> Result<PutAgent> {
    check(app, &spec)?;
    let mut before = agents::lock(tx, name.as_str()).await?;
    if before.is_none() {
        // Agents are created one at a time, so that the count is right.
        tenants::lock(tx, tx.tenant_id()).await?;
        before = agents::lock(tx, name.as_str()).await?;
    }
    if before.is_none() {
        let limit = tenants::get_limits(tx).await?.agents;
        check_room("agents", agents::count(tx).await?, limit)?;
    }
    let sealed_key = match (&spec.upstream.api_key, &before) {
        (KeyChange::Set(key), _) => {
            let context = key_context(tx.tenant_id(), name.as_str());
            Some(app.keyring.seal(&context, key.as_bytes())?)
        }
        (KeyChange::Drop, _) | (KeyChange::Keep, None) => None,
        (KeyChange::Keep, Some(before)) => kept_key(before, &spec)?,
    };
    let now = app.clock.now();
    let agent = agents::upsert(tx, name.as_str(), &spec, sealed_key.as_deref(), now).await?;
    let entry = Entry::new(actor, Action::AgentPut, name);
    audit::append(&app.keyring, tx, entry, now).await?;
    Ok(PutAgent {
        agent,
        is_new: before.is_none(),
    })
}

/// The stored key, if the new address has the same authority.
fn kept_key(before: &AgentRow, spec: &AgentSpec) -> Result<Option<Vec<u8>>> {
    let new_url = spec.upstream.base_url.as_deref();
    let same = authority(before.spec.upstream.base_url.as_deref()) == authority(new_url);
    match &before.api_key_enc {
        Some(_) if !same && new_url.is_some() => Err(Error::fields(
            Code::SecretRequired,
            vec![FieldError::new(
                "/upstream/api_key",
                "the base_url changed: give its api_key again, or null",
            )],
        )),
        Some(_) if !same => Ok(None),
        sealed_key => Ok(sealed_key.clone()),
    }
}

/// Scheme, host and port: where a key would be sent.
fn authority(base_url: Option<&str>) -> Option<(String, String, Option<u16>)> {
    let url = Url::parse(base_url?).ok()?;
    let host = url.host_str()?.to_owned();
    Some((url.scheme().to_owned(), host, url.port_or_known_default()))
}

fn check(app: &App, spec: &AgentSpec) -> Result<()> {
    let mut errors = spec.check();
    if let Some(url) = &spec.upstream.base_url
        && let Err(refused) = app.upstream.check_url(url)
    {
        errors.push(FieldError::new("/upstream/base_url", refused.to_string()));
    }
    Error::check(errors)
}

/// Creates the agent that every tenant starts with.
pub async fn create_default(tx: &mut TenantTx, now: DateTime<Utc>) -> Result<()> {
    agents::upsert(tx, DEFAULT_AGENT, &AgentSpec::demo(), None, now).await?;
    Ok(())
}

/// Deletes an agent, but never the default one.
pub async fn delete(app: &App, tx: &mut TenantTx, actor: &str, name: &ResourceName) -> Result<()> {
    if name.as_str() == DEFAULT_AGENT {
        let detail = "main is the default agent: change it instead of deleting it";
        return Err(Error::new(Code::AgentInUse, detail));
    }
    if !agents::delete(tx, name.as_str()).await? {
        return Err(Error::not_found("agent"));
    }
    let entry = Entry::new(actor, Action::AgentDelete, name);
    audit::append(&app.keyring, tx, entry, app.clock.now()).await
}
