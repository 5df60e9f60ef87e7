//! Merges two users whole: identities, slots, conversations, rights. Nothing is lost: the conversations of both
//! stay listed, and old ids and keys still answer.

use chrono::{DateTime, Utc};
use serde_json::json;

use super::{message_slot, notices};
use crate::app::App;
use crate::audit;
use crate::domain::identity_links::{Merge, MergeCandidates, MoveKind, merges_since};
use crate::domain::people::user::{IdentityRecord, User};
use crate::domain::tenant::agent::LinkedSessions;
use crate::domain::tenant::audit::{Action, Detail, Entry};
use crate::error::{Code, Error, FieldError, Result};
use crate::ids::{IdentityId, UserId};
use crate::store::TenantTx;
use crate::store::conversation::slot_aliases;
use crate::store::identity_links::identity_moves::{self, NewMove};
use crate::store::identity_links::merges;
use crate::store::people::{identities, users};
use crate::store::tenant::agents;

pub struct MergeRequest<'a> {
    /// The user that stays.
    pub into: UserId,
    pub from: UserId,
    pub kind: MoveKind,
    pub reason: Option<&'a str>,
    /// The identity that asked for the merge. It gets no notice.
    pub by: Option<IdentityId>,
    /// Reports the merge and does nothing.
    pub dry_run: bool,
}

/// Merges `from` into `into`.
pub async fn merge(
    app: &App,
    tx: &mut TenantTx,
    actor: &str,
    request: &MergeRequest<'_>,
) -> Result<Merge> {
    let now = app.clock.now();
    let (into, from) = lock_both(tx, request).await?;
    let candidates = MergeCandidates {
        kind: request.kind,
        into: identities::list(tx, into.id).await?,
        from: identities::list(tx, from.id).await?,
        recent_merges: identity_moves::count_merges(
            tx,
            into.id,
            &MoveKind::COUNTED,
            merges_since(now),
        )
        .await?,
    };
    candidates.check()?;
    let merge = Merge {
        into: into.id,
        from: from.id,
        counts: merges::count(tx, from.id).await?,
        identities: candidates.from.clone(),
    };
    if request.dry_run {
        return Ok(merge);
    }
    merge_users(tx, request, (&into, &from), &candidates.from, now).await?;
    notify(tx, request, &candidates, now).await?;
    let entry = entry(actor, into.id, from.id, request.kind);
    audit::append(&app.keyring, tx, entry, now).await?;
    Ok(merge)
}

/// The merge itself, of two locked users that passed the checks.
pub(super) async fn merge_users(
    tx: &mut TenantTx,
    request: &MergeRequest<'_>,
    (into, from): (&User, &User),
    moved: &[IdentityRecord],
    now: DateTime<Utc>,
) -> Result<()> {
    move_everything(tx, into, from, now).await?;
    record(tx, request, (into, from), moved, now).await?;
    fold(tx, into.id, now).await
}

/// The audit entry of a merge.
pub(super) fn entry(actor: &str, into: UserId, from: UserId, kind: MoveKind) -> Entry {
    let detail = Detail::default()
        .id("from_user_id", from)
        .word("kind", kind.as_str());
    Entry::new(actor, Action::UserMerge, &into).with(detail)
}

/// Locks both users as they are now: an id that was merged away before stands for its survivor.
async fn lock_both(tx: &mut TenantTx, request: &MergeRequest<'_>) -> Result<(User, User)> {
    let missing = || Error::not_found("user");
    let mut ids = [request.into, request.from];
    for id in &mut ids {
        *id = users::find(tx, *id).await?.ok_or_else(missing)?.id;
    }
    let [into, from] = ids;
    if into == from {
        let detail = "both are the same user already";
        return Err(Error::new(Code::AlreadyLinked, detail));
    }
    let locked = users::lock(tx, &[into, from]).await?;
    let find = |id| locked.iter().find(|user| user.id == id).cloned();
    match (find(into), find(from)) {
        (Some(into), Some(from)) => Ok((into, from)),
        _ => Err(overtaken(tx, into, from).await?),
    }
}

/// Why two users cannot be merged when one of them was merged during the wait for the locks.
async fn overtaken(tx: &mut TenantTx, into: UserId, from: UserId) -> Result<Error> {
    let into = users::find(tx, into).await?.map(|user| user.id);
    let from = users::find(tx, from).await?.map(|user| user.id);
    Ok(if into == from {
        Error::new(Code::AlreadyLinked, "both are the same user already")
    } else {
        Error::new(
            Code::Conflict,
            "one of the users was merged at the same time",
        )
    })
}

async fn move_everything(
    tx: &mut TenantTx,
    into: &User,
    from: &User,
    now: DateTime<Utc>,
) -> Result<()> {
    let both = [into.id, from.id];
    let named_by_import =
        into.external_id.is_none() && users::is_named_by_import(tx, from.id).await?;
    merges::lock_slots(tx, &both).await?;
    merges::lock_conversations(tx, &both).await?;
    merges::move_identities(tx, from.id, into.id, now).await?;
    merges::move_conversations(tx, from.id, into.id).await?;
    merges::move_belongings(tx, from.id, into.id).await?;
    merges::move_grants(tx, from.id, into.id, now).await?;
    merges::delete_user(tx, from.id, into.id, now).await?;
    // After the other user's row is gone: an external id is unique.
    let merged = User {
        external_id: into.external_id.clone().or(from.external_id.clone()),
        display_name: into.display_name.clone().or(from.display_name.clone()),
        time_zone: into.time_zone.clone().or(from.time_zone.clone()),
        shared_since: Some(into.shared_since.unwrap_or(now)),
        ..into.clone()
    };
    users::update(tx, &merged).await?;
    if named_by_import {
        users::update_named_by_import(tx, into.id).await
    } else {
        Ok(())
    }
}

async fn record(
    tx: &mut TenantTx,
    request: &MergeRequest<'_>,
    (into, from): (&User, &User),
    moved: &[IdentityRecord],
    now: DateTime<Utc>,
) -> Result<()> {
    let profile = json!({
        "external_id": from.external_id,
        "display_name": from.display_name,
        "time_zone": from.time_zone,
        "shared_since": from.shared_since,
    });
    for identity in moved {
        let change = NewMove {
            identity_id: identity.id,
            from_user: from.id,
            to_user: into.id,
            kind: request.kind,
            reason: request.reason.map(str::to_owned),
            profile: Some(profile.clone()),
            undo_until: None,
        };
        identity_moves::insert(tx, &change, now).await?;
    }
    Ok(())
}

/// One slot for all DMs, with every agent that shares them between platforms.
pub(super) async fn fold(tx: &mut TenantTx, user_id: UserId, now: DateTime<Utc>) -> Result<()> {
    for name in slot_aliases::list_dm_agents(tx, user_id).await? {
        let agent = agents::find(tx, &name).await?;
        let shares = agent.is_none_or(|agent| agent.spec.linked_sessions == LinkedSessions::Shared);
        if shares {
            message_slot::fold_all(tx, user_id, &name, now).await?;
        }
    }
    Ok(())
}

async fn notify(
    tx: &mut TenantTx,
    request: &MergeRequest<'_>,
    candidates: &MergeCandidates,
    now: DateTime<Utc>,
) -> Result<()> {
    match request.kind {
        // The tenant applied a document: its users did nothing, and lose nothing.
        MoveKind::Import | MoveKind::Unlink => Ok(()),
        MoveKind::Code | MoveKind::Merge | MoveKind::Undo => {
            let to_survivor = notices::merge_text(&candidates.from);
            notices::send(tx, &candidates.into, request.by, &to_survivor, now).await?;
            let to_other = notices::merge_text(&candidates.into);
            notices::send(tx, &candidates.from, request.by, &to_other, now).await
        }
    }
}

/// Checks the reason that an admin must give.
pub fn check_reason(reason: &str) -> Result<()> {
    if (1..=500).contains(&reason.trim().chars().count()) {
        Ok(())
    } else {
        let detail = "give the reason in 1 to 500 characters";
        Err(Error::invalid(vec![FieldError::new("/reason", detail)]))
    }
}
