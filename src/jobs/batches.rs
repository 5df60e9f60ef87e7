//! Work on many rows of a tenant: in batches, one transaction each, and in smaller ones when the database has no
//! time for a large one.

use std::time::Instant;

use chrono::{DateTime, Utc};

use crate::app::App;
use crate::auth::ServiceCaller;
use crate::error::{Code, Error, Result};
use crate::ids::{IdentityId, SessionId, UserId};
use crate::store::TenantTx;
use crate::store::conversation::conversations::{self, Part};
use crate::store::db::idempotency;
use crate::store::people::{erased_people, erased_summaries};
use crate::store::tenant::expiry::{self, Expiring};

/// A batch takes a fraction of a second, also for rows that are not in memory.
const MAX_ROWS: i64 = 250;
const MIN_ROWS: i64 = 10;

/// The number of rows in a batch.
#[derive(Debug, Clone, Copy)]
pub struct BatchSize(i64);

impl BatchSize {
    pub fn new(rows: i64) -> Self {
        Self(rows)
    }

    pub fn rows(self) -> i64 {
        self.0
    }

    /// Shrinks to a tenth if `error` says that a batch took too long; the error if it cannot be smaller.
    pub fn shrink(&mut self, error: Error) -> Result<()> {
        if error.code != Code::Timeout || self.0 <= MIN_ROWS {
            return Err(error);
        }
        self.0 = (self.0 / 10).max(MIN_ROWS);
        Ok(())
    }
}

/// An action on rows, until none is left.
#[derive(Debug, Clone, Copy)]
pub enum Task<'a> {
    /// Deletes what is older than the time.
    Expire(Expiring, DateTime<Utc>),
    /// Deletes one kind of rows of deleted conversations.
    Erase(Part, &'a [SessionId]),
    /// Blanks an erased identity's messages in conversations of others.
    BlankMessages(IdentityId, UserId),
    /// Blanks the summaries with the identity among their sources.
    BlankSummaries(IdentityId),
    /// Blanks its turns, with their events and answers. They still name the user until `ForgetTurns`.
    BlankTurns(IdentityId, UserId),
    /// Blanks late writes in blanked turns, and removes the user's id from them.
    ForgetTurns(UserId),
    /// Deletes the answers that were stored for identities, and for callers that acted for the user.
    DeleteAnswers(&'a [String], &'a [String]),
    /// Adds the usage of erased users to the usage without a user.
    FoldUsage(&'a [UserId]),
}

/// The number of turns in a batch of so many rows: a turn has several messages, and they have copies.
fn turns_in(rows: i64) -> i64 {
    (rows / 10).max(1)
}

impl Task<'_> {
    /// Returns how many rows it changed, up to `limit`.
    async fn run(self, tx: &mut TenantTx, limit: i64) -> Result<u64> {
        match self {
            Self::Expire(what, before) => expiry::delete(tx, what, before, limit).await,
            Self::Erase(part, deleted) => {
                conversations::delete_part(tx, part, deleted, limit).await
            }
            Self::BlankMessages(id, user_id) => {
                erased_people::blank_messages(tx, id, user_id, limit).await
            }
            Self::BlankSummaries(id) => erased_summaries::blank_known(tx, id, limit).await,
            Self::BlankTurns(id, user_id) => {
                match erased_people::delete_events(tx, id, limit).await? {
                    0 => erased_people::blank_turns(tx, id, user_id, turns_in(limit)).await,
                    deleted => Ok(deleted),
                }
            }
            Self::ForgetTurns(user_id) => {
                erased_people::forget_turns(tx, user_id, turns_in(limit)).await
            }
            Self::DeleteAnswers(identities, acted_for) => {
                idempotency::delete_of_user(tx, identities, acted_for, limit).await
            }
            Self::FoldUsage(users) => erased_people::fold_usage(tx, users, limit).await,
        }
    }
}

/// Runs a task until nothing is left, and returns true; false if it has to stop earlier, at `until` or because the
/// node shuts down.
pub async fn finish(
    app: &App,
    caller: &ServiceCaller,
    task: Task<'_>,
    until: Instant,
) -> Result<bool> {
    let mut size = BatchSize::new(MAX_ROWS);
    while Instant::now() < until && !app.shutdown.is_stopping() {
        match run_batch(app, caller, task, size.rows()).await {
            // A batch can be smaller than its limit because a concurrent task deletes some of the rows.
            Ok(0) => return Ok(true),
            Ok(_) => {}
            Err(error) => size.shrink(error)?,
        }
    }
    Ok(false)
}

async fn run_batch(app: &App, caller: &ServiceCaller, task: Task<'_>, limit: i64) -> Result<u64> {
    let mut tx = caller.begin(&app.db).await?;
    let changed = task.run(&mut tx, limit).await?;
    tx.commit().await?;
    Ok(changed)
}
