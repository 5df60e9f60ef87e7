//! What a message would do before it is sent: recognise the sender and find the session it goes to, reset policy
//! included. For a known sender whose session continues, that is one statement.

use chrono::{DateTime, Utc};

use super::message_slot::{self, MessageSender};
use crate::domain::bridge::chat::Chat;
use crate::domain::conversation::reset::{ResetReason, TimeZone, due_reset};
use crate::domain::conversation::session::SessionHandle;
use crate::domain::conversation::session_key::{self, ChatKey, KeyPolicy, KeySender};
use crate::domain::people::access::{Access, Namespace};
use crate::domain::people::identity::IdentityName;
use crate::domain::people::presence::GRAIN;
use crate::domain::people::user::Identity;
use crate::error::{Error, FieldError, Result};
use crate::ids::{IdentityId, SlotId, UserId};
use crate::sessions::{self, Arrival};
use crate::store::TenantTx;
use crate::store::conversation::slots;
use crate::store::people::presence::PresenceUpdate;
use crate::store::people::resolve as statement;
use crate::store::people::resolve::{CandidateSlot, SenderSlots};
use crate::store::people::users;

/// How often the user may be merged or unlinked at the same time before the request fails.
const ATTEMPTS: usize = 5;

#[derive(Debug, Clone, Copy)]
pub struct ResolveRequest<'a> {
    pub identity: &'a IdentityName,
    pub agent: &'a str,
    pub chat: &'a Chat,
    /// The caller's namespace: it decides which ids the answer has.
    pub namespace: Namespace,
}

#[derive(Debug)]
pub struct Resolution {
    pub identity_id: IdentityId,
    pub user_id: UserId,
    /// Whether the user has or had several identities.
    pub linked: bool,
    pub slot_id: SlotId,
    pub session_key: String,
    pub session: SessionHandle,
    /// Whether the session is new.
    pub created: bool,
    /// Why the session was reset, and the session that was the current one.
    pub reset: Option<(ResetReason, SessionHandle)>,
}

/// The sender of a message and its session; `None` for an identity that does not exist yet.
pub async fn resolve(
    tx: &mut TenantTx,
    request: ResolveRequest<'_>,
    now: DateTime<Utc>,
) -> Result<Option<Resolution>> {
    let Some(known) = find(tx, request).await? else {
        return Ok(None);
    };
    let resolved = match resolve_current(request, &known, now)? {
        Some(resolved) => resolved,
        None => match resolve_locked(tx, request, known.user_id, now).await? {
            Some(resolved) => resolved,
            None => return Ok(None),
        },
    };
    let is_noted = known
        .last_seen
        .is_some_and(|(at, slot_id)| at > now - GRAIN && slot_id == Some(resolved.slot_id));
    if !is_noted {
        tx.note_presence(PresenceUpdate {
            identity_id: resolved.identity_id,
            slot_id: Some(resolved.slot_id),
            at: now,
        });
    }
    Ok(Some(resolved))
}

/// The key that a message would have and the session it would find. Creates nothing.
pub async fn preview(
    tx: &mut TenantTx,
    request: ResolveRequest<'_>,
) -> Result<(Option<String>, Option<SessionHandle>)> {
    let Some(known) = find(tx, request).await? else {
        return Ok((None, None));
    };
    let wanted = wanted_key(request, &known)?;
    let slot = known.slots.iter().find(|slot| slot.key == wanted.key);
    let current = slot.and_then(|slot| slot.current.as_ref());
    Ok((
        Some(wanted.key),
        current.map(|current| current.link.clone()),
    ))
}

async fn find(tx: &mut TenantTx, request: ResolveRequest<'_>) -> Result<Option<SenderSlots>> {
    statement::find(
        tx,
        request.identity,
        request.agent,
        request.chat,
        request.namespace,
    )
    .await
}

fn policy_of<'a>(request: ResolveRequest<'a>, known: &SenderSlots) -> Result<KeyPolicy<'a>> {
    let spec = known
        .agent
        .as_ref()
        .ok_or_else(|| Error::invalid(vec![FieldError::new("/agent", "there is no such agent")]))?;
    Ok(KeyPolicy::of(request.agent, spec, known.dm_scope))
}

/// The key that a message belongs to.
fn wanted_key(request: ResolveRequest<'_>, known: &SenderSlots) -> Result<ChatKey> {
    let sender = KeySender {
        identity: request.identity,
        user_id: known.user_id,
        linked: known.linked,
    };
    Ok(session_key::chat_key(
        policy_of(request, known)?,
        sender,
        request.chat,
    ))
}

/// The answer, if no slot or session has to be created or reset for it.
fn resolve_current(
    request: ResolveRequest<'_>,
    known: &SenderSlots,
    now: DateTime<Utc>,
) -> Result<Option<Resolution>> {
    let wanted = wanted_key(request, known)?;
    let with_key = |key: &str| known.slots.iter().find(|slot| slot.key == key);
    let is_own = |slot: &&CandidateSlot| slot.user_id == wanted.owner;
    let first = with_key(&wanted.key);
    let found = match (first.filter(is_own), first, &wanted.fallback) {
        (Some(own), _, _) => Some(own),
        // Another user has the key, so this one has the fallback.
        (None, Some(_), Some(otherwise)) => with_key(otherwise).filter(is_own),
        (None, _, _) => None,
    };
    let Some((slot, current)) = found.and_then(|slot| Some((slot, slot.current.as_ref()?))) else {
        return Ok(None);
    };
    if is_reset_due(request, known, slot, now) {
        return Ok(None);
    }
    Ok(Some(Resolution {
        identity_id: known.identity_id,
        user_id: known.user_id,
        linked: known.linked,
        slot_id: slot.slot_id,
        session_key: slot.key.clone(),
        session: current.link.clone(),
        created: false,
        reset: None,
    }))
}

/// Whether the agent's policy resets the slot's session. An empty session is never reset.
fn is_reset_due(
    request: ResolveRequest<'_>,
    known: &SenderSlots,
    slot: &CandidateSlot,
    now: DateTime<Utc>,
) -> bool {
    let (Some(spec), Some(current)) = (&known.agent, &slot.current) else {
        return false;
    };
    let platform = request.chat.platform_of(request.identity);
    let rule = spec
        .reset
        .rule_for(Some(&platform), Some(request.chat.kind));
    let zone = match slot.user_id {
        Some(_) => TimeZone::from_column(known.time_zone.as_deref()),
        None => TimeZone::UTC,
    };
    let last_user_at = current.last_user_at.max(slot.chosen_at);
    current.last_seq > 0 && due_reset(&rule, zone, last_user_at, now).is_some()
}

/// Creates or resets what is missing. The user stays locked meanwhile: a concurrent merge waits.
async fn resolve_locked(
    tx: &mut TenantTx,
    request: ResolveRequest<'_>,
    mut user_id: UserId,
    now: DateTime<Utc>,
) -> Result<Option<Resolution>> {
    for _ in 0..ATTEMPTS {
        let locked = !users::lock(tx, &[user_id]).await?.is_empty();
        let Some(known) = find(tx, request).await? else {
            return Ok(None);
        };
        if locked && known.user_id == user_id {
            return create_or_reset(tx, request, &known, now).await.map(Some);
        }
        user_id = known.user_id;
    }
    Err(Error::unavailable(
        "the user",
        anyhow::anyhow!("the user is being merged and unlinked again and again"),
    ))
}

async fn create_or_reset(
    tx: &mut TenantTx,
    request: ResolveRequest<'_>,
    known: &SenderSlots,
    now: DateTime<Utc>,
) -> Result<Resolution> {
    // The transaction that held the lock before may have done it all.
    if let Some(resolved) = resolve_current(request, known, now)? {
        return Ok(resolved);
    }
    let identity = Identity {
        id: known.identity_id,
        name: request.identity.clone(),
    };
    let sender = MessageSender {
        identity: &identity,
        user_id: known.user_id,
        linked: known.linked,
    };
    let slot_id =
        message_slot::obtain(tx, policy_of(request, known)?, sender, request.chat, now).await?;
    let platform = request.chat.platform_of(request.identity);
    let arrival = Arrival {
        platform: Some(&platform),
        chat_type: Some(request.chat.kind),
        by_user: true,
    };
    let access = Access {
        namespace: request.namespace,
        ..Access::of_service(known.user_id, identity)
    };
    let chosen = sessions::choose_in_slot(tx, &access, slot_id, arrival, now).await?;
    let slot = slots::get(tx, &access, slot_id, now).await?;
    let current = slot.current.ok_or_else(|| {
        Error::internal(anyhow::anyhow!("a chosen session is not the current one"))
    })?;
    Ok(Resolution {
        identity_id: known.identity_id,
        user_id: known.user_id,
        linked: known.linked,
        slot_id,
        session_key: slot.key,
        session: SessionHandle {
            id: current.session_id,
            name: current.name,
        },
        created: chosen.created,
        reset: chosen.reset,
    })
}
