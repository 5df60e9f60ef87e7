//! Parting an account from its person, and taking that back. The account gets a person of its own; what
//! only it said goes with it, and nothing of the other's is within its reach any more.

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
pub struct Unlinked {
    pub identity: IdentityRecord,
    pub parting: Unlink,
    pub conversations: usize,
}

/// Parts an account from its person, if `access` may.
pub async fn unlink(
    app: &App,
    tx: &mut TenantTx,
    actor: &str,
    access: &Access,
    identity_id: IdentityId,
) -> Result<Unlinked> {
    let target = lock_seen(tx, access, identity_id).await?;
    if let Visibility::Person(_) = access.reach {
        let speaker = match &access.speaker {
            Some(speaker) => identities::get(tx, speaker.id).await?,
            None => None,
        };
        check_unlink(speaker.as_ref(), &target)?;
    }
    if identities::list(tx, target.user_id).await?.len() < 2 {
        return Err(last_identity());
    }
    let now = app.clock.now();
    let unlinked = part(tx, &target, now).await?;
    let by = access.speaker.as_ref().map(|speaker| speaker.id);
    let text = notices::parted(&target);
    let stayed = identities::list(tx, target.user_id).await?;
    notices::tell(tx, &stayed, by, &text, now).await?;
    notices::tell(tx, std::slice::from_ref(&target), by, &text, now).await?;
    let entry = entry(actor, &unlinked.parting);
    audit::append(&app.keyring, tx, entry, now).await?;
    Ok(unlinked)
}

fn last_identity() -> Error {
    let detail = "it is the user's only identity";
    Error::new(Code::LastIdentity, detail)
}

/// What the audit says of a parting.
pub(super) fn entry(actor: &str, parting: &Unlink) -> Entry {
    let detail = Detail::default()
        .id("from_user_id", parting.from_user)
        .id("to_user_id", parting.to_user);
    Entry::new(actor, Action::IdentityUnlink, &parting.identity_id).with(detail)
}

/// The same, its person held until `tx` ends.
async fn lock_seen(
    tx: &mut TenantTx,
    access: &Access,
    identity_id: IdentityId,
) -> Result<IdentityRecord> {
    let before = find_seen(tx, access, identity_id).await?;
    users::lock(tx, &[before.user_id]).await?;
    let target = find_seen(tx, access, identity_id).await?;
    match target.user_id == before.user_id {
        true => Ok(target),
        // The user it has now is not held; whoever unlinked it first left it alone there.
        false if identities::list(tx, target.user_id).await?.len() < 2 => Err(last_identity()),
        false => {
            let detail = "the identity was moved to another user at the same time";
            Err(Error::new(Code::Conflict, detail))
        }
    }
}

/// The account, if it is there for `access`.
pub async fn find_seen(
    tx: &mut TenantTx,
    access: &Access,
    identity_id: IdentityId,
) -> Result<IdentityRecord> {
    let missing = || Error::not_found("identity");
    let target = identities::get(tx, identity_id)
        .await?
        .ok_or_else(missing)?;
    match access.reach {
        Visibility::Tenant => Ok(target),
        Visibility::Person(own) if own == target.user_id => Ok(target),
        Visibility::Person(_) | Visibility::Service => Err(missing()),
    }
}

/// Gives an account a person of its own. Whoever calls holds the person it has, and knows that they may
/// be left without one.
pub(super) async fn part(
    tx: &mut TenantTx,
    target: &IdentityRecord,
    now: DateTime<Utc>,
) -> Result<Unlinked> {
    let from = target.user_id;
    let to = UserId::generate();
    let person = User {
        id: to,
        external_id: None,
        display_name: None,
        time_zone: None,
        shared_since: None,
        created_at: now,
    };
    users::insert(tx, &person).await?;
    merges::lock_slots(tx, &[from]).await?;
    merges::lock_conversations(tx, &[from]).await?;
    let conversations = unlinks::list_own_conversations(tx, from, target.id).await?;
    identities::update_user(tx, target.id, to, now).await?;
    let slots = home_slots(tx, target, to, &conversations, now).await?;
    unlinks::move_conversations(tx, &conversations, &slots, from, to).await?;
    for user_id in [from, to] {
        let idle = unlinks::list_idle_slots(tx, user_id).await?;
        slot_aliases::update_to_latest(tx, &idle).await?;
    }
    unlinks::end_belongings(tx, &target.identity(), now).await?;
    let parting = Unlink {
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
        undo_until: Some(parting.undo_until),
    };
    identity_moves::insert(tx, &change, now).await?;
    Ok(Unlinked {
        identity: target.clone(),
        parting,
        conversations: conversations.len(),
    })
}

/// The slots of the account, its new person's from now on; one is made for each agent with whom it only
/// ever spoke through the shared slot.
async fn home_slots(
    tx: &mut TenantTx,
    target: &IdentityRecord,
    to: UserId,
    conversations: &[SessionId],
    now: DateTime<Utc>,
) -> Result<Vec<SlotId>> {
    let mut slots = unlinks::move_slots(tx, target.id, target.user_id, to).await?;
    let identity = target.identity();
    let who = MessageSender {
        identity: &identity,
        user_id: to,
        linked: false,
    };
    for name in unlinks::list_homeless_agents(tx, conversations, &slots).await? {
        let Some(agent) = agents::find(tx, &name).await? else {
            continue;
        };
        let dm_scope = tenants::find_dm_scope(tx).await?;
        let policy = KeyPolicy::of(&name, &agent.spec, Some(dm_scope));
        slots.push(message_slot::obtain(tx, policy, who, &Chat::DM, now).await?);
    }
    Ok(slots)
}

/// Joins an account with the person it was parted from. Who may is judged before: an admin, or whoever
/// brought a fresh proof of the other side, which is then `proven`.
pub async fn undo_unlink(
    app: &App,
    tx: &mut TenantTx,
    actor: &str,
    access: &Access,
    identity_id: IdentityId,
    proven: Option<UserId>,
) -> Result<Merge> {
    let now = app.clock.now();
    let target = find_seen(tx, access, identity_id).await?;
    let not_possible = |detail: &str| Error::new(Code::UndoNotPossible, detail);
    let parting = identity_moves::find_unlink(tx, identity_id, now).await?;
    let parting = parting.ok_or_else(|| not_possible("it was not unlinked within 30 days"))?;
    // Nor if that person was merged away: whoever they became is not asked here.
    if parting.to_user != target.user_id {
        return Err(not_possible("it belongs to another user by now"));
    }
    let before = users::find(tx, parting.from_user).await?;
    let before = before.ok_or_else(|| not_possible("the person it belonged to is no more"))?;
    if proven.is_some_and(|proven| proven != before.id) {
        return Err(not_possible("the code is not of the person it belonged to"));
    }
    let request = MergeRequest {
        into: before.id,
        from: target.user_id,
        kind: MoveKind::Undo,
        reason: None,
        by: access.speaker.as_ref().map(|speaker| speaker.id),
        dry_run: false,
    };
    let merged = merge::merge(app, tx, actor, &request).await?;
    identity_moves::update_undone(tx, identity_id, now).await?;
    Ok(merged)
}
