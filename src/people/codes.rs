//! Linking by a code that is carried from one chat to another: proof of both sides. Whoever guesses is
//! locked out; a wrong code is answered as one that has run out, was used, or is someone else's.

use chrono::{DateTime, Utc};

use super::merge::{MergeRequest, merge};
use super::resolve::{self, ResolveRequest};
use crate::app::App;
use crate::audit;
use crate::crypto::Keyring;
use crate::domain::bridge::chat::Chat;
use crate::domain::conversation::session::SessionHandle;
use crate::domain::identity_links::link_code::{
    AttemptLimit, IDENTITY_ATTEMPTS, KEY_ATTEMPTS, LINK_LIFE, LinkCode, TENANT_ATTEMPTS,
    code_not_found,
};
use crate::domain::identity_links::{Merge, MoveKind};
use crate::domain::people::access::Namespace;
use crate::domain::people::platform::PlatformScope;
use crate::domain::people::user::{Identity, KnownIdentity};
use crate::domain::tenant::agent::DEFAULT_AGENT;
use crate::domain::tenant::audit::{Action, Detail, Entry};
use crate::error::{Code, Error, Result};
use crate::ids::{ApiKeyId, IdentityId, TenantId, UserId};
use crate::store::TenantTx;
use crate::store::identity_links::link_codes::{self, NewCode};
use crate::store::people::identities;

const CONTEXT: &str = "codes/link";
/// So that one statement about a long text stays short.
const VOIDED_AT_ONCE: usize = 1000;

/// Makes a code for the person whose account `minted_by` is.
pub async fn mint(
    app: &App,
    tx: &mut TenantTx,
    actor: &str,
    minted_by: &KnownIdentity,
    platform: Option<&PlatformScope>,
) -> Result<(LinkCode, DateTime<Utc>)> {
    let now = app.clock.now();
    let code = LinkCode::generate()?;
    let expires_at = now + LINK_LIFE;
    let new = NewCode {
        digest: &app.keyring.mac(CONTEXT, &message(tx, code.as_str())).tag,
        user_id: minted_by.user_id,
        minted_by: minted_by.id,
        platform,
        expires_at,
    };
    if !link_codes::insert(tx, &new, now).await? {
        let free_at = link_codes::find_next_expiry(tx, minted_by.user_id).await?;
        let detail = "three codes are pending: use one, or wait until one expires";
        return Err(Error {
            retry_after: Some(seconds_until(free_at, now)),
            ..Error::new(Code::TooManyCodes, detail)
        });
    }
    let detail = Detail::default().id("user_id", minted_by.user_id);
    let entry = Entry::new(actor, Action::LinkCodeCreate, &minted_by.id).with(detail);
    audit::append(&app.keyring, tx, entry, now).await?;
    Ok((code, expires_at))
}

/// What a code's hash is made of: one tenant's code is nothing to another.
fn message(tx: &TenantTx, code: &str) -> Vec<u8> {
    let mut message = tx.tenant_id().as_uuid().as_bytes().to_vec();
    message.extend_from_slice(code.as_bytes());
    message
}

/// Under every key that could have made it. What is no code at all is hashed like one: it takes as long.
fn digests(keyring: &Keyring, tx: &TenantTx, typed: &str) -> Vec<Vec<u8>> {
    let code = typed.parse::<LinkCode>();
    let text = code.as_ref().map_or(typed, LinkCode::as_str);
    keyring.every_mac(CONTEXT, &message(tx, text))
}

/// What a guess is counted for.
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

/// Charges an attempt before the code is looked at, in a transaction of its own: refused, it stays.
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
            let free_at = link_codes::find_lock(tx, &subject, limit).await?;
            return Err(Error {
                retry_after: Some(seconds_until(free_at, now)),
                ..Error::new(Code::TooManyAttempts, "there were too many wrong codes")
            });
        }
    }
    Ok(())
}

/// Gives it back to whoever had the right code.
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

/// Makes a code worthless that was shown where others read.
pub async fn void(app: &App, tx: &mut TenantTx, typed: &str) -> Result<()> {
    let digests = digests(&app.keyring, tx, typed);
    link_codes::void(tx, &digests, app.clock.now()).await
}

/// Makes every code worthless that a text shows where others read, whatever surrounds it.
pub async fn discard_partial(app: &App, tx: &mut TenantTx, text: &str) -> Result<()> {
    let now = app.clock.now();
    // Hashing every eight signs of a long text is worth it only then.
    if !link_codes::is_any_pending(tx, now).await? {
        return Ok(());
    }
    let digests: Vec<Vec<u8>> = LinkCode::find_all(text)
        .iter()
        .flat_map(|shown| app.keyring.every_mac(CONTEXT, &message(tx, shown)))
        .collect();
    for batch in digests.chunks(VOIDED_AT_ONCE) {
        link_codes::void(tx, batch, now).await?;
    }
    Ok(())
}

/// Takes a code and answers whose it was.
pub async fn consume(
    app: &App,
    tx: &mut TenantTx,
    typed: &str,
    redeemer: &Identity,
) -> Result<UserId> {
    let digests = digests(&app.keyring, tx, typed);
    let platform = redeemer.name.platform();
    let now = app.clock.now();
    let minter = link_codes::consume(tx, &digests, platform, redeemer.id, now).await?;
    let minter = minter.ok_or_else(code_not_found)?;
    // Present ownership: the account that showed the code may have another person by now.
    let owner = identities::get(tx, minter.minted_by).await?;
    match owner {
        Some(owner) if owner.user_id == minter.user_id => Ok(owner.user_id),
        Some(_) | None => Err(code_not_found()),
    }
}

pub struct Redeem<'a> {
    pub code: &'a str,
    pub identity: &'a Identity,
    pub namespace: Namespace,
    /// Answers who would be joined, and leaves the code as it was: whoever calls does not commit.
    pub dry_run: bool,
}

#[derive(Debug)]
pub struct Redeemed {
    pub merge: Merge,
    pub session_key: Option<String>,
    pub session: Option<SessionHandle>,
}

/// Joins the account that brings a code with the person who showed it.
pub async fn redeem(
    app: &App,
    tx: &mut TenantTx,
    actor: &str,
    redeem: &Redeem<'_>,
) -> Result<Redeemed> {
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
        return Ok(Redeemed {
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
    let (session_key, session) = resolve::look(tx, request).await?;
    Ok(Redeemed {
        merge,
        session_key,
        session,
    })
}
