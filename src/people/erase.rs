//! Erasing a person. At once they are gone for everyone, with every id they ever had; what is large, and
//! what they said where others speak too, is left to a job that looks until nothing is left. Nobody is
//! told, and nothing brings them back.

use chrono::{DateTime, Utc};

use crate::app::App;
use crate::audit;
use crate::domain::people::erasure::Erasure;
use crate::domain::people::user::{IdentityRecord, User};
use crate::domain::tenant::audit::{Action, Detail, Entry};
use crate::domain::turn::StopReason;
use crate::error::{Error, Result};
use crate::ids::{IdentityId, UserId};
use crate::sessions;
use crate::store::TenantTx;
use crate::store::db::{idempotency, jobs};
use crate::store::people::{erased_people, erasures, identities, users};
use crate::store::turn::turn_stops;

/// The job that looks for what is left.
pub const ERASE_JOB: &str = "erase_people";

/// As often as a person may be merged under us before we give up.
const ATTEMPTS: usize = 5;

/// Stored answers that are deleted at once; more are left to the job.
const ANSWERS: i64 = 1000;

#[derive(Debug)]
pub struct Erased {
    /// Every id that they had.
    pub user_ids: Vec<UserId>,
    pub identities: usize,
    pub conversations: usize,
}

/// Erases the person of an id, or the one who became of it.
pub async fn erase(app: &App, tx: &mut TenantTx, actor: &str, id: UserId) -> Result<Erased> {
    let now = app.clock.now();
    let (user, accounts) = lock(tx, id).await?;
    let erasure = Erasure {
        user_id: user.id,
        merged_ids: users::list_merged(tx, user.id).await?,
        identity_ids: accounts.iter().map(|account| account.id).collect(),
        names: accounts
            .iter()
            .map(|account| account.name.to_string())
            .collect(),
        erased_at: now,
    };
    let names = erasures::list_conversations(tx, user.id).await?;
    let conversations = sessions::delete_held(tx, &names, now).await?;
    // Those in which a turn has begun while the others were waited for.
    let busy = turn_stops::lock_all_of(tx, user.id, &erasure.identity_ids).await?;
    let theirs = Some(erasure.identity_ids.as_slice());
    let stopped = turn_stops::stop_all(tx, &busy, theirs, StopReason::PersonErased, now).await?;
    for session_id in stopped.1 {
        sessions::close_calls(tx, session_id, "the person was erased", now).await?;
    }
    delete(tx, &erasure, &accounts, now).await?;
    erased_people::insert(tx, &erasure).await?;
    jobs::insert(tx, ERASE_JOB, now).await?;
    let detail = Detail::default()
        .count("identities", accounts.len() as i64)
        .count("conversations", conversations as i64);
    let entry = Entry::new(actor, Action::UserErase, &user.id).with(detail);
    audit::append(&app.keyring, tx, entry, now).await?;
    Ok(Erased {
        user_ids: erasure.user_ids(),
        identities: accounts.len(),
        conversations,
    })
}

/// The person, with everything that leads to them, held until `tx` ends. Whoever is making something of
/// theirs in this moment is waited for, and whoever comes later waits and then finds nobody. The person
/// is held whole only when slots and conversations are: those who hold one of these and then refer to the
/// person must be let through.
async fn lock(tx: &mut TenantTx, id: UserId) -> Result<(User, Vec<IdentityRecord>)> {
    for _ in 0..ATTEMPTS {
        let found = users::find(tx, id).await?;
        let found = found.ok_or_else(|| Error::not_found("user"))?;
        let Some(user) = users::lock(tx, &[found.id]).await?.pop() else {
            continue;
        };
        erasures::lock_slots(tx, user.id).await?;
        let accounts = identities::list(tx, user.id).await?;
        let ids: Vec<IdentityId> = accounts.iter().map(|account| account.id).collect();
        turn_stops::lock_all_of(tx, user.id, &ids).await?;
        if erasures::lock_person(tx, user.id).await? {
            let accounts = identities::list(tx, user.id).await?;
            return Ok((user, accounts));
        }
    }
    Err(Error::unavailable(
        "the person",
        anyhow::anyhow!("the users are merged repeatedly"),
    ))
}

async fn delete(
    tx: &mut TenantTx,
    erasure: &Erasure,
    accounts: &[IdentityRecord],
    now: DateTime<Utc>,
) -> Result<()> {
    erasures::delete_slots(tx, erasure).await?;
    erasures::blank_notices(tx, erasure, now).await?;
    erasures::delete_chats(tx, accounts).await?;
    let accounts = erasure.account_ids();
    let acted_for = erasure.acted_for();
    idempotency::delete_of_person(tx, &accounts, &acted_for, ANSWERS).await?;
    erasures::delete_person(tx, erasure).await
}
