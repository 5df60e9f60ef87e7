//! Removes what is left of erased users: their messages in conversations of others, the answers to them and the
//! summaries of them, stored answers that mention them, their usage. It runs once immediately, and once when every
//! request of that moment has ended. Then the erasure itself is forgotten.

use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};

use super::batches::{Task, finish};
use crate::app::App;
use crate::auth::ServiceCaller;
use crate::domain::people::erasure::Erasure;
use crate::error::Result;
use crate::idempotency;
use crate::people::SETTLED_AFTER;
use crate::store::db::idempotency::RequestName;
use crate::store::people::{erased_people, erased_summaries};

/// Sealed answers per transaction. Each one has to be opened.
const ANSWER_BATCH: i64 = 200;
/// Sessions per statement. All their messages are read.
const SESSION_BATCH: usize = 50;
/// Well within the job's lease. The rest is left to the next run.
const MAX_TIME: Duration = Duration::from_secs(20);
/// An erasure schedules the job earlier.
const WHILE_IDLE: TimeDelta = TimeDelta::days(1);

pub async fn run(app: &App, caller: &ServiceCaller) -> Result<DateTime<Utc>> {
    let until = Instant::now() + MAX_TIME;
    loop {
        // The time before the search: a later writer finds the user gone.
        let now = app.clock.now();
        let mut tx = caller.begin(&app.db).await?;
        let due = erased_people::claim_due(&mut tx, now - SETTLED_AFTER, now).await?;
        let Some(due) = due else {
            let oldest = erased_people::find_oldest(&mut tx).await?;
            tx.end().await?;
            return Ok(oldest.map_or(now + WHILE_IDLE, |oldest| oldest + SETTLED_AFTER));
        };
        tx.commit().await?;
        let erasure = due.erasure;
        let began_at = due.began_at;
        let done = remove_rows(app, caller, &erasure, until).await?
            && (!erasure.is_settled(began_at)
                || finish(app, caller, Task::ForgetTurns(erasure.user_id), until).await?)
            && open_answers(app, caller, &erasure, due.opened_to, until).await?;
        if !done {
            return Ok(app.clock.now());
        }
        let mut tx = caller.begin(&app.db).await?;
        if erasure.is_settled(began_at) {
            erased_people::delete(&mut tx, erasure.user_id).await?;
        } else {
            erased_people::update_searched(&mut tx, erasure.user_id, now).await?;
        }
        tx.commit().await?;
    }
}

/// Removes everything that is left of a user but the sealed answers. False if the time was too short.
async fn remove_rows(
    app: &App,
    caller: &ServiceCaller,
    erasure: &Erasure,
    until: Instant,
) -> Result<bool> {
    for identity_id in &erasure.identity_ids {
        for task in [
            Task::BlankMessages(*identity_id, erasure.user_id),
            Task::BlankTurns(*identity_id, erasure.user_id),
            Task::BlankSummaries(*identity_id),
        ] {
            if !finish(app, caller, task, until).await? {
                return Ok(false);
            }
        }
    }
    if !search_summaries(app, caller, erasure, until).await? {
        return Ok(false);
    }
    let identities = erasure.identity_id_texts();
    let acted_for = erasure.acted_for();
    let users = erasure.user_ids();
    for task in [
        Task::DeleteAnswers(&identities, &acted_for),
        Task::FoldUsage(&users),
    ] {
        if !finish(app, caller, task, until).await? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Blanks the summaries of unknown sources where the user wrote, from where the last run stopped. False if the time was
/// too short.
async fn search_summaries(
    app: &App,
    caller: &ServiceCaller,
    erasure: &Erasure,
    until: Instant,
) -> Result<bool> {
    loop {
        if Instant::now() >= until || app.shutdown.is_stopping() {
            return Ok(false);
        }
        let mut tx = caller.begin(&app.db).await?;
        let next = erased_summaries::find_next(&mut tx, erasure.user_id).await?;
        let Some(conversation_id) = next else {
            tx.end().await?;
            return Ok(true);
        };
        let sessions = erased_summaries::list_sessions(&mut tx, conversation_id).await?;
        for some in sessions.chunks(SESSION_BATCH) {
            erased_summaries::blank_unknown(&mut tx, some).await?;
        }
        erased_summaries::update_progress(&mut tx, erasure.user_id, conversation_id).await?;
        tx.commit().await?;
    }
}

/// Deletes the sealed answers that mention the user, from where the last run stopped. False if the time was too
/// short.
async fn open_answers(
    app: &App,
    caller: &ServiceCaller,
    erasure: &Erasure,
    mut opened: Option<RequestName>,
    until: Instant,
) -> Result<bool> {
    loop {
        if Instant::now() >= until || app.shutdown.is_stopping() {
            return Ok(false);
        }
        let mentions = |text: &str| erasure.is_mentioned_in(text);
        let mut tx = caller.begin(&app.db).await?;
        let last = opened.as_ref();
        opened = idempotency::delete_mentions(app, &mut tx, last, ANSWER_BATCH, mentions).await?;
        if let Some(to) = &opened {
            erased_people::update_progress(&mut tx, erasure.user_id, to).await?;
        }
        tx.commit().await?;
        if opened.is_none() {
            return Ok(true);
        }
    }
}
