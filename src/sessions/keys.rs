//! Session keys: find the slot that a key names, and change the conversation it leads to. A change locks the slot
//! and then both conversations, by id.

use chrono::{DateTime, Utc};

use super::{agent_for, find, follow_merge, insert};
use crate::domain::conversation::reset::{ResetReason, TimeZone, due_reset};
use crate::domain::conversation::session::{
    Edge, EndReason, NewConversation, Permission, SessionHandle,
};
use crate::domain::conversation::session_name::{
    SessionKey, SessionRef, session_key_not_found, session_not_found,
};
use crate::domain::conversation::slot::{NewSlot, Slot, SlotKind};
use crate::domain::people::access::Access;
use crate::domain::people::platform::PlatformScope;
use crate::domain::tenant::agent::ChatType;
use crate::error::{Code, Error, Result};
use crate::ids::{SessionId, SlotId};
use crate::store::TenantTx;
use crate::store::conversation::{conversations, sessions, slots};
use crate::store::people::users;
use crate::store::tenant::agents;

/// How often a merge may lead a key to another slot before the request fails.
const ATTEMPTS: usize = 10;

/// The slot that `key` names for `access`.
pub async fn find_slot(
    tx: &mut TenantTx,
    access: &Access,
    key: &SessionKey,
    now: DateTime<Utc>,
) -> Result<Slot> {
    if let Some(slot) = find_visible(tx, access, key, now).await? {
        return Ok(slot);
    }
    let survivor_slot = match follow_merge(tx, access).await? {
        Some(survivor) => find_visible(tx, &survivor, key, now).await?,
        None => None,
    };
    survivor_slot.ok_or_else(session_key_not_found)
}

async fn find_visible(
    tx: &mut TenantTx,
    access: &Access,
    key: &SessionKey,
    now: DateTime<Utc>,
) -> Result<Option<Slot>> {
    let Some(id) = slots::find_id(tx, access, key).await? else {
        return Ok(None);
    };
    let slot = slots::get(tx, access, id, now).await?;
    Ok(slot.check(access).is_ok().then_some(slot))
}

/// The slot that `key` names for `access`, locked until `tx` ends.
async fn lock_slot(
    tx: &mut TenantTx,
    access: &Access,
    key: &SessionKey,
    now: DateTime<Utc>,
) -> Result<Slot> {
    let mut slot = find_slot(tx, access, key, now).await?;
    for _ in 0..ATTEMPTS {
        slots::lock(tx, slot.id).await?;
        // A merge may have led the key to another slot during the wait.
        let again = find_slot(tx, access, key, now).await?;
        if again.id == slot.id {
            return Ok(again);
        }
        slot = again;
    }
    Err(Error::unavailable(
        "the key",
        anyhow::anyhow!("it is being linked and unlinked again and again"),
    ))
}

/// The locked slot of `key`. A new one is created if a client may. Concurrent first uses create one.
pub(super) async fn obtain(
    tx: &mut TenantTx,
    access: &Access,
    key: &SessionKey,
    agent: Option<&str>,
    now: DateTime<Utc>,
) -> Result<Slot> {
    let exists = slots::find_id(tx, access, key).await?.is_some();
    if !exists && !key.is_reserved() {
        let sender = access.sender.as_ref();
        let slot = NewSlot {
            id: SlotId::generate(),
            kind: SlotKind::Client,
            key: key.clone(),
            user_id: access.user_id,
            identity_id: sender.map(|sender| sender.id),
            agent: agent_for(tx, agent, None).await?,
        };
        if let Some(user_id) = access.user_id {
            users::lock_shared(tx, user_id).await?;
        }
        // Won or lost, the name exists afterwards.
        slots::insert(tx, access.namespace, &slot, now).await?;
    }
    lock_slot(tx, access, key, now).await
}

fn check_generation(slot: &Slot, expected: Option<i64>) -> Result<()> {
    match expected {
        Some(expected) if expected != slot.generation => Err(Error::new(
            Code::PreconditionFailed,
            format!("the key is at generation {}", slot.generation),
        )),
        Some(_) | None => Ok(()),
    }
}

/// Resets a key: a fresh session becomes the current one. The previous one is ended, unless it is current in
/// another slot.
pub async fn reset(
    tx: &mut TenantTx,
    access: &Access,
    key: &SessionKey,
    expected_generation: Option<i64>,
    now: DateTime<Utc>,
) -> Result<Slot> {
    let slot = lock_slot(tx, access, key, now).await?;
    check_generation(&slot, expected_generation)?;
    rotate(tx, access, &slot, EndReason::Reset, now).await?;
    slots::get(tx, access, slot.id, now).await
}

/// Replaces the conversation of a locked slot with a fresh one.
async fn rotate(
    tx: &mut TenantTx,
    access: &Access,
    slot: &Slot,
    reason: EndReason,
    now: DateTime<Utc>,
) -> Result<SessionId> {
    let before = slot.current.as_ref();
    let locked_tip = match before {
        Some(current) => conversations::lock(tx, current.name.conversation_id).await?,
        None => None,
    };
    let conversation = NewConversation {
        id: SessionId::generate(),
        slot_id: Some(slot.id),
        namespace: access.namespace,
        client_id: None,
        user_id: slot.user_id,
        agent: slot.agent.clone(),
        title: None,
        origin: locked_tip.map(|tip| (tip, Edge::Reset)),
    };
    let id = insert(tx, &conversation, now).await?;
    slots::update_current(tx, slot.id, id, now).await?;
    if let Some(current) = before {
        sessions::end_unless_current(tx, current.name.conversation_id, reason, now).await?;
    }
    Ok(id)
}

/// Makes `session` the current one of `key`, and reopens it if it had ended.
pub async fn switch(
    tx: &mut TenantTx,
    access: &Access,
    key: &SessionKey,
    session: &SessionRef,
    expected_generation: Option<i64>,
    now: DateTime<Utc>,
) -> Result<Slot> {
    let slot = lock_slot(tx, access, key, now).await?;
    check_generation(&slot, expected_generation)?;
    let target = find(tx, access, session, Permission::Manage, now).await?;
    if target.agent != slot.agent {
        let detail = format!("the session belongs to the agent {}", target.agent);
        return Err(Error::new(Code::AgentMismatch, detail));
    }
    if target.owner.user_id != slot.user_id {
        let detail = "the session and the key do not belong to the same user";
        return Err(Error::new(Code::SessionKeyMismatch, detail));
    }
    let to = target.name.conversation_id;
    let from = slot
        .current
        .as_ref()
        .map(|current| current.name.conversation_id);
    if from == Some(to) {
        slots::update_chosen_at(tx, slot.id, now).await?;
        return slots::get(tx, access, slot.id, now).await;
    }
    let mut both: Vec<SessionId> = from.into_iter().chain([to]).collect();
    both.sort_unstable();
    for id in both {
        let exists = conversations::lock(tx, id).await?.is_some();
        if id == to && !exists {
            return Err(session_not_found());
        }
    }
    slots::insert_conversation(tx, slot.id, to).await?;
    slots::update_current(tx, slot.id, to, now).await?;
    sessions::reopen_tip(tx, to).await?;
    if let Some(from) = from {
        sessions::end_unless_current(tx, from, EndReason::Switch, now).await?;
    }
    slots::get(tx, access, slot.id, now).await
}

/// How a message arrives at a key.
#[derive(Debug, Clone, Copy)]
pub struct Arrival<'a> {
    pub platform: Option<&'a PlatformScope>,
    pub chat_type: Option<ChatType>,
    /// Only a user's message can trigger the reset policy.
    pub by_user: bool,
}

/// The session that a key selects for a message.
#[derive(Debug)]
pub struct SessionChoice {
    pub slot: Slot,
    /// A link of the selected conversation. Its tip gets the message.
    pub session_id: SessionId,
    pub created: bool,
    /// Why the session was reset, and the session that was the current one.
    pub reset: Option<(ResetReason, SessionHandle)>,
}

/// The session of a message that names only a key: the current one, unless the agent's reset policy replaces it.
/// A new key gets a new session.
pub async fn choose_current(
    tx: &mut TenantTx,
    access: &Access,
    key: &SessionKey,
    agent: Option<&str>,
    arrival: Arrival<'_>,
    now: DateTime<Utc>,
) -> Result<SessionChoice> {
    let slot = obtain(tx, access, key, agent, now).await?;
    agent_for(tx, agent, Some(&slot)).await?;
    choose_session(tx, access, slot, arrival, now).await
}

/// The same for a slot that the service built. The slot is locked from here on.
pub async fn choose_in_slot(
    tx: &mut TenantTx,
    access: &Access,
    slot_id: SlotId,
    arrival: Arrival<'_>,
    now: DateTime<Utc>,
) -> Result<SessionChoice> {
    slots::lock(tx, slot_id).await?;
    let slot = slots::get(tx, access, slot_id, now).await?;
    choose_session(tx, access, slot, arrival, now).await
}

async fn choose_session(
    tx: &mut TenantTx,
    access: &Access,
    slot: Slot,
    arrival: Arrival<'_>,
    now: DateTime<Utc>,
) -> Result<SessionChoice> {
    let Some(current) = slot.current.clone() else {
        let session_id = create_first(tx, access, &slot, now).await?;
        return Ok(SessionChoice {
            slot,
            session_id,
            created: true,
            reset: None,
        });
    };
    let reason = if arrival.by_user {
        due_reset_of(tx, access, &slot, current.session_id, arrival, now).await?
    } else {
        None
    };
    let Some(reason) = reason else {
        return Ok(SessionChoice {
            slot,
            session_id: current.session_id,
            created: false,
            reset: None,
        });
    };
    let session_id = rotate(tx, access, &slot, reason.into(), now).await?;
    let before = SessionHandle {
        id: current.session_id,
        name: current.name,
    };
    Ok(SessionChoice {
        slot,
        session_id,
        created: true,
        reset: Some((reason, before)),
    })
}

/// The first conversation of a slot, or the next one after its current one was deleted.
async fn create_first(
    tx: &mut TenantTx,
    access: &Access,
    slot: &Slot,
    now: DateTime<Utc>,
) -> Result<SessionId> {
    let conversation = NewConversation {
        id: SessionId::generate(),
        slot_id: Some(slot.id),
        namespace: access.namespace,
        client_id: None,
        user_id: slot.user_id,
        agent: slot.agent.clone(),
        title: None,
        origin: None,
    };
    let id = insert(tx, &conversation, now).await?;
    slots::update_if_empty(tx, slot.id, id).await?;
    Ok(id)
}

/// The reset that the agent's policy requires for the slot's session. An empty session is never reset.
async fn due_reset_of(
    tx: &mut TenantTx,
    access: &Access,
    slot: &Slot,
    current: SessionId,
    arrival: Arrival<'_>,
    now: DateTime<Utc>,
) -> Result<Option<ResetReason>> {
    let Some(agent) = agents::find(tx, &slot.agent).await? else {
        return Ok(None);
    };
    let rule = agent
        .spec
        .reset
        .rule_for(arrival.platform, arrival.chat_type);
    let tip = find(
        tx,
        access,
        &SessionRef::Id(current),
        Permission::Participate,
        now,
    )
    .await?;
    if tip.last_seq() == 0 {
        return Ok(None);
    }
    let zone = match slot.user_id {
        Some(user_id) => users::find_time_zone(tx, user_id).await?,
        None => None,
    };
    let zone = TimeZone::from_column(zone.as_deref());
    let last_user_at = tip.last_user_at.max(slot.last_user_at);
    Ok(due_reset(&rule, zone, last_user_at, now))
}
