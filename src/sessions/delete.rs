//! Deletes a conversation: gone for everyone at once, its rows soon after. Its ids are never given again.

use chrono::{DateTime, Utc};

use super::find;
use crate::app::App;
use crate::audit;
use crate::crypto;
use crate::domain::conversation::session::{ConversationHandle, Permission};
use crate::domain::conversation::session_name::{SessionRef, session_not_found};
use crate::domain::people::access::{Access, Namespace};
use crate::domain::tenant::audit::{Action, Detail, Entry};
use crate::domain::turn::StopReason;
use crate::error::{Error, Result};
use crate::ids::SessionId;
use crate::store::TenantTx;
use crate::store::conversation::{conversations, slots};
use crate::store::db::jobs;
use crate::store::turn::turn_stops;

/// The job that removes the rows.
pub const ERASE_JOB: &str = "erase_conversations";

/// Deletes the whole conversation of the link `session`.
pub async fn delete(
    app: &App,
    tx: &mut TenantTx,
    actor: &str,
    access: &Access,
    session: &SessionRef,
) -> Result<()> {
    let now = app.clock.now();
    let tip = find(tx, access, session, Permission::Manage, now).await?;
    if !delete_unaudited(tx, &tip.name, now).await? {
        return Err(session_not_found());
    }
    let mut detail = Detail::default();
    if let Some(user_id) = tip.owner.user_id {
        detail = detail.id("user_id", user_id);
    }
    let entry = Entry::new(actor, Action::ConversationDelete, &tip.name.conversation_id);
    audit::append(&app.keyring, tx, entry.with(detail), now).await
}

/// How often slots may be switched to a conversation while it is deleted.
const ATTEMPTS: usize = 10;

/// Deletes without an audit entry. False if a concurrent request deleted the conversation.
pub async fn delete_unaudited(
    tx: &mut TenantTx,
    name: &ConversationHandle,
    now: DateTime<Utc>,
) -> Result<bool> {
    lock_with_slots(tx, name.conversation_id).await?;
    let deleted = delete_locked(tx, std::slice::from_ref(name), now).await?;
    Ok(deleted > 0)
}

/// Locks a conversation and every slot that leads to it. Slots come first in the lock order. A slot that was
/// switched to the conversation during the wait can no longer be locked in order: all locks are released and
/// acquired again.
async fn lock_with_slots(tx: &mut TenantTx, conversation_id: SessionId) -> Result<()> {
    tx.mark().await?;
    for _ in 0..ATTEMPTS {
        let locked = slots::lock_by_current(tx, conversation_id).await?;
        conversations::lock(tx, conversation_id).await?;
        if !slots::has_other_current(tx, conversation_id, &locked).await? {
            return Ok(());
        }
        tx.roll_back_to_mark().await?;
    }
    Err(Error::unavailable(
        "the conversation",
        anyhow::anyhow!("session keys are switched to it repeatedly"),
    ))
}

/// Deletes conversations whose slots `tx` has locked. Returns their number, without those that a concurrent
/// request deleted.
pub async fn delete_locked(
    tx: &mut TenantTx,
    names: &[ConversationHandle],
    now: DateTime<Utc>,
) -> Result<usize> {
    let ids: Vec<SessionId> = names.iter().map(|name| name.conversation_id).collect();
    let gone = conversations::update_deleted(tx, &ids, now).await?;
    if gone.is_empty() {
        return Ok(0);
    }
    turn_stops::stop_all(tx, &gone, None, StopReason::ConversationDeleted, now).await?;
    let digest =
        |name: &ConversationHandle| Some(spent_digest(name.namespace, name.client_id.as_ref()?));
    let given: Vec<[u8; 32]> = names
        .iter()
        .filter(|name| gone.contains(&name.conversation_id))
        .filter_map(digest)
        .collect();
    conversations::insert_spent_ids(tx, &given).await?;
    jobs::insert(tx, ERASE_JOB, now).await?;
    Ok(gone.len())
}

/// What stays of a client's session id after the deletion.
pub(super) fn spent_digest(namespace: Namespace, client_id: &str) -> [u8; 32] {
    let mut named = namespace.as_uuid().as_bytes().to_vec();
    named.extend_from_slice(client_id.as_bytes());
    crypto::sha256(&named)
}
