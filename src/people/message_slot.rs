//! The slot that a message belongs to, made if it is new. Whoever calls holds the person.

use chrono::{DateTime, Utc};

use crate::domain::bridge::chat::Chat;
use crate::domain::conversation::session_key::{self, ChatKey, KeyPolicy, KeySender, user_key};
use crate::domain::conversation::session_name::SessionKey;
use crate::domain::conversation::slot::{NewSlot, SlotKind};
use crate::domain::people::access::Namespace;
use crate::domain::people::user::Identity;
use crate::error::{Error, Result};
use crate::ids::{SlotId, UserId};
use crate::store::TenantTx;
use crate::store::conversation::{slot_aliases, slots};
use crate::store::identity_links::merges;

/// Who speaks.
#[derive(Debug, Clone, Copy)]
pub struct MessageSender<'a> {
    pub identity: &'a Identity,
    pub user_id: UserId,
    pub linked: bool,
}

/// The slot of what `who` says in `chat`.
pub async fn obtain(
    tx: &mut TenantTx,
    policy: KeyPolicy<'_>,
    who: MessageSender<'_>,
    chat: &Chat,
    now: DateTime<Utc>,
) -> Result<SlotId> {
    let speaker = KeySender {
        identity: &who.identity.name,
        user_id: who.user_id,
        linked: who.linked,
    };
    let place = session_key::chat_key(policy, speaker, chat);
    for key in [Some(&place.key), place.fallback.as_ref()]
        .into_iter()
        .flatten()
    {
        if let Some(slot_id) = obtain_key(tx, policy.agent, who, &place, key, now).await? {
            return Ok(slot_id);
        }
    }
    Err(Error::internal(anyhow::anyhow!(
        "the key of an account belongs to someone else"
    )))
}

/// The slot of one key; `None` if it is another person's.
async fn obtain_key(
    tx: &mut TenantTx,
    agent: &str,
    who: MessageSender<'_>,
    place: &ChatKey,
    key: &str,
    now: DateTime<Utc>,
) -> Result<Option<SlotId>> {
    let shared_by_platforms = key == user_key(agent, who.user_id);
    if slot_aliases::find_service_name(tx, key).await?.is_none() {
        let slot = NewSlot {
            id: SlotId::generate(),
            kind: place.kind,
            key: SessionKey::built(key.to_owned()),
            user_id: place.owner,
            identity_id: if place.owner.is_some() && !shared_by_platforms {
                Some(who.identity.id)
            } else {
                None
            },
            agent: agent.to_owned(),
        };
        let made = slots::insert(tx, Namespace::Service, &slot, now).await?;
        if made && shared_by_platforms {
            fold_into(tx, who.user_id, agent, slot.id, now).await?;
        }
    }
    // It was another person's, who was erased in this moment: the next try makes it.
    let gone = || Error::unavailable("the key", anyhow::anyhow!("the name of a slot vanished"));
    let name = slot_aliases::find_service_name(tx, key)
        .await?
        .ok_or_else(gone)?;
    if name.home_user_id != place.owner {
        return Ok(None);
    }
    if name.slot_id != name.home_slot_id {
        // It was folded while the agent shared sessions between platforms, and no longer does.
        merges::lock_slots(tx, &[who.user_id]).await?;
        slot_aliases::unfold(tx, name.home_slot_id).await?;
    }
    Ok(Some(name.home_slot_id))
}

/// Lets the one slot of a linked person take in all their DMs with an agent.
pub async fn fold_all(
    tx: &mut TenantTx,
    user_id: UserId,
    agent: &str,
    now: DateTime<Utc>,
) -> Result<()> {
    let key = user_key(agent, user_id);
    let slot_id = match slot_aliases::find_service_name(tx, &key).await? {
        Some(name) => name.home_slot_id,
        None => {
            let slot = NewSlot {
                id: SlotId::generate(),
                kind: SlotKind::Dm,
                key: SessionKey::built(key),
                user_id: Some(user_id),
                identity_id: None,
                agent: agent.to_owned(),
            };
            slots::insert(tx, Namespace::Service, &slot, now).await?;
            slot.id
        }
    };
    fold_into(tx, user_id, agent, slot_id, now).await
}

async fn fold_into(
    tx: &mut TenantTx,
    user_id: UserId,
    agent: &str,
    into: SlotId,
    now: DateTime<Utc>,
) -> Result<()> {
    merges::lock_slots(tx, &[user_id]).await?;
    let slots = slot_aliases::list_dm_slots(tx, user_id, agent, into).await?;
    if slots.is_empty() {
        return Ok(());
    }
    slot_aliases::fold(tx, &slots, into, now).await
}
