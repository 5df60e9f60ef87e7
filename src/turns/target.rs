//! Where a message goes: to the named session, to the current session of the named key, or to the session of a chat.

use chrono::{DateTime, Utc};

use crate::domain::bridge::chat::Chat;
use crate::domain::conversation::message::Role;
use crate::domain::conversation::session::{Permission, Tip};
use crate::domain::conversation::session_name::{SessionKey, SessionRef, session_not_found};
use crate::domain::people::access::{Access, Visibility};
use crate::domain::people::user::Identity;
use crate::domain::turn::{ResetInfo, SessionInfo, TurnInput};
use crate::error::{Code, Error, Result};
use crate::ids::{SlotId, UserId};
use crate::people;
use crate::sessions::{self, Arrival, NewSession};
use crate::store::TenantTx;
use crate::store::conversation::slots;
use crate::store::people::identities;

/// How often what was found may be moved meanwhile before a request gives up.
pub(super) const ATTEMPTS: usize = 5;

/// How a request names the session.
#[derive(Debug, Clone)]
pub enum Target {
    Session {
        session: SessionRef,
        key: Option<SessionKey>,
    },
    Key(SessionKey),
    /// The chat that a sender writes in.
    Chat {
        identity: Identity,
        chat: Chat,
    },
}

/// The session that was found or created, and what the caller gets to know of it.
#[derive(Debug)]
pub struct ResolvedTarget {
    pub tip: Tip,
    pub session_info: SessionInfo,
    /// Where the sender is present.
    pub slot_id: Option<SlotId>,
    /// The sender's user when its chat was resolved, where a chat was named.
    pub chat_of: Option<UserId>,
}

/// Finds the session, or creates it. A slot that chose it is locked until `tx` ends.
pub async fn find(
    tx: &mut TenantTx,
    access: &Access,
    target: &Target,
    agent: &str,
    input: &TurnInput,
    now: DateTime<Utc>,
) -> Result<ResolvedTarget> {
    let found = match target {
        Target::Session { session, key } => {
            by_session(tx, access, session, key.as_ref(), agent, now).await?
        }
        Target::Key(key) => by_key(tx, access, key, agent, input, now).await?,
        Target::Chat { identity, chat } => {
            in_chat(tx, access, (identity, chat), agent, now).await?
        }
    };
    if found.tip.agent != agent {
        let detail = format!("the session belongs to the agent {}", found.tip.agent);
        return Err(Error::new(Code::AgentMismatch, detail));
    }
    Ok(found)
}

async fn by_session(
    tx: &mut TenantTx,
    access: &Access,
    session: &SessionRef,
    key: Option<&SessionKey>,
    agent: &str,
    now: DateTime<Utc>,
) -> Result<ResolvedTarget> {
    for _ in 0..ATTEMPTS {
        let found = sessions::find(tx, access, session, Permission::Participate, now).await;
        let tip = match (found, session) {
            (Ok(tip), _) => tip,
            (Err(error), SessionRef::Name(id)) if error.code == Code::SessionNotFound => {
                let new = NewSession {
                    id: Some(id.clone()),
                    session_key: key.cloned(),
                    agent: Some(agent.to_owned()),
                    title: None,
                    messages: Vec::new(),
                };
                match sessions::create(tx, access, new, now).await {
                    Ok(id) => {
                        let made = SessionRef::Id(id);
                        sessions::find(tx, access, &made, Permission::Participate, now).await?
                    }
                    // Another first message was faster, or it was deleted: the next attempt finds out.
                    Err(error) if error.code == Code::SessionIdTaken => continue,
                    Err(error) => return Err(error),
                }
            }
            (Err(error), _) => return Err(error),
        };
        let session_key = match key {
            Some(key) => Some(check_key(tx, access, &tip, key, now).await?),
            None => tip.owner.session_key.clone(),
        };
        let session_info = SessionInfo {
            session_key,
            memory_key: tip.owner.session_key.clone(),
            requested_session_id: Some(session.to_string()),
            reset: None,
        };
        return Ok(ResolvedTarget {
            slot_id: tip.slot_id,
            chat_of: None,
            session_info,
            tip,
        });
    }
    Err(session_not_found())
}

/// A session goes with the key it was made under, and with those that were switched to it.
async fn check_key(
    tx: &mut TenantTx,
    access: &Access,
    tip: &Tip,
    key: &SessionKey,
    now: DateTime<Utc>,
) -> Result<String> {
    let mismatch = || {
        let detail = "the session was made under another key";
        Error::new(Code::SessionKeyMismatch, detail)
    };
    let Some(home) = tip.slot_id else {
        return Ok(key.as_str().to_owned());
    };
    let slot = match sessions::find_slot(tx, access, key, now).await {
        Ok(slot) => slot,
        Err(error) if error.code == Code::SessionKeyNotFound && !key.is_reserved() => {
            return Err(mismatch());
        }
        Err(error) => return Err(error),
    };
    let conversation_id = tip.name.conversation_id;
    if slot.id == home || slots::has_conversation(tx, slot.id, conversation_id).await? {
        Ok(slot.key)
    } else {
        Err(mismatch())
    }
}

async fn by_key(
    tx: &mut TenantTx,
    access: &Access,
    key: &SessionKey,
    agent: &str,
    input: &TurnInput,
    now: DateTime<Utc>,
) -> Result<ResolvedTarget> {
    let sender = access.sender.as_ref();
    let arrival = Arrival {
        platform: sender.map(|sender| sender.name.platform()),
        chat_type: None,
        by_user: input
            .messages
            .iter()
            .any(|message| message.role == Role::User),
    };
    let chosen = sessions::choose_current(tx, access, key, Some(agent), arrival, now).await?;
    let session = SessionRef::Id(chosen.session_id);
    let tip = sessions::find(tx, access, &session, Permission::Participate, now).await?;
    let session_info = SessionInfo {
        session_key: Some(chosen.slot.key),
        memory_key: tip.owner.session_key.clone(),
        requested_session_id: None,
        reset: chosen.reset.map(|(reason, before)| ResetInfo {
            reason: reason.as_str().to_owned(),
            previous_session_id: before.public_id(access),
        }),
    };
    Ok(ResolvedTarget {
        slot_id: Some(chosen.slot.id),
        chat_of: None,
        session_info,
        tip,
    })
}

async fn in_chat(
    tx: &mut TenantTx,
    access: &Access,
    (identity, chat): (&Identity, &Chat),
    agent: &str,
    now: DateTime<Utc>,
) -> Result<ResolvedTarget> {
    let request = people::ResolveRequest {
        identity: &identity.name,
        agent,
        chat,
        namespace: access.namespace,
    };
    for _ in 0..ATTEMPTS {
        let resolved = people::resolve(tx, request, now).await?;
        let resolved = resolved.ok_or_else(|| Error::not_found("user"))?;
        // A reset in this moment would have ended it: then the next attempt finds its successor.
        let leads_to = slots::lock_current(tx, resolved.slot_id).await?;
        if leads_to != Some(resolved.session.name.conversation_id) {
            continue;
        }
        let owner = Access {
            namespace: access.namespace,
            ..Access::of_service(resolved.user_id, identity.clone())
        };
        let session = SessionRef::Id(resolved.session.id);
        let tip = sessions::find(tx, &owner, &session, Permission::Participate, now).await?;
        let session_info = SessionInfo {
            session_key: Some(resolved.session_key),
            memory_key: tip.owner.session_key.clone(),
            requested_session_id: None,
            reset: resolved.reset.map(|(reason, before)| ResetInfo {
                reason: reason.as_str().to_owned(),
                previous_session_id: before.public_id(access),
            }),
        };
        return Ok(ResolvedTarget {
            slot_id: Some(resolved.slot_id),
            chat_of: Some(resolved.user_id),
            session_info,
            tip,
        });
    }
    Err(Error::unavailable(
        "the user's chat",
        anyhow::anyhow!("it is being moved again and again"),
    ))
}

/// Whether the sender still has the rights it had when `found` was looked up. Checked once the conversation is
/// locked: an unlink that was waited for has committed by then. `false`: the target has to be found again.
pub async fn still_holds(
    tx: &mut TenantTx,
    access: &Access,
    found: &ResolvedTarget,
    now: DateTime<Utc>,
) -> Result<bool> {
    let Some(sender) = &access.sender else {
        return Ok(true);
    };
    let user_id = identities::find_user(tx, sender.id).await?;
    let user_id = user_id.ok_or_else(session_not_found)?;
    if let Some(chat_of) = found.chat_of {
        return Ok(chat_of == user_id);
    }
    let present = match access.visibility {
        Visibility::User(_) => access.merged_into(user_id),
        Visibility::Tenant | Visibility::Service => access.clone(),
    };
    let session = SessionRef::Id(found.tip.session_id);
    sessions::find(tx, &present, &session, Permission::Participate, now).await?;
    Ok(true)
}
