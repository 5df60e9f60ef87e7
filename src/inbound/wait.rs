//! Waits for the answer to an inbound message. It goes to the caller that waits, or becomes a delivery: never both, and
//! never neither. One conditional update of the turn decides.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use tokio::time::Instant;

use super::receive::InboundCaller;
use super::response::{InboundResponse, Notice, ReplyResponse};
use super::{InboundTurn, Sender, find_earlier_turn};
use crate::error::Result;
use crate::fair_queue::Permit;
use crate::idempotency::{Answer, Outcome};
use crate::ids::TurnId;
use crate::people;
use crate::store::bridge::replies;
use crate::turns::{self, TurnOutcome, TurnResult, TurnStream};

/// How long a caller may wait for an answer, from when its turn was accepted.
const MAX_WAIT: TimeDelta = TimeDelta::seconds(55);
/// How often a caller that waits is checked again.
const RECHECK_EVERY: Duration = Duration::from_secs(3);
/// How long an answer may take that was ready when the wait ended.
const LAST_READ: Duration = Duration::from_secs(2);

/// The end of the wait for a turn that was accepted at `accepted_at`.
pub(super) fn deadline(accepted_at: DateTime<Utc>, now: DateTime<Utc>) -> Instant {
    Instant::now() + (accepted_at + MAX_WAIT - now).to_std().unwrap_or_default()
}

/// A caller that waits for a turn's answer.
pub struct WaitingReply {
    pub(super) stream: TurnStream,
    pub(super) inbound: InboundTurn,
    pub(super) until: Instant,
    pub(super) is_replay: bool,
    /// The caller's, as long as it waits.
    pub(super) _connection: Permit,
}

impl WaitingReply {
    pub(super) async fn finish(mut self, caller: &InboundCaller) -> Result<Outcome> {
        let outcome = self.wait(caller).await?;
        Ok(if self.is_replay {
            outcome.replayed()
        } else {
            outcome
        })
    }

    async fn wait(&mut self, caller: &InboundCaller) -> Result<Outcome> {
        let turn_id = self.inbound.turn.id;
        while Instant::now() < self.until {
            let due = Instant::now() + RECHECK_EVERY;
            let ended = tokio::select! {
                ended = self.stream.outcome(self.until.min(due)) => ended?,
                () = caller.credential.refused() => None,
            };
            if let Some(outcome) = ended {
                return self.answer(caller, &outcome).await;
            }
            caller.check(turn_id).await?;
        }
        let mut tx = caller.begin().await?;
        let becomes_delivery = replies::hand_to_delivery(&mut tx, turn_id).await?;
        tx.commit().await?;
        if becomes_delivery {
            return caller.accepted(&self.inbound);
        }
        // The turn has ended in this moment, or another request has decided.
        match self.stream.outcome(Instant::now() + LAST_READ).await? {
            Some(outcome) => self.answer(caller, &outcome).await,
            None => caller.accepted(&self.inbound),
        }
    }

    /// Answers, unless the answer has become a delivery. An unlink takes the reply from its turn in its own
    /// transaction, so that a reply that can be marked is the sender's.
    async fn answer(&self, caller: &InboundCaller, outcome: &TurnOutcome) -> Result<Outcome> {
        let turn_id = self.inbound.turn.id;
        caller.credential.check_now(&caller.app.verifiers).await?;
        // What stopped the turn may have been the erasure of its sender, or of its conversation.
        if let TurnResult::Failure(_) = outcome.result {
            caller.check(turn_id).await?;
        }
        let mut tx = caller.begin().await?;
        let is_ours = replies::mark_returned(&mut tx, turn_id).await?;
        tx.commit().await?;
        if !is_ours {
            caller.check(turn_id).await?;
            return caller.accepted(&self.inbound);
        }
        let mut inbound = self.inbound.clone();
        inbound.turn.session_id = outcome.session_id;
        let mut response = InboundResponse::of_turn(&inbound, &caller.access());
        match turns::text_of(outcome) {
            Ok(text) => response.reply = Some(ReplyResponse { text }),
            Err(reason) => {
                let notice = turns::failure_notice(reason).map(|text| Notice {
                    code: reason.to_owned(),
                    text,
                });
                response.notices.extend(notice);
            }
        }
        Ok(Outcome::Fresh(Answer::new(200, &response)?))
    }
}

impl InboundCaller {
    /// Checks that the caller may still be answered: its credential is good, and the sender's identity was not
    /// unlinked from the conversation's owner. While the database does not answer the last check stands.
    async fn check(&self, turn_id: TurnId) -> Result<()> {
        self.credential.check(&self.app.verifiers).await?;
        match self.check_sender(turn_id).await {
            Err(error) if error.is_transient() => Ok(()),
            checked => checked,
        }
    }

    async fn check_sender(&self, turn_id: TurnId) -> Result<()> {
        let mut tx = self.begin().await?;
        let identity_id = self.sender.identity.id;
        let user_id = people::find_present_user(&mut tx, identity_id, self.sender.user_id).await?;
        let sender = Sender {
            user_id,
            ..self.sender.clone()
        };
        find_earlier_turn(&self.app, &mut tx, &sender, turn_id).await?;
        tx.end().await
    }
}
