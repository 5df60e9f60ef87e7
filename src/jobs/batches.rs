//! Work on many rows of a tenant: in batches, each in a transaction of its own, and in smaller ones when the
//! database has no time for a large one.

use std::time::Instant;

use chrono::{DateTime, Utc};

use crate::app::App;
use crate::auth::ServiceCaller;
use crate::error::{Code, Error, Result};
use crate::ids::{IdentityId, SessionId, UserId};
use crate::store::TenantTx;
use crate::store::conversation::conversations::{self, Part};
use crate::store::db::idempotency;
use crate::store::people::erased_people;
use crate::store::tenant::expiry::{self, Expiring};

/// Few enough that a batch takes a fraction of a second, also of rows that are not in memory.
const LARGEST: i64 = 250;
const SMALLEST: i64 = 10;

/// How many rows a batch has.
#[derive(Debug, Clone, Copy)]
pub struct BatchSize(i64);

impl BatchSize {
    pub fn new(rows: i64) -> Self {
        Self(rows)
    }

    pub fn rows(self) -> i64 {
        self.0
    }

    /// Takes a tenth from now on if `error` says that a batch took too long; the error if it cannot be smaller.
    pub fn shrink(&mut self, error: Error) -> Result<()> {
        if error.code != Code::Timeout || self.0 <= SMALLEST {
            return Err(error);
        }
        self.0 = (self.0 / 10).max(SMALLEST);
        Ok(())
    }
}

/// What is done to rows until none of them is left.
#[derive(Debug, Clone, Copy)]
pub enum Task<'a> {
    /// Deletes what is older than that.
    Expire(Expiring, DateTime<Utc>),
    /// Deletes a part of deleted conversations.
    Erase(Part, &'a [SessionId]),
    /// Blanks what an erased identity said in conversations of others.
    BlankMessages(IdentityId),
    /// The same for its turns, their events and what was answered in them. They are the user's until the next:
    BlankTurns(IdentityId, UserId),
    /// Looks for what was said in blanked turns once more, and forgets whose they were.
    ForgetTurns(UserId),
    /// Deletes the answers that were stored for accounts, and for who acted for someone.
    DeleteAnswers(&'a [String], &'a [String]),
    /// Gives what erased users used to nobody.
    FoldUsage(&'a [UserId]),
}

/// How many turns a batch of so many rows has: each has several messages, and they copies.
fn turns_in(rows: i64) -> i64 {
    (rows / 10).max(1)
}

impl Task<'_> {
    /// Answers how many rows there were, up to `limit`.
    async fn run(self, tx: &mut TenantTx, limit: i64) -> Result<u64> {
        match self {
            Self::Expire(what, before) => expiry::delete(tx, what, before, limit).await,
            Self::Erase(part, deleted) => conversations::erase(tx, part, deleted, limit).await,
            Self::BlankMessages(id) => erased_people::blank_messages(tx, id, limit).await,
            Self::BlankTurns(id, user_id) => {
                match erased_people::delete_events(tx, id, limit).await? {
                    0 => erased_people::blank_turns(tx, id, user_id, turns_in(limit)).await,
                    deleted => Ok(deleted),
                }
            }
            Self::ForgetTurns(user_id) => {
                erased_people::forget_turns(tx, user_id, turns_in(limit)).await
            }
            Self::DeleteAnswers(accounts, acted_for) => {
                idempotency::delete_of_user(tx, accounts, acted_for, limit).await
            }
            Self::FoldUsage(users) => erased_people::fold_usage(tx, users, limit).await,
        }
    }
}

/// Does a task until nothing is left, and answers true; false if it has to stop before, at `until` or because the
/// node ends.
pub async fn finish(
    app: &App,
    caller: &ServiceCaller,
    task: Task<'_>,
    until: Instant,
) -> Result<bool> {
    let mut size = BatchSize::new(LARGEST);
    while Instant::now() < until && !app.shutdown.is_stopping() {
        match run_batch(app, caller, task, size.rows()).await {
            // A batch can be smaller than asked for because somebody else deletes some of it at the same time.
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
