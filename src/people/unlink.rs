//! Unlinks an identity from its user, and undoes that. The identity gets a user of its own. Conversations in
//! which only this identity wrote go with it; it can reach none of the others.

use chrono::{DateTime, Utc};

use super::merge::{self, MergeRequest};
use super::message_slot::{self, MessageSender};
use super::notices;
use crate::app::App;
use crate::audit;
use crate::domain::bridge::chat::Chat;
use crate::domain::conversation::session_key::KeyPolicy;
use crate::domain::identity_links::{Merge, MoveKind, UNDO_WINDOW, Unlink, check_unlink};
use crate::domain::people::access::{Access, Visibility};
use crate::domain::people::user::{IdentityRecord, User};
use crate::domain::tenant::audit::{Action, Detail, Entry};
use crate::error::{Code, Error, Result};
use crate::ids::{IdentityId, SessionId, SlotId, UserId};
use crate::store::TenantTx;
use crate::store::conversation::slot_aliases;
use crate::store::identity_links::identity_moves::{self, NewMove};
use crate::store::identity_links::{merges, unlinks};
use crate::store::people::{identities, users};
use crate::store::tenant::{agents, tenants};

#[derive(Debug)]
pub struct UnlinkResult {
    pub identity: IdentityRecord,
    pub unlink: Unlink,
    pub conversations: usize,
}

/// Unlinks an identity from its user, if `access` allows it.
pub async fn unlink(
    app: &App,
    tx: &mut TenantTx,
    actor: &str,
    access: &Access,
    identity_id: IdentityId,
) -> Result<UnlinkResult> {
    let target = lock_visible(tx, access, identity_id).await?;
    if let Visibility::User(_) = access.visibility {
        let sender = match &access.sender {
            Some(sender) => identities::get(tx, sender.id).await?,
            None => None,
        };
        check_unlink(sender.as_ref(), &target)?;
    }
    if identities::list(tx, target.user_id).await?.len() < 2 {
        return Err(last_identity());
    }
    let now = app.clock.now();
    let unlinked = detach(tx, &target, now).await?;
    let by = access.sender.as_ref().map(|sender| sender.id);
    let text = notices::unlink_text(&target);
    let stayed = identities::list(tx, target.user_id).await?;
    notices::send(tx, &stayed, by, &text, now).await?;
    notices::send(tx, std::slice::from_ref(&target), by, &text, now).await?;
    let entry = entry(actor, &unlinked.unlink);
    audit::append(&app.keyring, tx, entry, now).await?;
    Ok(unlinked)
}

fn last_identity() -> Error {
    let detail = "it is the only identity of its user";
    Error::new(Code::LastIdentity, detail)
}

/// The audit entry of an unlink.
pub(super) fn entry(actor: &str, unlink: &Unlink) -> Entry {
    let detail = Detail::default()
        .id("from_user_id", unlink.from_user)
        .id("to_user_id", unlink.to_user);
    Entry::new(actor, Action::IdentityUnlink, &unlink.identity_id).with(detail)
}

/// Finds the identity for `access` and locks its user until `tx` ends.
async fn lock_visible(
    tx: &mut TenantTx,
    access: &Access,
    identity_id: IdentityId,
) -> Result<IdentityRecord> {
    let before = find_visible(tx, access, identity_id).await?;
    users::lock(tx, &[before.user_id]).await?;
    let target = find_visible(tx, access, identity_id).await?;
    if target.user_id == before.user_id {
        return Ok(target);
    }
    // The user it has now is not locked. The unlink that came first left the identity alone there.
    if identities::list(tx, target.user_id).await?.len() < 2 {
        return Err(last_identity());
    }
    let detail = "the identity was given to another user at the same time";
    Err(Error::new(Code::Conflict, detail))
}

/// The identity, if it is visible to `access`.
pub async fn find_visible(
    tx: &mut TenantTx,
    access: &Access,
    identity_id: IdentityId,
) -> Result<IdentityRecord> {
    let missing = || Error::not_found("identity");
    let target = identities::get(tx, identity_id)
        .await?
        .ok_or_else(missing)?;
    match access.visibility {
        Visibility::Tenant => Ok(target),
        Visibility::User(own) if own == target.user_id => Ok(target),
        Visibility::User(_) | Visibility::Service => Err(missing()),
    }
}

/// Gives an identity a user of its own. The caller has locked its present user and checked that another identity
/// stays with that one.
pub(super) async fn detach(
    tx: &mut TenantTx,
    target: &IdentityRecord,
    now: DateTime<Utc>,
) -> Result<UnlinkResult> {
    let from = target.user_id;
    let to = UserId::generate();
    let user = User {
        id: to,
        external_id: None,
        display_name: None,
        time_zone: None,
        shared_since: None,
        created_at: now,
    };
    users::insert(tx, &user).await?;
    merges::lock_slots(tx, &[from]).await?;
    merges::lock_conversations(tx, &[from]).await?;
    let conversations = unlinks::list_own_conversations(tx, from, target.id).await?;
    identities::update_user(tx, target.id, to, now).await?;
    let slots = home_slots(tx, target, to, &conversations, now).await?;
    unlinks::move_conversations(tx, &conversations, &slots, from, to).await?;
    for user_id in [from, to] {
        let idle = unlinks::list_empty_slots(tx, user_id).await?;
        slot_aliases::update_to_latest(tx, &idle).await?;
    }
    unlinks::end_belongings(tx, &target.identity(), now).await?;
    let unlink = Unlink {
        identity_id: target.id,
        from_user: from,
        to_user: to,
        undo_until: now + UNDO_WINDOW,
    };
    let change = NewMove {
        identity_id: target.id,
        from_user: from,
        to_user: to,
        kind: MoveKind::Unlink,
        reason: None,
        profile: None,
        undo_until: Some(unlink.undo_until),
    };
    identity_moves::insert(tx, &change, now).await?;
    Ok(UnlinkResult {
        identity: target.clone(),
        unlink,
        conversations: conversations.len(),
    })
}

/// The slots of the identity, which belong to its new user from now on. A slot is created for each agent that
/// the identity reached only through the shared slot.
async fn home_slots(
    tx: &mut TenantTx,
    target: &IdentityRecord,
    to: UserId,
    conversations: &[SessionId],
    now: DateTime<Utc>,
) -> Result<Vec<SlotId>> {
    let mut slots = unlinks::move_slots(tx, target.id, target.user_id, to).await?;
    let identity = target.identity();
    let sender = MessageSender {
        identity: &identity,
        user_id: to,
        linked: false,
    };
    for name in unlinks::list_agents_without_slot(tx, conversations, &slots).await? {
        let Some(agent) = agents::find(tx, &name).await? else {
            continue;
        };
        let dm_scope = tenants::find_dm_scope(tx).await?;
        let policy = KeyPolicy::of(&name, &agent.spec, Some(dm_scope));
        slots.push(message_slot::obtain(tx, policy, sender, &Chat::DM, now).await?);
    }
    Ok(slots)
}

/// Merges an identity back into the user it was unlinked from. The caller has checked the right: an admin, or a
/// sender with a fresh proof of the other side, which is then `proven`.
pub async fn undo_unlink(
    app: &App,
    tx: &mut TenantTx,
    actor: &str,
    access: &Access,
    identity_id: IdentityId,
    proven: Option<UserId>,
) -> Result<Merge> {
    let now = app.clock.now();
    let target = find_visible(tx, access, identity_id).await?;
    let not_possible = |detail: &str| Error::new(Code::UndoNotPossible, detail);
    let unlink = identity_moves::find_unlink(tx, identity_id, now).await?;
    let unlink = unlink.ok_or_else(|| not_possible("it was not unlinked within 30 days"))?;
    // The same if that user was merged away: the undo does not ask the survivor.
    if unlink.to_user != target.user_id {
        return Err(not_possible("it belongs to another user by now"));
    }
    let before = users::find(tx, unlink.from_user).await?;
    let before = before.ok_or_else(|| not_possible("the user it belonged to no longer exists"))?;
    if proven.is_some_and(|proven| proven != before.id) {
        return Err(not_possible("the code is not from the user it belonged to"));
    }
    let request = MergeRequest {
        into: before.id,
        from: target.user_id,
        kind: MoveKind::Undo,
        reason: None,
        by: access.sender.as_ref().map(|sender| sender.id),
        dry_run: false,
    };
    let merged = merge::merge(app, tx, actor, &request).await?;
    identity_moves::update_undone(tx, identity_id, now).await?;
    Ok(merged)
}
