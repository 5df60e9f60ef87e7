//! Erases a user. The user, with every id they ever had, is gone for everyone at once. Large data and the
//! user's messages in conversations of others are left to a job, which runs until nothing is left. No notice
//! is sent, and nothing restores the user.

use chrono::{DateTime, Utc};

use crate::app::App;
use crate::audit;
use crate::domain::people::erasure::Erasure;
use crate::domain::people::user::{IdentityRecord, User};
use crate::domain::tenant::audit::{Action, Detail, Entry};
use crate::domain::turn::StopReason;
use crate::error::{Error, Result};
use crate::ids::{IdentityId, SessionId, UserId};
use crate::sessions;
use crate::store::TenantTx;
use crate::store::db::{idempotency, jobs};
use crate::store::people::{erased_people, erased_summaries, erasures, identities, users};
use crate::store::turn::turn_stops;

/// The job that removes what is left.
pub const ERASE_JOB: &str = "erase_people";

/// How often the user may be merged at the same time before the request fails.
const ATTEMPTS: usize = 5;

/// Stored answers that are deleted at once. The job deletes the rest.
const ANSWER_BATCH: i64 = 1000;

#[derive(Debug)]
pub struct ErasureSummary {
    /// Every id that the user had.
    pub user_ids: Vec<UserId>,
    pub identities: usize,
    pub conversations: usize,
}

/// Erases the user with an id, or the user it was merged into.
pub async fn erase(
    app: &App,
    tx: &mut TenantTx,
    actor: &str,
    id: UserId,
) -> Result<ErasureSummary> {
    let now = app.clock.now();
    let (user, identities) = lock(tx, id).await?;
    let erasure = Erasure {
        user_id: user.id,
        merged_ids: users::list_merged(tx, user.id).await?,
        identity_ids: identities.iter().map(|identity| identity.id).collect(),
        names: identities
            .iter()
            .map(|identity| identity.name.to_string())
            .collect(),
        erased_at: now,
    };
    let names = erasures::list_conversations(tx, user.id).await?;
    let conversations = sessions::delete_locked(tx, &names, now).await?;
    // Conversations in which a turn began while this transaction waited for the others.
    let busy = turn_stops::lock_all_of(tx, user.id, &erasure.identity_ids).await?;
    let own_identities = Some(erasure.identity_ids.as_slice());
    let stopped =
        turn_stops::stop_all(tx, &busy, own_identities, StopReason::UserErased, now).await?;
    for session_id in stopped.1 {
        sessions::close_calls(tx, session_id, "the person was erased", now).await?;
    }
    delete(tx, &erasure, &identities, now).await?;
    erased_people::insert(tx, &erasure).await?;
    let own: Vec<SessionId> = names.iter().map(|name| name.conversation_id).collect();
    erased_summaries::insert_branches(tx, user.id, &own).await?;
    jobs::insert(tx, ERASE_JOB, now).await?;
    let detail = Detail::default()
        .count("identities", identities.len() as i64)
        .count("conversations", conversations as i64);
    let entry = Entry::new(actor, Action::UserErase, &user.id).with(detail);
    audit::append(&app.keyring, tx, entry, now).await?;
    Ok(ErasureSummary {
        user_ids: erasure.user_ids(),
        identities: identities.len(),
        conversations,
    })
}

/// Locks the user, with every row that leads to them, until `tx` ends. The lock waits for concurrent writers of
/// the user's rows; a later one waits and then finds no user. The user's own row is locked after slots and
/// conversations: a transaction that holds one of these and then refers to the user must get through.
async fn lock(tx: &mut TenantTx, id: UserId) -> Result<(User, Vec<IdentityRecord>)> {
    for _ in 0..ATTEMPTS {
        let found = users::find(tx, id).await?;
        let found = found.ok_or_else(|| Error::not_found("user"))?;
        let Some(user) = users::lock(tx, &[found.id]).await?.pop() else {
            continue;
        };
        erasures::lock_slots(tx, user.id).await?;
        let identities = identities::list(tx, user.id).await?;
        let ids: Vec<IdentityId> = identities.iter().map(|identity| identity.id).collect();
        turn_stops::lock_all_of(tx, user.id, &ids).await?;
        if erasures::lock_user(tx, user.id).await? {
            let identities = identities::list(tx, user.id).await?;
            return Ok((user, identities));
        }
    }
    Err(Error::unavailable(
        "the user",
        anyhow::anyhow!("the user is being merged again and again"),
    ))
}

async fn delete(
    tx: &mut TenantTx,
    erasure: &Erasure,
    identities: &[IdentityRecord],
    now: DateTime<Utc>,
) -> Result<()> {
    erasures::delete_slots(tx, erasure).await?;
    erasures::blank_notices(tx, erasure, now).await?;
    erasures::delete_chats(tx, identities).await?;
    let principals = erasure.identity_id_texts();
    let acted_for = erasure.acted_for();
    idempotency::delete_of_user(tx, &principals, &acted_for, ANSWER_BATCH).await?;
    erasures::delete_user(tx, erasure).await
}
