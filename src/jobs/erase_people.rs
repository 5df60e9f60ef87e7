//! Looks for what is left of people who were erased: what they said in conversations of others, answers
//! that tell of them, what they used. Once at once, and once when whatever was under way in that moment
//! has ended: then they are forgotten here as well.

use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};

use crate::app::App;
use crate::auth::JobCaller;
use crate::error::Result;
use crate::idempotency;
use crate::people::SETTLED_AFTER;
use crate::store::{self, erased_people};

const BATCH: i64 = 1000;
/// Answers are opened one by one.
const ANSWERS: i64 = 200;
/// Well within the job's lease; what is left is for the next run.
const AT_ONCE: Duration = Duration::from_secs(20);
/// Whoever erases a person brings the job forward.
const WHILE_IDLE: TimeDelta = TimeDelta::days(1);

pub async fn run(app: &App, caller: &JobCaller) -> Result<DateTime<Utc>> {
    let started = Instant::now();
    let hurry = || started.elapsed() >= AT_ONCE || app.draining.is_cancelled();
    loop {
        // Before the looking: what is written later is written by someone who found them gone.
        let now = app.clock.now();
        let mut tx = caller.begin(&app.db).await?;
        let due = erased_people::find_due(&mut tx, now - SETTLED_AFTER).await?;
        let Some(erasure) = due else {
            let oldest = erased_people::oldest(&mut tx).await?;
            return Ok(oldest.map_or(now + WHILE_IDLE, |oldest| oldest + SETTLED_AFTER));
        };
        tx.commit().await?;
        for identity_id in &erasure.identity_ids {
            // Until there is none: a batch is smaller if somebody deletes some of it at the same time.
            let mut blanked = 1;
            while blanked > 0 {
                if hurry() {
                    return Ok(app.clock.now());
                }
                let mut tx = caller.begin(&app.db).await?;
                let messages = erased_people::blank_messages(&mut tx, *identity_id, BATCH).await?;
                let turns = erased_people::blank_turns(&mut tx, *identity_id, BATCH).await?;
                blanked = messages.max(turns);
                tx.commit().await?;
            }
        }
        let mut opened = None;
        loop {
            if hurry() {
                return Ok(app.clock.now());
            }
            let tells = |text: &str| erasure.is_mentioned_in(text);
            let mut tx = caller.begin(&app.db).await?;
            let last = opened.as_ref();
            opened = idempotency::forget_telling(app, &mut tx, last, ANSWERS, tells).await?;
            tx.commit().await?;
            if opened.is_none() {
                break;
            }
        }
        let mut tx = caller.begin(&app.db).await?;
        let (accounts, acted_for) = (erasure.account_ids(), erasure.acted_for());
        store::idempotency::delete_of_person(&mut tx, &accounts, &acted_for).await?;
        erased_people::fold_usage(&mut tx, &erasure.user_ids()).await?;
        match erasure.is_settled(now) {
            true => erased_people::delete(&mut tx, erasure.user_id).await?,
            false => erased_people::update_looked(&mut tx, erasure.user_id, now).await?,
        }
        tx.commit().await?;
    }
}
