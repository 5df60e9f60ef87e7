//! Looks for what is left of people who were erased: what they said in conversations of others, and were
//! answered there, stored answers that tell of them, what they used. Once at once, and once when whatever was
//! under way in that moment has ended: then they are forgotten here as well.

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
use crate::store::people::erased_people;

/// Answers are opened one by one.
const ANSWERS: i64 = 200;
/// Well within the job's lease; what is left is for the next run.
const AT_ONCE: Duration = Duration::from_secs(20);
/// Whoever erases a person brings the job forward.
const WHILE_IDLE: TimeDelta = TimeDelta::days(1);

pub async fn run(app: &App, caller: &ServiceCaller) -> Result<DateTime<Utc>> {
    let until = Instant::now() + AT_ONCE;
    loop {
        // Before the looking: what is written later is written by someone who found them gone.
        let now = app.clock.now();
        let mut tx = caller.begin(&app.db).await?;
        let due = erased_people::claim_due(&mut tx, now - SETTLED_AFTER, now).await?;
        let Some(due) = due else {
            let oldest = erased_people::find_oldest(&mut tx).await?;
            return Ok(oldest.map_or(now + WHILE_IDLE, |oldest| oldest + SETTLED_AFTER));
        };
        tx.commit().await?;
        let erasure = due.erasure;
        let began_at = due.began_at;
        let done = look_for(app, caller, &erasure, until).await?
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

/// Removes what is left of a person, but for sealed answers. False if there was not enough time.
async fn look_for(
    app: &App,
    caller: &ServiceCaller,
    erasure: &Erasure,
    until: Instant,
) -> Result<bool> {
    for identity_id in &erasure.identity_ids {
        for task in [
            Task::BlankMessages(*identity_id),
            Task::BlankTurns(*identity_id, erasure.user_id),
        ] {
            if !finish(app, caller, task, until).await? {
                return Ok(false);
            }
        }
    }
    let accounts = erasure.identity_id_texts();
    let acted_for = erasure.acted_for();
    let users = erasure.user_ids();
    for task in [
        Task::DeleteAnswers(&accounts, &acted_for),
        Task::FoldUsage(&users),
    ] {
        if !finish(app, caller, task, until).await? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Deletes the sealed answers to keys that tell of the person, from where the last run stopped. False if there was
/// not enough time.
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
        let tells = |text: &str| erasure.is_mentioned_in(text);
        let mut tx = caller.begin(&app.db).await?;
        let last = opened.as_ref();
        opened = idempotency::forget_telling(app, &mut tx, last, ANSWERS, tells).await?;
        if let Some(to) = &opened {
            erased_people::update_progress(&mut tx, erasure.user_id, to).await?;
        }
        tx.commit().await?;
        if opened.is_none() {
            return Ok(true);
        }
    }
}
