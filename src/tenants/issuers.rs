//! Registers the issuers of a tenant's user tokens. All functions are steps.

use serde_json::Value;

use crate::app::App;
use crate::audit;
use crate::auth;
use crate::domain::people::platform::PlatformScope;
use crate::domain::tenant::audit::{Action, Detail, Entry};
use crate::domain::tenant::issuer::{
    Issuer, KeyChoice, KeySource, MAX_ISSUER_CHARS, TokenAlgorithm,
};
use crate::domain::tenant::limits::check_room;
use crate::domain::values::resource_name::ResourceName;
use crate::error::{Code, Error, FieldError, Result};
use crate::store::TenantTx;
use crate::store::tenant::{api_keys, issuers, tenants};

pub struct NewIssuer {
    pub name: ResourceName,
    pub iss: String,
    pub audience: Option<String>,
    pub platform: PlatformScope,
    pub algorithm: TokenAlgorithm,
    pub secret: Option<String>,
    pub jwks: Option<Value>,
    pub jwks_url: Option<String>,
}

/// Registers or replaces an issuer as a whole. Returns it and whether it is new.
pub async fn register(
    app: &App,
    tx: &mut TenantTx,
    actor: &str,
    new: NewIssuer,
) -> Result<(Issuer, bool)> {
    check(app, &new)?;
    // Changes of keys and issuers run one at a time.
    tenants::lock(tx, tx.tenant_id()).await?;
    let now = app.clock.now();
    if api_keys::any_vouches_for(tx, new.platform.platform(), now).await? {
        let detail = "a bridge key covers this platform";
        return Err(Error::new(Code::PlatformTaken, detail));
    }
    let keys = match (new.secret, new.jwks, new.jwks_url) {
        (Some(secret), _, _) => {
            let context = auth::secret_context(tx.tenant_id(), new.name.as_str());
            KeySource::Secret(app.keyring.seal(&context, secret.as_bytes())?)
        }
        (None, Some(document), _) => KeySource::Document(document),
        (None, None, url) => KeySource::Url(url.unwrap_or_default()),
    };
    if issuers::find(tx, new.name.as_str()).await?.is_none() {
        let limit = tenants::get_limits(tx).await?.issuers;
        check_room("issuers", issuers::count(tx).await?, limit)?;
    }
    let issuer = Issuer {
        name: new.name,
        iss: new.iss,
        audience: new.audience,
        platform: new.platform.platform().to_owned(),
        algorithm: new.algorithm,
        keys,
        created_at: now,
        updated_at: now,
    };
    let is_new = issuers::upsert(tx, &issuer).await?;
    let stored = issuers::find(tx, issuer.name.as_str()).await?;
    let detail = Detail::default().word("algorithm", issuer.algorithm.as_str());
    let entry = Entry::new(actor, Action::IssuerPut, &issuer.name).with(detail);
    audit::append(&app.keyring, tx, entry, now).await?;
    Ok((stored.unwrap_or(issuer), is_new))
}

pub async fn delete(app: &App, tx: &mut TenantTx, actor: &str, name: &ResourceName) -> Result<()> {
    if !issuers::delete(tx, name.as_str()).await? {
        return Err(Error::not_found("issuer"));
    }
    let entry = Entry::new(actor, Action::IssuerDelete, name);
    audit::append(&app.keyring, tx, entry, app.clock.now()).await
}

fn check(app: &App, new: &NewIssuer) -> Result<()> {
    let choice = KeyChoice {
        algorithm: new.algorithm,
        secret: new.secret.as_deref(),
        jwks: new.jwks.as_ref(),
        jwks_url: new.jwks_url.as_deref(),
    };
    let mut errors = choice.check();
    let texts = [
        ("/issuer", Some(&new.iss)),
        ("/audience", new.audience.as_ref()),
    ];
    for (pointer, text) in texts {
        if text.is_some_and(|text| !(1..=MAX_ISSUER_CHARS).contains(&text.chars().count())) {
            let detail = format!("must have 1 to {MAX_ISSUER_CHARS} characters");
            errors.push(FieldError::new(pointer, detail));
        }
    }
    if new.platform.scope().is_some() {
        let detail = "an issuer covers a whole platform, not one workspace of it";
        errors.push(FieldError::new("/platform", detail));
    }
    if let Some(url) = &new.jwks_url
        && let Err(refused) = app.upstream.check_url(url)
    {
        errors.push(FieldError::new("/jwks_url", refused.to_string()));
    }
    Error::check(errors)
}
