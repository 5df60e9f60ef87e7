//! The waiting for the answer to a message that was brought in, and the checks of who waits. It needs nothing of the
//! message.

use std::time::Duration;

use actix_web::HttpResponse;
use actix_web::http::header::{HeaderName, HeaderValue};
use tokio::time::Instant;

use super::inbound::{InboundResponse, ReplyResponse};
use super::inbound_answers::MessageReceiver;
use crate::domain::conversation::session::ConversationHandle;
use crate::domain::turn::ResetInfo;
use crate::error::Result;
use crate::fair_queue::Permit;
use crate::http::auth::conversation::find_present_user;
use crate::http::request::idempotency_key;
use crate::ids::{SessionId, TurnId, UserId};
use crate::inbound::{self, Notice, Sender};
use crate::store::bridge::replies;
use crate::turns::{self, AnswerWaiter, Outcome};

/// How often a caller who waits is checked again.
const CHECK_INTERVAL: Duration = Duration::from_secs(3);

/// What a message came to.
pub enum Taken {
    Answered(HttpResponse),
    Waiting(Box<Waiting>),
}

/// A caller who waits for a turn. It has nothing of the message.
pub struct Waiting {
    pub(in crate::http::v1) waiter: AnswerWaiter,
    pub(in crate::http::v1) shown: Shown,
    pub(in crate::http::v1) until: Instant,
    pub(in crate::http::v1) is_replay: bool,
    /// The caller's, as long as it waits.
    pub(in crate::http::v1) _connection: Permit,
}

/// What is told of the turn's session.
pub(in crate::http::v1) struct Shown {
    pub(in crate::http::v1) turn_id: TurnId,
    pub(in crate::http::v1) name: ConversationHandle,
    pub(in crate::http::v1) session_id: SessionId,
    pub(in crate::http::v1) session_key: Option<String>,
    pub(in crate::http::v1) reset: Option<ResetInfo>,
    /// The sender's user when it was accepted.
    pub(in crate::http::v1) user_id: UserId,
    pub(in crate::http::v1) duplicate: bool,
}

impl MessageReceiver {
    /// Waits for what the message came to. Nothing of the message is needed any more.
    pub async fn finish(&self, taken: Taken) -> Result<HttpResponse> {
        let waiting = match taken {
            Taken::Answered(response) => return Ok(response),
            Taken::Waiting(waiting) => *waiting,
        };
        let response = self
            .wait(waiting.waiter, waiting.shown, waiting.until)
            .await?;
        if waiting.is_replay {
            Ok(replayed(response))
        } else {
            Ok(response)
        }
    }

    /// Waits for the end of a turn, until the answer becomes a delivery.
    async fn wait(
        &self,
        mut waiter: AnswerWaiter,
        shown: Shown,
        until: Instant,
    ) -> Result<HttpResponse> {
        while Instant::now() < until {
            let due = Instant::now() + CHECK_INTERVAL;
            let ended = tokio::select! {
                ended = waiter.wait(until.min(due)) => ended?,
                () = self.credential.refused() => None,
            };
            if let Some(outcome) = ended {
                return self.tell(shown, &outcome).await;
            }
            self.check_caller(shown.turn_id).await?;
        }
        let mut tx = self.begin().await?;
        let becomes_delivery = replies::hand_to_delivery(&mut tx, shown.turn_id).await?;
        tx.commit().await?;
        if becomes_delivery {
            return self.taken(shown);
        }
        // It has ended in this moment, or somebody else has decided.
        let soon = Instant::now() + Duration::from_secs(2);
        match waiter.wait(soon).await? {
            Some(outcome) => self.tell(shown, &outcome).await,
            None => self.taken(shown),
        }
    }

    /// Whether the caller may still be answered: its credential is good, and the sender's identity has not been
    /// unlinked from the conversation's owner. While the database does not answer the last check stands.
    async fn check_caller(&self, turn_id: TurnId) -> Result<()> {
        self.credential.check(&self.app.verifiers).await?;
        match self.check_sender(turn_id).await {
            Err(error) if error.is_transient() => Ok(()),
            checked => checked,
        }
    }

    async fn check_sender(&self, turn_id: TurnId) -> Result<()> {
        let mut tx = self.begin().await?;
        let identity_id = self.speaker.identity.id;
        let user_id = self.speaker.user_id;
        let user_id = find_present_user(&mut tx, identity_id, user_id).await?;
        let speaker = Sender {
            user_id,
            ..self.speaker.clone()
        };
        inbound::find_before(&self.app, &mut tx, &speaker, turn_id).await?;
        tx.commit().await
    }

    /// Tells the answer to who waited, unless it has become a delivery. An unlink takes the reply from its turn in
    /// its own transaction, so that a reply that can be marked is the sender's.
    async fn tell(&self, shown: Shown, outcome: &Outcome) -> Result<HttpResponse> {
        self.credential.check_now(&self.app.verifiers).await?;
        let mut tx = self.begin().await?;
        let mine = replies::mark_returned(&mut tx, shown.turn_id).await?;
        tx.commit().await?;
        if !mine {
            self.check_caller(shown.turn_id).await?;
            return self.taken(shown);
        }
        let (reply, notices) = match turns::text_of(outcome) {
            Ok(text) => (Some(ReplyResponse { text }), Vec::new()),
            Err(reason) => {
                let notice = turns::failure_notice(reason).map(|text| Notice {
                    code: reason.to_owned(),
                    text,
                });
                (None, notice.into_iter().collect())
            }
        };
        let session_id = outcome.session_id;
        let response = InboundResponse {
            reply,
            notices,
            ..self.render(&Shown {
                session_id,
                ..shown
            })
        };
        Ok(HttpResponse::Ok().json(response))
    }

    pub(in crate::http::v1) fn taken(&self, shown: Shown) -> Result<HttpResponse> {
        Ok(HttpResponse::Accepted().json(self.render(&shown)))
    }

    fn render(&self, shown: &Shown) -> InboundResponse {
        let access = self.access();
        InboundResponse {
            turn_id: Some(shown.turn_id),
            session_key: shown.session_key.clone(),
            session_id: Some(shown.name.shown_link(shown.session_id, &access)),
            conversation_id: Some(shown.name.shown(&access)),
            user_id: shown.user_id,
            reply: None,
            notices: Vec::new(),
            reset: shown.reset.clone(),
            offer: None,
            duplicate: shown.duplicate,
        }
    }
}

pub(in crate::http::v1) fn replayed(mut response: HttpResponse) -> HttpResponse {
    let (name, value) = idempotency_key::REPLAYED;
    let name = HeaderName::from_static(name);
    let value = HeaderValue::from_static(value);
    response.headers_mut().insert(name, value);
    response
}
