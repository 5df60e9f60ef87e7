//! How a message that was brought in is answered: the waiting for an answer, the checks of who waits, and what a
//! repeated message gets.

use std::sync::Arc;
use std::time::Duration;

use actix_web::http::StatusCode;
use actix_web::http::header::{HeaderName, HeaderValue};
use actix_web::{HttpResponse, web};
use tokio::time::Instant;

use super::inbound::{InboundResponse, ReplyResponse};
use crate::app::App;
use crate::domain::command::{self, Command, Link, Said};
use crate::domain::delivery::ReplyVia;
use crate::domain::session::ChainName;
use crate::domain::turn::{ToldReset, TurnInput};
use crate::domain::viewer::Viewer;
use crate::error::{Code, Error, Result};
use crate::http::acting::find_present_user;
use crate::http::retry;
use crate::http::v1::link_codes::guarded;
use crate::http::vouching::Vouched;
use crate::idempotency::{self, Answer, Earlier};
use crate::ids::{SessionId, TurnId, UserId};
use crate::inbound::{self, After, Before, CommandAnswer, Done, Message, Notice, Preview, Speaker};
use crate::people;
use crate::store::{TenantTx, replies};
use crate::streams::CheckedCredential;
use crate::turns::{self, Accepted, Outcome, Waiter};

/// How often a caller who waits is checked again.
const CHECK_INTERVAL: Duration = Duration::from_secs(3);

/// A message on its way in.
pub struct Taking {
    pub app: web::Data<App>,
    /// Where the caller gave an `Idempotency-Key`.
    pub request: Option<idempotency::Request>,
    pub vouched: Vouched,
    /// Checked again while an answer is waited for.
    pub credential: Arc<CheckedCredential>,
    pub speaker: Speaker,
}

/// What is told of the turn's session.
struct Shown {
    turn_id: TurnId,
    name: ChainName,
    session_id: SessionId,
    session_key: Option<String>,
    reset: Option<ToldReset>,
    /// The sender's user when it was accepted.
    user_id: UserId,
    duplicate: bool,
}

impl Taking {
    fn viewer(&self) -> Viewer {
        let speaker = &self.speaker;
        match self.vouched.is_person() {
            true => Viewer::of_user(speaker.user_id, speaker.identity.clone()),
            false => Viewer::of_service(speaker.user_id, speaker.identity.clone()),
        }
    }

    async fn begin(&self) -> Result<TenantTx> {
        self.vouched.begin(&self.app.db).await
    }

    /// Others have read the text. Committed by itself: whatever becomes of the message, the code was seen.
    pub async fn void_codes(&self, text: &str) -> Result<()> {
        let mut tx = self.begin().await?;
        people::void_shown(&self.app, &mut tx, text).await?;
        tx.commit().await
    }

    /// Asks the agent, and waits for the answer if somebody does.
    pub async fn ask(&self, message: &Message<'_>, input: TurnInput) -> Result<HttpResponse> {
        let limit = message.agent.limits.tokens_per_minute;
        let tenant_id = self.vouched.tenant_id();
        self.app.limits.check_tokens(tenant_id, limit).await?;
        let mut tx = self.begin().await?;
        if let Some(earlier) = self.find_earlier(&mut tx).await? {
            return self.replay(tx, earlier, message.waits).await;
        }
        if let Some(before) = inbound::claim(&self.app, &mut tx, &self.speaker, message).await? {
            return self.again(tx, before, message.waits).await;
        }
        let accepted = inbound::ask(&self.app, &mut tx, &self.speaker, message, input).await?;
        self.note_turn(&mut tx, accepted.turn_id).await?;
        self.answer(tx, accepted, message.waits).await
    }

    /// What the first request with the same `Idempotency-Key` came to.
    async fn find_earlier(&self, tx: &mut TenantTx) -> Result<Option<Earlier>> {
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
    ) -> Result<HttpResponse> {
        if let Some(request) = &self.request {
            let answer = Answer::new(status.as_u16(), response)?;
            idempotency::note_answer(&self.app, &mut tx, request, &answer).await?;
        }
        tx.commit().await?;
        Ok(HttpResponse::build(status).json(response))
    }

    /// Gives the first answer again: a turn's as it stands now.
    async fn replay(&self, tx: TenantTx, earlier: Earlier, waits: bool) -> Result<HttpResponse> {
        let mut response = match earlier {
            Earlier::Turn(turn_id) => self.attach(tx, turn_id, waits, false).await?,
            Earlier::Answer(answer) => {
                let status = StatusCode::from_u16(answer.status).map_err(Error::internal)?;
                HttpResponse::build(status).json(answer.into_body())
            }
        };
        let (name, value) = retry::REPLAYED;
        let (name, value) = (
            HeaderName::from_static(name),
            HeaderValue::from_static(value),
        );
        response.headers_mut().insert(name, value);
        Ok(response)
    }

    async fn answer(&self, tx: TenantTx, accepted: Accepted, waits: bool) -> Result<HttpResponse> {
        tx.commit().await?;
        let (app, tenant_id) = (&self.app, self.vouched.tenant_id());
        let conversation_id = accepted.name.conversation_id;
        let shown = Shown {
            turn_id: accepted.turn_id,
            session_id: accepted.session_id,
            session_key: accepted.told.session_key.clone(),
            reset: accepted.told.reset.clone(),
            name: accepted.name,
            user_id: accepted.user_id.unwrap_or(self.speaker.user_id),
            duplicate: false,
        };
        let ahead = turns::launch(app, tenant_id, conversation_id, accepted.became, waits);
        drop(accepted.accepting);
        if !waits {
            return self.taken(shown);
        }
        let turn_id = shown.turn_id;
        let waiter = Waiter::new(app, tenant_id, conversation_id, turn_id, ahead);
        let now = app.clock.now();
        let until = Instant::now() + inbound::patience_left(now, now);
        self.wait(waiter, shown, until).await
    }

    /// Waits for the end of a turn, until the answer becomes a delivery.
    async fn wait(&self, mut waiter: Waiter, shown: Shown, until: Instant) -> Result<HttpResponse> {
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
        let becomes_delivery = replies::wait_no_longer(&mut tx, shown.turn_id).await?;
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
        let (identity_id, user_id) = (self.speaker.identity.id, self.speaker.user_id);
        let user_id = find_present_user(&mut tx, identity_id, user_id).await?;
        let speaker = Speaker {
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
        let mine = replies::mark_told(&mut tx, shown.turn_id).await?;
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

    fn taken(&self, shown: Shown) -> Result<HttpResponse> {
        Ok(HttpResponse::Accepted().json(self.render(&shown)))
    }

    fn render(&self, shown: &Shown) -> InboundResponse {
        let viewer = self.viewer();
        InboundResponse {
            turn_id: Some(shown.turn_id),
            session_key: shown.session_key.clone(),
            session_id: Some(shown.name.shown_link(shown.session_id, &viewer)),
            conversation_id: Some(shown.name.shown(&viewer)),
            user_id: shown.user_id,
            reply: None,
            notices: Vec::new(),
            reset: shown.reset.clone(),
            offer: None,
            duplicate: shown.duplicate,
        }
    }

    /// Answers a message that was taken before: as its first answer was, or will be.
    async fn again(&self, mut tx: TenantTx, before: Before, waits: bool) -> Result<HttpResponse> {
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
    ) -> Result<HttpResponse> {
        let now = self.app.clock.now();
        let before = inbound::find_before(&self.app, &mut tx, &self.speaker, turn_id).await?;
        let (turn, name) = before;
        let via = replies::find_via(&mut tx, turn_id).await?;
        tx.commit().await?;
        let shown = Shown {
            turn_id,
            session_id: turn.session_id(),
            session_key: turn.told.session_key.clone(),
            reset: turn.told.reset.clone(),
            name,
            user_id: self.speaker.user_id,
            duplicate,
        };
        let by_http = matches!(
            via,
            Some(ReplyVia::Http | ReplyVia::Told | ReplyVia::Failed)
        );
        if !waits || !by_http {
            return self.taken(shown);
        }
        let (app, tenant_id) = (&self.app, self.vouched.tenant_id());
        let waiter = Waiter::new(app, tenant_id, turn.conversation_id, turn_id, None);
        let until = Instant::now() + inbound::patience_left(turn.created_at, now);
        self.wait(waiter, shown, until).await
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

    pub async fn command(
        &self,
        mut message: Message<'_>,
        command: &Command,
    ) -> Result<HttpResponse> {
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
                self.finish(after);
                Ok(answered)
            }
            Done::Again(input) => {
                let accepted =
                    inbound::ask(&self.app, &mut tx, &self.speaker, &message, input).await?;
                self.note_turn(&mut tx, accepted.turn_id).await?;
                self.answer(tx, accepted, message.waits).await
            }
        }
    }

    /// Looks at a code in a transaction of its own, which is undone; an attempt is charged first.
    async fn preview(&self, code: &str) -> Result<Preview> {
        let (credential, id) = (self.vouched.credential(), self.speaker.identity.id);
        let looked = guarded(&self.app, credential, id, async || {
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

    fn finish(&self, after: After) {
        let (live, tenant_id) = (&self.app.live, self.vouched.tenant_id());
        for (turn_id, node) in after.stopped {
            live.poke_turn(node, turn_id);
        }
        if after.delivers {
            live.poke_deliveries(tenant_id);
        }
        if let Some(next) = after.next {
            turns::start(&self.app, tenant_id, *next, None);
        }
    }

    pub async fn edit(&self, message: &Message<'_>) -> Result<HttpResponse> {
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
    pub async fn only_note(&self, message: &Message<'_>) -> Result<HttpResponse> {
        let mut tx = self.begin().await?;
        if let Some(earlier) = self.find_earlier(&mut tx).await? {
            return self.replay(tx, earlier, message.waits).await;
        }
        let before = inbound::claim(&self.app, &mut tx, &self.speaker, message).await?;
        let response = self.of_nothing(before.is_some());
        self.settle(tx, StatusCode::ACCEPTED, &response).await
    }
}
