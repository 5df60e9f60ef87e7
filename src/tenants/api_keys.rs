//! Creates and revokes API keys, and keeps the rules of their settings. All functions are steps.

use chrono::{DateTime, Utc};
use secrecy::SecretString;

use crate::audit;
use crate::crypto::{self, Keyring};
use crate::domain::tenant::api_key::{ApiKey, NewApiKey, Scope, digest, key_text};
use crate::domain::tenant::audit::{Action, Detail, Entry};
use crate::domain::tenant::limits::check_room;
use crate::error::{Code, Error, FieldError, Result};
use crate::ids::ApiKeyId;
use crate::store::TenantTx;
use crate::store::tenant::{api_keys, issuers, tenants};

const MAX_PLATFORMS: usize = 100;

pub struct CreatedKey {
    pub key: ApiKey,
    /// Shown once; the database has only its digest.
    pub text: SecretString,
}

/// Creates a key for the tenant of `tx`, on behalf of `actor`.
pub async fn create(
    keyring: &Keyring,
    tx: &mut TenantTx,
    actor: &str,
    new: &NewApiKey,
    now: DateTime<Utc>,
) -> Result<CreatedKey> {
    check(new, now)?;
    // Changes of keys and issuers run one at a time.
    tenants::lock(tx, tx.tenant_id()).await?;
    refuse_taken_platforms(tx, new).await?;
    let limit = tenants::get_limits(tx).await?.api_keys;
    check_room("api_keys", api_keys::count(tx).await?, limit)?;
    let created = insert(tx, new, now).await?;
    audit::append(keyring, tx, created_entry(actor, &created.key), now).await?;
    Ok(created)
}

/// A new key without its audit entry.
pub async fn insert(tx: &mut TenantTx, new: &NewApiKey, now: DateTime<Utc>) -> Result<CreatedKey> {
    let id = ApiKeyId::generate();
    let text = key_text(tx.tenant_id(), id, crypto::random()?);
    api_keys::insert(tx, id, digest(&text), new, now).await?;
    Ok(CreatedKey {
        key: ApiKey {
            id,
            name: new.name.as_str().to_owned(),
            scopes: new.scopes.clone(),
            platforms: new.platforms.clone(),
            created_at: now,
            expires_at: new.expires_at,
            revoked_at: None,
            last_used_at: None,
        },
        text,
    })
}

/// The audit entry of a key that `actor` created.
pub fn created_entry(actor: &str, key: &ApiKey) -> Entry {
    let scopes = key.scopes.iter().map(|scope| scope.as_str());
    let detail = Detail::default().words("scopes", scopes);
    Entry::new(actor, Action::ApiKeyCreate, &key.id).with(detail)
}

/// An issuer's platform takes no bridge keys besides.
async fn refuse_taken_platforms(tx: &mut TenantTx, new: &NewApiKey) -> Result<()> {
    if new.platforms.is_empty() {
        return Ok(());
    }
    let platforms: Vec<String> = new
        .platforms
        .iter()
        .map(|entry| entry.platform().to_owned())
        .collect();
    if issuers::any_vouches_for(tx, &platforms).await? {
        let detail = "an issuer covers one of these platforms";
        return Err(Error::new(Code::PlatformTaken, detail));
    }
    Ok(())
}

/// Revokes a key; a revoked key stays as it is. The last admin key without an expiry cannot be revoked: without
/// it nobody could call for the tenant any more.
pub async fn revoke(
    keyring: &Keyring,
    tx: &mut TenantTx,
    actor: &str,
    id: ApiKeyId,
    now: DateTime<Utc>,
) -> Result<()> {
    // Two concurrent requests must not revoke two keys because of each other.
    tenants::lock(tx, tx.tenant_id()).await?;
    let key = api_keys::find(tx, id).await?;
    let key = key.ok_or_else(|| Error::not_found("API key"))?;
    if key.revoked_at.is_some() {
        return Ok(());
    }
    if key.scopes.contains(&Scope::Admin) && !api_keys::has_other_lasting_admin(tx, id).await? {
        let detail = "it is the last admin key that does not expire: create another one first, then revoke this one";
        return Err(Error::new(Code::LastAdminKey, detail));
    }
    api_keys::update_revoked(tx, id, now).await?;
    let entry = Entry::new(actor, Action::ApiKeyRevoke, &id);
    audit::append(keyring, tx, entry, now).await
}

pub fn check(new: &NewApiKey, now: DateTime<Utc>) -> Result<()> {
    let mut errors = Vec::new();
    if new.scopes.is_empty() {
        errors.push(FieldError::new("/scopes", "a key needs at least one scope"));
    }
    if has_duplicates(&new.scopes) {
        errors.push(FieldError::new("/scopes", "a scope is named twice"));
    }
    if has_duplicates(&new.platforms) {
        errors.push(FieldError::new("/platforms", "a platform is named twice"));
    }
    let bridge = new.scopes.contains(&Scope::Bridge);
    if bridge && new.platforms.is_empty() {
        errors.push(FieldError::new(
            "/platforms",
            "a bridge key names the platforms it covers",
        ));
    }
    if !bridge && !new.platforms.is_empty() {
        errors.push(FieldError::new(
            "/platforms",
            "only a bridge key has platforms",
        ));
    }
    if new.platforms.len() > MAX_PLATFORMS {
        let detail = format!("a key has at most {MAX_PLATFORMS} platforms");
        errors.push(FieldError::new("/platforms", detail));
    }
    if new.expires_at.is_some_and(|at| at <= now) {
        errors.push(FieldError::new("/expires_at", "must be in the future"));
    }
    Error::check(errors)
}

fn has_duplicates<T: PartialEq>(items: &[T]) -> bool {
    items
        .iter()
        .enumerate()
        .any(|(index, item)| items[..index].contains(item))
}
