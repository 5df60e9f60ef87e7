//! The answer to a sender on a platform, as a delivery: where nobody waits for it, or the caller that waited has left.

use chrono::{DateTime, Utc};

use super::outcome::{TurnOutcome, TurnResult};
use crate::app::App;
use crate::auth::ServiceCaller;
use crate::domain::bridge::chat_text::{EMPTY_ANSWER, no_answer_text};
use crate::domain::bridge::delivery::{DeliveryKind, NewDelivery, ReplyTo};
use crate::domain::conversation::message::display_text;
use crate::domain::turn::StopReason;
use crate::error::Result;
use crate::ids::{SessionId, TenantId, TurnId};
use crate::store::TenantTx;
use crate::store::bridge::{outbox, replies};
use crate::store::turn::turn_lease::TurnLease;
use crate::store::turn::{turn_claims, turns};

/// Answers that one poll makes deliveries.
const BATCH: i32 = 50;
/// After so many failures an answer is given up.
const MAX_FAILURES: i32 = 8;

/// A turn that has its answer.
#[derive(Debug, Clone, Copy)]
pub struct AnsweredTurn {
    pub id: TurnId,
    pub conversation_id: SessionId,
    pub session_id: SessionId,
}

impl AnsweredTurn {
    pub(super) fn of_lease(lease: &TurnLease) -> Self {
        Self {
            id: lease.id,
            conversation_id: lease.conversation_id,
            session_id: lease.session_id,
        }
    }
}

/// Writes the answer to the outbox; or, of a turn without one, the reason. A turn that a user stopped needs no notice.
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

/// What a user reads when a turn has no answer; `None` where the user stopped it.
pub fn failure_notice(reason: &str) -> Option<String> {
    if StopReason::ALL.iter().any(|stop| stop.as_str() == reason) {
        return None;
    }
    Some(no_answer_text(reason))
}

/// The text, or the reason that there is none: a platform cannot show an empty answer.
pub(super) fn non_empty(text: String) -> Result<String, &'static str> {
    if text.trim().is_empty() {
        Err(EMPTY_ANSWER)
    } else {
        Ok(text)
    }
}

/// The text of an outcome, or the reason that it has none.
pub fn text_of(outcome: &TurnOutcome) -> Result<String, &str> {
    match &outcome.result {
        TurnResult::Answer { content, .. } => non_empty(display_text(content)),
        TurnResult::Failure(turn) => Err(turn.reason.as_deref().unwrap_or_default()),
    }
}

/// Makes deliveries of answers whose caller has left before it got them. Each has its own transaction: one that fails
/// is put off, and does not hold up the others.
pub async fn deliver_unclaimed(app: &App) -> Result<usize> {
    let unclaimed = replies::list_unclaimed(&app.db, BATCH).await?;
    for (tenant_id, turn_id) in &unclaimed {
        if let Err(error) = deliver_one(app, *tenant_id, *turn_id).await {
            tracing::warn!(tenant = %tenant_id, turn = %turn_id, error = %error, cause = ?error.cause,
                           "answer not made a delivery");
            // Fails too while the database is away: then none of the others could be delivered either.
            put_off(app, *tenant_id, *turn_id).await?;
        }
    }
    Ok(unclaimed.len())
}

async fn deliver_one(app: &App, tenant_id: TenantId, turn_id: TurnId) -> Result<()> {
    let caller = ServiceCaller::for_tenant(tenant_id);
    let mut tx = caller.begin(&app.db).await?;
    let Some(to) = replies::claim_answer(&mut tx, turn_id).await? else {
        return tx.end().await;
    };
    let turn = turns::get(&mut tx, turn_id).await?;
    let outcome = TurnOutcome::read(&mut tx, turn).await?;
    let turn = AnsweredTurn {
        id: outcome.turn_id,
        conversation_id: outcome.conversation_id,
        session_id: outcome.session_id,
    };
    deliver(&mut tx, turn, &to, text_of(&outcome), app.clock.now()).await?;
    tx.commit().await
}

async fn put_off(app: &App, tenant_id: TenantId, turn_id: TurnId) -> Result<()> {
    let caller = ServiceCaller::for_tenant(tenant_id);
    let mut tx = caller.begin(&app.db).await?;
    let failures = turn_claims::defer(&mut tx, turn_id).await?.unwrap_or(0);
    if failures >= MAX_FAILURES {
        replies::mark_failed(&mut tx, turn_id).await?;
        tracing::error!(tenant = %tenant_id, turn = %turn_id, failures, "answer given up");
    }
    tx.commit().await
}
