//! Linking by a code that a user carries from one chat to another: it proves both sides. Guessing locks the
//! caller out. A wrong code gets the same answer as an expired, a used or a foreign one.

use chrono::{DateTime, Utc};

use super::merge::{MergeRequest, merge};
use super::resolve::{self, ResolveRequest};
use crate::app::App;
use crate::audit;
use crate::auth::TenantCaller;
use crate::crypto::Keyring;
use crate::domain::bridge::chat::Chat;
use crate::domain::conversation::session::SessionHandle;
use crate::domain::identity_links::link_code::{
    AttemptLimit, IDENTITY_ATTEMPTS, KEY_ATTEMPTS, LINK_CODE_TTL, LinkCode, TENANT_ATTEMPTS,
    code_not_found,
};
use crate::domain::identity_links::{Merge, MoveKind};
use crate::domain::people::access::Namespace;
use crate::domain::people::platform::PlatformScope;
use crate::domain::people::user::{Identity, IdentityOwner};
use crate::domain::tenant::agent::DEFAULT_AGENT;
use crate::domain::tenant::audit::{Action, Detail, Entry};
use crate::error::{Code, Error, Result};
use crate::ids::{ApiKeyId, IdentityId, TenantId, UserId};
use crate::store::TenantTx;
use crate::store::identity_links::link_codes::{self, NewCode};
use crate::store::people::identities;

const CONTEXT: &str = "codes/link";
/// Keeps one statement about a long text short.
const VOID_BATCH: usize = 1000;

/// Makes a code for the user of the identity `minted_by`.
pub async fn mint(
    app: &App,
    tx: &mut TenantTx,
    actor: &str,
    minted_by: &IdentityOwner,
    platform: Option<&PlatformScope>,
) -> Result<(LinkCode, DateTime<Utc>)> {
    let now = app.clock.now();
    let code = LinkCode::generate()?;
    let expires_at = now + LINK_CODE_TTL;
    let new = NewCode {
        digest: &app.keyring.mac(CONTEXT, &message(tx, code.as_str())).tag,
        user_id: minted_by.user_id,
        minted_by: minted_by.id,
        platform,
        expires_at,
    };
    if !link_codes::insert(tx, &new, now).await? {
        let retry_at = link_codes::find_next_expiry(tx, minted_by.user_id).await?;
        let detail = "three codes are pending: use one, or wait until one has expired";
        return Err(Error {
            retry_after: Some(seconds_until(retry_at, now)),
            ..Error::new(Code::TooManyCodes, detail)
        });
    }
    let detail = Detail::default().id("user_id", minted_by.user_id);
    let entry = Entry::new(actor, Action::LinkCodeCreate, &minted_by.id).with(detail);
    audit::append(&app.keyring, tx, entry, now).await?;
    Ok((code, expires_at))
}

/// The text that a code's hash is made of. It contains the tenant: a code is worth nothing in another.
fn message(tx: &TenantTx, code: &str) -> Vec<u8> {
    let mut message = tx.tenant_id().as_uuid().as_bytes().to_vec();
    message.extend_from_slice(code.as_bytes());
    message
}

/// The digests of a code under every configured key. Text that is no code is hashed too: it takes as long.
fn digests(keyring: &Keyring, tx: &TenantTx, typed: &str) -> Vec<Vec<u8>> {
    let code = typed.parse::<LinkCode>();
    let text = code.as_ref().map_or(typed, LinkCode::as_str);
    keyring.every_mac(CONTEXT, &message(tx, text))
}

/// The subjects that an attempt counts against, with their limits.
fn subjects(
    tenant_id: TenantId,
    identity_id: IdentityId,
    key: Option<ApiKeyId>,
) -> Vec<(String, AttemptLimit)> {
    let of_identity = (identity_id.to_string(), IDENTITY_ATTEMPTS);
    let of_key = key.map(|key| (key.to_string(), KEY_ATTEMPTS));
    let of_tenant = (tenant_id.to_string(), TENANT_ATTEMPTS);
    [Some(of_identity), of_key, Some(of_tenant)]
        .into_iter()
        .flatten()
        .collect()
}

/// Charges an attempt before the code is checked. The caller commits it at once, so that a refusal keeps it.
pub async fn charge(
    app: &App,
    tx: &mut TenantTx,
    identity_id: IdentityId,
    key: Option<ApiKeyId>,
) -> Result<()> {
    let now = app.clock.now();
    for (subject, limit) in subjects(tx.tenant_id(), identity_id, key) {
        if link_codes::charge_attempt(tx, &subject, limit, now)
            .await?
            .is_none()
        {
            let retry_at = link_codes::find_lock(tx, &subject, limit).await?;
            return Err(Error {
                retry_after: Some(seconds_until(retry_at, now)),
                ..Error::new(Code::TooManyAttempts, "too many wrong codes")
            });
        }
    }
    Ok(())
}

/// Refunds the attempt after a correct code.
pub async fn refund(
    tx: &mut TenantTx,
    identity_id: IdentityId,
    key: Option<ApiKeyId>,
) -> Result<()> {
    let subjects = subjects(tx.tenant_id(), identity_id, key);
    let names: Vec<String> = subjects.into_iter().map(|(subject, _)| subject).collect();
    link_codes::refund_attempts(tx, &names).await
}

fn seconds_until(time: Option<DateTime<Utc>>, now: DateTime<Utc>) -> u32 {
    let seconds = time.map_or(0, |time| (time - now).num_seconds());
    u32::try_from(seconds.max(1)).unwrap_or(u32::MAX)
}

/// Voids a code that appeared where others read it.
pub async fn void(app: &App, tx: &mut TenantTx, typed: &str) -> Result<()> {
    let digests = digests(&app.keyring, tx, typed);
    link_codes::update_voided(tx, &digests, app.clock.now()).await
}

/// Voids every code in a text that others read, whatever surrounds the code.
pub async fn void_codes_in(app: &App, tx: &mut TenantTx, text: &str) -> Result<()> {
    let now = app.clock.now();
    // Hashing every eight characters of a long text is worth it only then.
    if !link_codes::has_pending(tx, now).await? {
        return Ok(());
    }
    let digests: Vec<Vec<u8>> = LinkCode::find_all(text)
        .iter()
        .flat_map(|code| app.keyring.every_mac(CONTEXT, &message(tx, code)))
        .collect();
    for batch in digests.chunks(VOID_BATCH) {
        link_codes::update_voided(tx, batch, now).await?;
    }
    Ok(())
}

/// Consumes a code and returns the user who minted it.
pub async fn consume(
    app: &App,
    tx: &mut TenantTx,
    typed: &str,
    redeemer: &Identity,
) -> Result<UserId> {
    let digests = digests(&app.keyring, tx, typed);
    let platform = redeemer.name.platform();
    let now = app.clock.now();
    let minter = link_codes::claim(tx, &digests, platform, redeemer.id, now).await?;
    let minter = minter.ok_or_else(code_not_found)?;
    // The identity that minted the code may belong to another user by now.
    let owner = identities::get(tx, minter.minted_by).await?;
    match owner {
        Some(owner) if owner.user_id == minter.user_id => Ok(owner.user_id),
        Some(_) | None => Err(code_not_found()),
    }
}

pub struct RedeemRequest<'a> {
    pub code: &'a str,
    pub identity: &'a Identity,
    pub namespace: Namespace,
    /// Reports the merge and leaves the code unused: the caller does not commit.
    pub dry_run: bool,
}

#[derive(Debug)]
pub struct RedeemResult {
    pub merge: Merge,
    pub session_key: Option<String>,
    pub session: Option<SessionHandle>,
}

/// Merges the user of the redeeming identity into the user who minted the code.
pub async fn redeem(
    app: &App,
    tx: &mut TenantTx,
    actor: &str,
    redeem: &RedeemRequest<'_>,
) -> Result<RedeemResult> {
    let into = consume(app, tx, redeem.code, redeem.identity).await?;
    let from = identities::get(tx, redeem.identity.id).await?;
    let from = from.ok_or_else(|| Error::not_found("identity"))?.user_id;
    let request = MergeRequest {
        into,
        from,
        kind: MoveKind::Code,
        reason: None,
        by: Some(redeem.identity.id),
        dry_run: redeem.dry_run,
    };
    let merge = merge(app, tx, actor, &request).await?;
    if redeem.dry_run {
        return Ok(RedeemResult {
            merge,
            session_key: None,
            session: None,
        });
    }
    let request = ResolveRequest {
        identity: &redeem.identity.name,
        agent: DEFAULT_AGENT,
        chat: &Chat::DM,
        namespace: redeem.namespace,
    };
    let (session_key, session) = resolve::preview(tx, request).await?;
    Ok(RedeemResult {
        merge,
        session_key,
        session,
    })
}

/// Charges an attempt before `work` checks a code, and refunds it unless the code was wrong.
pub async fn with_charged_attempt<T>(
    app: &App,
    caller: &TenantCaller,
    identity_id: IdentityId,
    work: impl AsyncFnOnce() -> Result<T>,
) -> Result<T> {
    let mut tx = caller.begin(&app.db).await?;
    charge(app, &mut tx, identity_id, caller.key_id()).await?;
    tx.commit().await?;
    let outcome = work().await;
    let code_was_wrong = matches!(&outcome, Err(error) if error.code == Code::CodeNotFound);
    if !code_was_wrong {
        let mut tx = caller.begin(&app.db).await?;
        refund(&mut tx, identity_id, caller.key_id()).await?;
        tx.commit().await?;
    }
    outcome
}
