//! What a message would do before anything is said: recognise who speaks, and find the session it goes
//! to, reset policy included. For someone known, with a session that goes on, that is one statement.

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
use crate::store::people::presence::Seen;
use crate::store::people::resolve as statement;
use crate::store::people::resolve::{Known, KnownPlace};
use crate::store::people::users;

/// As often as a person may be joined or parted under us before we give up.
const ATTEMPTS: usize = 5;

#[derive(Debug, Clone, Copy)]
pub struct ResolveRequest<'a> {
    pub identity: &'a IdentityName,
    pub agent: &'a str,
    pub chat: &'a Chat,
    /// With whose names the answer is written.
    pub namespace: Namespace,
}

#[derive(Debug)]
pub struct Resolved {
    pub identity_id: IdentityId,
    pub user_id: UserId,
    /// Whether the person is or was linked.
    pub linked: bool,
    pub slot_id: SlotId,
    pub session_key: String,
    pub session: SessionHandle,
    /// Whether the session is new.
    pub created: bool,
    /// Why it began anew, and the session that was the current one.
    pub reset: Option<(ResetReason, SessionHandle)>,
}

/// Who `request` names and where what they say belongs; `None` if nobody knows the account yet.
pub async fn resolve(
    tx: &mut TenantTx,
    request: ResolveRequest<'_>,
    now: DateTime<Utc>,
) -> Result<Option<Resolved>> {
    let Some(known) = find(tx, request).await? else {
        return Ok(None);
    };
    let resolved = match settled(request, &known, now)? {
        Some(resolved) => resolved,
        None => match settle(tx, request, known.user_id, now).await? {
            Some(resolved) => resolved,
            None => return Ok(None),
        },
    };
    let heard = known
        .last_seen
        .is_some_and(|(at, slot_id)| at > now - GRAIN && slot_id == Some(resolved.slot_id));
    if !heard {
        tx.note_presence(Seen {
            identity_id: resolved.identity_id,
            slot_id: Some(resolved.slot_id),
            at: now,
        });
    }
    Ok(Some(resolved))
}

/// The key a message would have, and the session it would find, without making anything.
pub async fn look(
    tx: &mut TenantTx,
    request: ResolveRequest<'_>,
) -> Result<(Option<String>, Option<SessionHandle>)> {
    let Some(known) = find(tx, request).await? else {
        return Ok((None, None));
    };
    let place = wanted(request, &known)?;
    let there = known.places.iter().find(|there| there.key == place.key);
    let current = there.and_then(|there| there.current.as_ref());
    Ok((Some(place.key), current.map(|current| current.link.clone())))
}

async fn find(tx: &mut TenantTx, request: ResolveRequest<'_>) -> Result<Option<Known>> {
    statement::find(
        tx,
        request.identity,
        request.agent,
        request.chat,
        request.namespace,
    )
    .await
}

fn policy_of<'a>(request: ResolveRequest<'a>, known: &Known) -> Result<KeyPolicy<'a>> {
    let no_agent = || Error::invalid(vec![FieldError::new("/agent", "there is no such agent")]);
    let spec = known.agent.as_ref().ok_or_else(no_agent)?;
    Ok(KeyPolicy::of(request.agent, spec, known.dm_scope))
}

/// Where what they say belongs.
fn wanted(request: ResolveRequest<'_>, known: &Known) -> Result<ChatKey> {
    let speaker = KeySender {
        identity: request.identity,
        user_id: known.user_id,
        linked: known.linked,
    };
    Ok(session_key::place(
        policy_of(request, known)?,
        speaker,
        request.chat,
    ))
}

/// The answer, if nothing has to be made or reset for it.
fn settled(
    request: ResolveRequest<'_>,
    known: &Known,
    now: DateTime<Utc>,
) -> Result<Option<Resolved>> {
    let wanted = wanted(request, known)?;
    let with_key = |key: &str| known.places.iter().find(|place| place.key == key);
    let is_own = |place: &&KnownPlace| place.user_id == wanted.owner;
    let first = with_key(&wanted.key);
    let found = match (first.filter(is_own), first, &wanted.otherwise) {
        (Some(own), _, _) => Some(own),
        // Another person has it, so this one has the other.
        (None, Some(_), Some(otherwise)) => with_key(otherwise).filter(is_own),
        (None, _, _) => None,
    };
    let Some((place, current)) = found.and_then(|place| Some((place, place.current.as_ref()?)))
    else {
        return Ok(None);
    };
    if is_too_old(request, known, place, now) {
        return Ok(None);
    }
    Ok(Some(Resolved {
        identity_id: known.identity_id,
        user_id: known.user_id,
        linked: known.linked,
        slot_id: place.slot_id,
        session_key: place.key.clone(),
        session: current.link.clone(),
        created: false,
        reset: None,
    }))
}

/// Whether the agent's policy begins anew what the slot leads to. An empty session is never too old.
fn is_too_old(
    request: ResolveRequest<'_>,
    known: &Known,
    place: &KnownPlace,
    now: DateTime<Utc>,
) -> bool {
    let (Some(spec), Some(current)) = (&known.agent, &place.current) else {
        return false;
    };
    let platform = request.chat.platform_of(request.identity);
    let rule = spec
        .reset
        .rule_for(Some(&platform), Some(request.chat.kind));
    let zone = match place.user_id {
        Some(_) => TimeZone::from_column(known.time_zone.as_deref()),
        None => TimeZone::UTC,
    };
    let last_person_at = current.last_person_at.max(place.chosen_at);
    current.last_seq > 0 && due_reset(&rule, zone, last_person_at, now).is_some()
}

/// Makes or resets what has to be. The person is held meanwhile: whoever links them waits.
async fn settle(
    tx: &mut TenantTx,
    request: ResolveRequest<'_>,
    mut user_id: UserId,
    now: DateTime<Utc>,
) -> Result<Option<Resolved>> {
    for _ in 0..ATTEMPTS {
        let held = !users::lock(tx, &[user_id]).await?.is_empty();
        let Some(known) = find(tx, request).await? else {
            return Ok(None);
        };
        if held && known.user_id == user_id {
            return settle_held(tx, request, &known, now).await.map(Some);
        }
        user_id = known.user_id;
    }
    Err(Error::unavailable(
        "the person",
        anyhow::anyhow!("the users are merged and unlinked repeatedly"),
    ))
}

async fn settle_held(
    tx: &mut TenantTx,
    request: ResolveRequest<'_>,
    known: &Known,
    now: DateTime<Utc>,
) -> Result<Resolved> {
    // Whoever held the person before us may have done it all.
    if let Some(resolved) = settled(request, known, now)? {
        return Ok(resolved);
    }
    let identity = Identity {
        id: known.identity_id,
        name: request.identity.clone(),
    };
    let who = MessageSender {
        identity: &identity,
        user_id: known.user_id,
        linked: known.linked,
    };
    let slot_id =
        message_slot::obtain(tx, policy_of(request, known)?, who, request.chat, now).await?;
    let platform = request.chat.platform_of(request.identity);
    let arrival = Arrival {
        platform: Some(&platform),
        chat_type: Some(request.chat.kind),
        by_person: true,
    };
    let access = Access {
        namespace: request.namespace,
        ..Access::of_service(known.user_id, identity)
    };
    let chosen = sessions::choose_in_slot(tx, &access, slot_id, arrival, now).await?;
    let slot = slots::get(tx, &access, slot_id, now).await?;
    let gone = || Error::internal(anyhow::anyhow!("a chosen session is not the current one"));
    let current = slot.current.ok_or_else(gone)?;
    Ok(Resolved {
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
