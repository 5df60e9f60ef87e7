//! The answer of a turn to who asked on a platform: a delivery where nobody waits for it, and the wait for
//! it where somebody does.

use chrono::{DateTime, Utc};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use super::follow::Follower;
use super::launch::LiveUpdate;
use super::outcome::{Outcome, Said};
use crate::app::App;
use crate::auth::ServiceCaller;
use crate::domain::bridge::chat_text::{EMPTY_ANSWER, no_answer_text};
use crate::domain::bridge::delivery::{DeliveryKind, NewDelivery, ReplyTo};
use crate::domain::conversation::message::shown_text;
use crate::domain::turn::StopReason;
use crate::error::Result;
use crate::ids::{SessionId, TenantId, TurnId};
use crate::store::TenantTx;
use crate::store::bridge::{outbox, replies};
use crate::store::turn::{turn_claims, turns};

/// As many as one look takes.
const BATCH: i32 = 50;

/// A turn that has its answer.
#[derive(Debug, Clone, Copy)]
pub struct AnsweredTurn {
    pub id: TurnId,
    pub conversation_id: SessionId,
    pub session_id: SessionId,
}

/// Writes the answer to the outbox; or, of a turn without one, why there is none. What somebody stopped needs
/// no word.
pub async fn deliver(
    tx: &mut TenantTx,
    turn: AnsweredTurn,
    to: &ReplyTo,
    answer: Result<String, &str>,
    now: DateTime<Utc>,
) -> Result<()> {
    let (kind, text) = match answer {
        Ok(text) => (DeliveryKind::Reply, text),
        Err(reason) => match failure_notice(reason) {
            Some(notice) => (DeliveryKind::Notice, notice),
            None => return Ok(()),
        },
    };
    let delivery = NewDelivery {
        kind,
        address: &to.address,
        identity_id: Some(to.identity_id),
        text: &text,
        turn_id: Some(turn.id),
        session_id: Some(turn.session_id),
        conversation_id: Some(turn.conversation_id),
        in_reply_to: to.message_id.as_deref(),
    };
    outbox::insert(tx, &delivery, now).await
}

/// What people are told of a turn that has no answer; nothing where they stopped it themselves.
pub fn failure_notice(reason: &str) -> Option<String> {
    if StopReason::ALL.iter().any(|stop| stop.as_str() == reason) {
        return None;
    }
    Some(no_answer_text(reason))
}

/// An answer without a word is nothing that a platform could show.
pub(super) fn said_text(text: String) -> Result<String, &'static str> {
    if text.trim().is_empty() {
        Err(EMPTY_ANSWER)
    } else {
        Ok(text)
    }
}

/// The text of an outcome, or the reason why it has none.
pub fn text_of(outcome: &Outcome) -> Result<String, &str> {
    match &outcome.said {
        Said::Answer { content, .. } => said_text(shown_text(content)),
        Said::Nothing(turn) => Err(turn.reason.as_deref().unwrap_or_default()),
    }
}

/// After so many failures an answer is not tried any more.
const MAX_FAILURES: i32 = 8;

/// Makes deliveries of answers that nobody fetched: the caller that waited is gone. Each on its own: one that
/// fails is put off, and does not hold up the others.
pub async fn deliver_unclaimed(app: &App) -> Result<usize> {
    let untold = replies::list_unclaimed(&app.db, BATCH).await?;
    for (tenant_id, turn_id) in &untold {
        if let Err(error) = deliver_one(app, *tenant_id, *turn_id).await {
            tracing::warn!(tenant = %tenant_id, turn = %turn_id, error = %error, cause = ?error.cause,
                           "an answer did not become a delivery");
            // Fails too while the database is away: then none of the others could be delivered either.
            put_off(app, *tenant_id, *turn_id).await?;
        }
    }
    Ok(untold.len())
}

async fn deliver_one(app: &App, tenant_id: TenantId, turn_id: TurnId) -> Result<()> {
    let caller = ServiceCaller::for_tenant(tenant_id);
    let mut tx = caller.begin(&app.db).await?;
    let Some(to) = replies::claim_answer(&mut tx, turn_id).await? else {
        return Ok(());
    };
    let turn = turns::get(&mut tx, turn_id).await?;
    let outcome = Outcome::of(&mut tx, turn).await?;
    let turn = AnsweredTurn {
        id: outcome.turn_id,
        conversation_id: outcome.conversation_id,
        session_id: outcome.session_id,
    };
    deliver(&mut tx, turn, &to, text_of(&outcome), app.clock.now()).await?;
    tx.commit().await?;
    app.live.notify_deliveries(tenant_id);
    Ok(())
}

async fn put_off(app: &App, tenant_id: TenantId, turn_id: TurnId) -> Result<()> {
    let caller = ServiceCaller::for_tenant(tenant_id);
    let mut tx = caller.begin(&app.db).await?;
    let failures = turn_claims::defer(&mut tx, turn_id).await?.unwrap_or(0);
    if failures >= MAX_FAILURES {
        replies::mark_failed(&mut tx, turn_id).await?;
        tracing::error!(tenant = %tenant_id, turn = %turn_id, failures, "an answer is not delivered");
    }
    tx.commit().await
}

/// Somebody who waits for a turn's end.
pub struct AnswerWaiter {
    ahead: Option<mpsc::Receiver<LiveUpdate>>,
    follower: Follower,
}

impl AnswerWaiter {
    pub fn new(
        app: &App,
        tenant_id: TenantId,
        conversation_id: SessionId,
        turn_id: TurnId,
        ahead: Option<mpsc::Receiver<LiveUpdate>>,
    ) -> Self {
        let follower = Follower::of_turn(app, tenant_id, conversation_id, turn_id, 0);
        Self {
            ahead,
            follower: follower.until_idle(),
        }
    }

    /// How it ended; `None` if it has not by `until`.
    pub async fn wait(&mut self, until: Instant) -> Result<Option<Outcome>> {
        while let Some(ahead) = &mut self.ahead {
            match timeout_at(until, ahead.recv()).await {
                Err(_) => return Ok(None),
                Ok(Some(LiveUpdate::Delta(_))) => {}
                Ok(Some(LiveUpdate::Ended(outcome))) => return Ok(Some(*outcome)),
                // Another node goes on with it.
                Ok(Some(LiveUpdate::Lost) | None) => self.ahead = None,
            }
        }
        loop {
            let events = self.follower.next(until).await?;
            if events.is_empty() {
                match self.follower.outcome().await? {
                    Some(outcome) => return Ok(Some(outcome)),
                    None if Instant::now() >= until => return Ok(None),
                    None => {}
                }
            }
        }
    }
}
