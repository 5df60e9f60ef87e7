//! How a message that was brought in is answered, and what a repeated one gets. The waiting is in `inbound_wait`.

use std::sync::Arc;

use actix_web::http::StatusCode;
use actix_web::{HttpResponse, web};
use tokio::time::Instant;

use super::inbound::{InboundResponse, ReplyResponse};
use super::inbound_wait::{Shown, Taken, Waiting, replayed};
use crate::app::App;
use crate::domain::bridge::command::{self, Command, Link, Said};
use crate::domain::bridge::delivery::ReplyVia;
use crate::domain::people::access::Access;
use crate::domain::turn::TurnInput;
use crate::error::{Code, Error, Result};
use crate::fair_queue::Permit;
use crate::http::auth::identity::VerifiedIdentity;
use crate::http::v1::identity_links::link_codes::with_charged_attempt;
use crate::idempotency::{self, Answer, EarlierResult};
use crate::ids::TurnId;
use crate::inbound::{self, After, Before, CommandAnswer, Done, Message, Preview, Sender};
use crate::people;
use crate::store::TenantTx;
use crate::store::bridge::replies;
use crate::streams::CheckedCredential;
use crate::turns::{self, Accepted, AnswerWaiter};

/// A message on its way in.
pub struct MessageReceiver {
    pub app: web::Data<App>,
    /// Where the caller gave an `Idempotency-Key`.
    pub request: Option<idempotency::Request>,
    pub verified: VerifiedIdentity,
    /// Checked again while an answer is waited for.
    pub credential: Arc<CheckedCredential>,
    pub speaker: Sender,
}

impl MessageReceiver {
    pub(in crate::http::v1) fn access(&self) -> Access {
        let speaker = &self.speaker;
        if self.verified.is_person() {
            Access::of_user(speaker.user_id, speaker.identity.clone())
        } else {
            Access::of_service(speaker.user_id, speaker.identity.clone())
        }
    }

    pub(in crate::http::v1) async fn begin(&self) -> Result<TenantTx> {
        self.verified.begin(&self.app.db).await
    }

    /// Others have read the text. Committed by itself: whatever becomes of the message, the code was seen.
    pub async fn void_codes(&self, text: &str) -> Result<()> {
        let mut tx = self.begin().await?;
        people::void_codes_in(&self.app, &mut tx, text).await?;
        tx.commit().await
    }

    /// Asks the agent.
    pub async fn ask(&self, message: &Message<'_>, input: TurnInput) -> Result<Taken> {
        let limit = message.agent.limits.tokens_per_minute;
        let tenant_id = self.verified.tenant_id();
        self.app.limits.check_tokens(tenant_id, limit).await?;
        let mut tx = self.begin().await?;
        if let Some(earlier) = self.find_earlier(&mut tx).await? {
            return self.replay(tx, earlier, message.waits).await;
        }
        if let Some(before) = inbound::claim(&self.app, &mut tx, &self.speaker, message).await? {
            return self.again(tx, before, message.waits).await;
        }
        self.accept(tx, message, input).await
    }

    /// The turn is accepted for who waits only if there is a connection for them.
    async fn accept(
        &self,
        mut tx: TenantTx,
        message: &Message<'_>,
        input: TurnInput,
    ) -> Result<Taken> {
        let connection = self.connection(message.waits)?;
        let accepted = inbound::ask(&self.app, &mut tx, &self.speaker, message, input).await?;
        self.note_turn(&mut tx, accepted.turn_id).await?;
        self.answer(tx, accepted, connection).await
    }

    /// Place among the connections of the tenant, for a caller who waits.
    fn connection(&self, waits: bool) -> Result<Option<Permit>> {
        if !waits {
            return Ok(None);
        }
        let tenant_id = self.verified.tenant_id();
        self.app.shares.connections(tenant_id, 1).map(Some)
    }

    /// What the first request with the same `Idempotency-Key` came to.
    async fn find_earlier(&self, tx: &mut TenantTx) -> Result<Option<EarlierResult>> {
        match &self.request {
            Some(request) => idempotency::find_earlier(&self.app, tx, request).await,
            None => Ok(None),
        }
    }

    async fn note_turn(&self, tx: &mut TenantTx, turn_id: TurnId) -> Result<()> {
        match &self.request {
            Some(request) => idempotency::note_turn(tx, request, turn_id).await,
            None => Ok(()),
        }
    }

    /// Commits, and answers what is no turn.
    async fn settle(
        &self,
        mut tx: TenantTx,
        status: StatusCode,
        response: &InboundResponse,
    ) -> Result<Taken> {
        if let Some(request) = &self.request {
            let answer = Answer::new(status.as_u16(), response)?;
            idempotency::note_answer(&self.app, &mut tx, request, &answer).await?;
        }
        tx.commit().await?;
        let answered = HttpResponse::build(status).json(response);
        Ok(Taken::Answered(answered))
    }

    /// Gives the first answer again: a turn's as it stands now.
    async fn replay(&self, tx: TenantTx, earlier: EarlierResult, waits: bool) -> Result<Taken> {
        let taken = match earlier {
            EarlierResult::Turn(turn_id) => self.attach(tx, turn_id, waits, false).await?,
            EarlierResult::Answer(answer) => {
                let status = StatusCode::from_u16(answer.status).map_err(Error::internal)?;
                Taken::Answered(HttpResponse::build(status).json(answer.into_body()))
            }
        };
        Ok(match taken {
            Taken::Answered(response) => Taken::Answered(replayed(response)),
            Taken::Waiting(mut waiting) => {
                waiting.is_replay = true;
                Taken::Waiting(waiting)
            }
        })
    }

    async fn answer(
        &self,
        tx: TenantTx,
        accepted: Accepted,
        connection: Option<Permit>,
    ) -> Result<Taken> {
        tx.commit().await?;
        let app = &self.app;
        let tenant_id = self.verified.tenant_id();
        let conversation_id = accepted.name.conversation_id;
        let shown = Shown {
            turn_id: accepted.turn_id,
            session_id: accepted.session_id,
            session_key: accepted.session_info.session_key.clone(),
            reset: accepted.session_info.reset.clone(),
            name: accepted.name,
            user_id: accepted.user_id.unwrap_or(self.speaker.user_id),
            duplicate: false,
        };
        let waits = connection.is_some();
        let ahead = turns::launch(app, tenant_id, conversation_id, accepted.disposition, waits);
        drop(accepted.accepting);
        let Some(connection) = connection else {
            return self.taken(shown).map(Taken::Answered);
        };
        let turn_id = shown.turn_id;
        let now = app.clock.now();
        Ok(Taken::Waiting(Box::new(Waiting {
            waiter: AnswerWaiter::new(app, tenant_id, conversation_id, turn_id, ahead),
            shown,
            until: Instant::now() + inbound::patience_left(now, now),
            is_replay: false,
            _connection: connection,
        })))
    }

    /// Answers a message that was taken before: as its first answer was, or will be.
    async fn again(&self, mut tx: TenantTx, before: Before, waits: bool) -> Result<Taken> {
        match before {
            Before::Turn(turn_id) => {
                self.note_turn(&mut tx, turn_id).await?;
                self.attach(tx, turn_id, waits, true).await
            }
            Before::Command(answer) => {
                let response = self.of_command(answer, true);
                self.settle(tx, StatusCode::OK, &response).await
            }
            Before::Nothing => {
                let response = self.of_nothing(true);
                self.settle(tx, StatusCode::ACCEPTED, &response).await
            }
        }
    }

    /// Answers with a turn that was accepted before.
    async fn attach(
        &self,
        mut tx: TenantTx,
        turn_id: TurnId,
        waits: bool,
        duplicate: bool,
    ) -> Result<Taken> {
        let now = self.app.clock.now();
        let before = inbound::find_before(&self.app, &mut tx, &self.speaker, turn_id).await?;
        let (turn, name) = before;
        let via = replies::find_via(&mut tx, turn_id).await?;
        let by_http = matches!(
            via,
            Some(ReplyVia::Waiting | ReplyVia::Returned | ReplyVia::Failed)
        );
        let connection = self.connection(waits && by_http)?;
        tx.commit().await?;
        let shown = Shown {
            turn_id,
            session_id: turn.session_id(),
            session_key: turn.session_info.session_key.clone(),
            reset: turn.session_info.reset.clone(),
            name,
            user_id: self.speaker.user_id,
            duplicate,
        };
        let Some(connection) = connection else {
            return self.taken(shown).map(Taken::Answered);
        };
        let app = &self.app;
        let tenant_id = self.verified.tenant_id();
        Ok(Taken::Waiting(Box::new(Waiting {
            waiter: AnswerWaiter::new(app, tenant_id, turn.conversation_id, turn_id, None),
            shown,
            until: Instant::now() + inbound::patience_left(turn.created_at, now),
            is_replay: false,
            _connection: connection,
        })))
    }

    fn of_nothing(&self, duplicate: bool) -> InboundResponse {
        InboundResponse {
            turn_id: None,
            session_key: None,
            session_id: None,
            conversation_id: None,
            user_id: self.speaker.user_id,
            reply: None,
            notices: Vec::new(),
            reset: None,
            offer: None,
            duplicate,
        }
    }

    fn of_command(&self, answer: CommandAnswer, duplicate: bool) -> InboundResponse {
        InboundResponse {
            session_key: answer.session_key,
            session_id: answer.session_id,
            conversation_id: answer.conversation_id,
            reply: Some(ReplyResponse { text: answer.text }),
            notices: answer.notices,
            reset: answer.reset,
            ..self.of_nothing(duplicate)
        }
    }

    pub async fn command(&self, mut message: Message<'_>, command: &Command) -> Result<Taken> {
        let private = message.chat.require_private().is_ok();
        if let (Command::Link(Link::Code(code)), true) = (command, private) {
            message.preview = Some(self.preview(code).await?);
        }
        let mut tx = self.begin().await?;
        if let Some(earlier) = self.find_earlier(&mut tx).await? {
            return self.replay(tx, earlier, message.waits).await;
        }
        if let Some(before) = inbound::claim(&self.app, &mut tx, &self.speaker, &message).await? {
            return self.again(tx, before, message.waits).await;
        }
        let done = inbound::command(&self.app, &mut tx, &self.speaker, &message, command).await?;
        match done {
            Done::Answered(answer, after) => {
                let response = self.of_command(*answer, false);
                let answered = self.settle(tx, StatusCode::OK, &response).await?;
                self.announce(after);
                Ok(answered)
            }
            Done::Again(input) => self.accept(tx, &message, input).await,
        }
    }

    /// Looks at a code in a transaction of its own, which is undone; an attempt is charged first.
    async fn preview(&self, code: &str) -> Result<Preview> {
        let credential = self.verified.credential();
        let id = self.speaker.identity.id;
        let looked = with_charged_attempt(&self.app, credential, id, async || {
            let mut tx = self.begin().await?;
            match inbound::preview(&self.app, &mut tx, &self.speaker, code).await? {
                Preview::Refused(Code::CodeNotFound) => {
                    Err(Error::new(Code::CodeNotFound, "no such code"))
                }
                preview @ (Preview::Joins(_) | Preview::Refused(_)) => Ok(preview),
            }
        })
        .await;
        match looked {
            Err(error) if error.code.status() < 500 => Ok(Preview::Refused(error.code)),
            looked => looked,
        }
    }

    fn announce(&self, after: After) {
        let live = &self.app.live;
        let tenant_id = self.verified.tenant_id();
        for (turn_id, node) in after.stopped {
            live.notify_turn(node, turn_id);
        }
        if after.delivers {
            live.notify_deliveries(tenant_id);
        }
        if let Some(next) = after.next {
            turns::start(&self.app, tenant_id, *next, None);
        }
    }

    pub async fn edit(&self, message: &Message<'_>) -> Result<Taken> {
        let text = match command::read(message.text) {
            Said::Text(text) => text,
            Said::Command(_) => message.text,
        };
        let input = inbound::input(message, text, &self.speaker)?;
        let mut tx = self.begin().await?;
        if let Some(earlier) = self.find_earlier(&mut tx).await? {
            return self.replay(tx, earlier, message.waits).await;
        }
        let turn_id = inbound::edit(&self.app, &mut tx, &self.speaker, message, &input).await?;
        let response = InboundResponse {
            turn_id,
            ..self.of_nothing(turn_id.is_some())
        };
        self.settle(tx, StatusCode::ACCEPTED, &response).await
    }

    /// What was not said to the agent is only known.
    pub async fn only_note(&self, message: &Message<'_>) -> Result<Taken> {
        let mut tx = self.begin().await?;
        if let Some(earlier) = self.find_earlier(&mut tx).await? {
            return self.replay(tx, earlier, message.waits).await;
        }
        let before = inbound::claim(&self.app, &mut tx, &self.speaker, message).await?;
        let response = self.of_nothing(before.is_some());
        self.settle(tx, StatusCode::ACCEPTED, &response).await
    }
}
