//! The slot that a message belongs to; a new one is created. The caller has locked the user.

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

/// The sender of a message.
#[derive(Debug, Clone, Copy)]
pub struct MessageSender<'a> {
    pub identity: &'a Identity,
    pub user_id: UserId,
    pub linked: bool,
}

/// The slot of a message from `sender` in `chat`.
pub async fn obtain(
    tx: &mut TenantTx,
    policy: KeyPolicy<'_>,
    sender: MessageSender<'_>,
    chat: &Chat,
    now: DateTime<Utc>,
) -> Result<SlotId> {
    let key_sender = KeySender {
        identity: &sender.identity.name,
        user_id: sender.user_id,
        linked: sender.linked,
    };
    let chat_key = session_key::chat_key(policy, key_sender, chat);
    for key in [Some(&chat_key.key), chat_key.fallback.as_ref()]
        .into_iter()
        .flatten()
    {
        if let Some(slot_id) = obtain_key(tx, policy.agent, sender, &chat_key, key, now).await? {
            return Ok(slot_id);
        }
    }
    Err(Error::internal(anyhow::anyhow!(
        "the key of an identity belongs to another user"
    )))
}

/// The slot of one key; `None` if it belongs to another user.
async fn obtain_key(
    tx: &mut TenantTx,
    agent: &str,
    sender: MessageSender<'_>,
    chat_key: &ChatKey,
    key: &str,
    now: DateTime<Utc>,
) -> Result<Option<SlotId>> {
    let shared_by_platforms = key == user_key(agent, sender.user_id);
    if slot_aliases::find_service_name(tx, key).await?.is_none() {
        let slot = NewSlot {
            id: SlotId::generate(),
            kind: chat_key.kind,
            key: SessionKey::built(key.to_owned()),
            user_id: chat_key.owner,
            identity_id: if chat_key.owner.is_some() && !shared_by_platforms {
                Some(sender.identity.id)
            } else {
                None
            },
            agent: agent.to_owned(),
        };
        let inserted = slots::insert(tx, Namespace::Service, &slot, now).await?;
        if inserted && shared_by_platforms {
            fold_into(tx, sender.user_id, agent, slot.id, now).await?;
        }
    }
    // It belonged to another user who was erased in this moment: the next attempt creates it.
    let name = slot_aliases::find_service_name(tx, key)
        .await?
        .ok_or_else(|| {
            Error::unavailable("the key", anyhow::anyhow!("the name of a slot vanished"))
        })?;
    if name.home_user_id != chat_key.owner {
        return Ok(None);
    }
    if name.slot_id != name.home_slot_id {
        // It was folded while the agent shared sessions between platforms, which has ended.
        merges::lock_slots(tx, &[sender.user_id]).await?;
        slot_aliases::unfold(tx, name.home_slot_id).await?;
    }
    Ok(Some(name.home_slot_id))
}

/// Folds all DM slots of a linked user with an agent into one.
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
