//! The operation behind `/v1/inbound`: takes a message once, and answers it with a command's result, a turn, or nothing.

use std::sync::Arc;

use super::response::InboundResponse;
use super::wait::{WaitingReply, deadline};
use super::{
    CommandResult, EarlierMessage, InboundMessage, InboundTurn, Preview, Sender, accept, claim,
    command, edit, find_earlier_turn, input, preview,
};
use crate::app::App;
use crate::auth::TenantCaller;
use crate::domain::bridge::command::{self as slash, Command, LinkCommand, ParsedText};
use crate::domain::bridge::delivery::ReplyVia;
use crate::domain::people::access::Access;
use crate::domain::turn::TurnInput;
use crate::error::{Code, Error, Result};
use crate::fair_queue::Permit;
use crate::idempotency::{self, Answer, EarlierResult, Outcome};
use crate::ids::{TenantId, TurnId};
use crate::people;
use crate::store::TenantTx;
use crate::store::bridge::replies;
use crate::streams::CheckedCredential;
use crate::turns::{self, AcceptedTurn, LiveUpdates, TurnStream};

/// A caller that brings messages in, and the sender it speaks for.
pub struct InboundCaller {
    pub app: App,
    pub caller: TenantCaller,
    /// Checked again while an answer is waited for.
    pub credential: Arc<CheckedCredential>,
    pub sender: Sender,
    /// Where the caller gave an `Idempotency-Key`.
    pub idempotency: Option<idempotency::Request>,
}

/// The result of a message.
pub enum Received {
    Answered(Outcome),
    /// The caller waits for the turn's answer: `finish` it.
    Waiting(Box<WaitingReply>),
}

/// Takes a message in. Nothing of the message is needed to wait for its answer.
pub async fn receive(caller: &InboundCaller, message: InboundMessage<'_>) -> Result<Received> {
    let is_public = message.chat.require_private().is_err();
    if is_public {
        caller.void_codes(message.text).await?;
    }
    if message.is_edit {
        return caller.edit(&message).await;
    }
    match slash::parse(message.text) {
        // A command is for the service, whoever else was mentioned.
        ParsedText::Command(command) => caller.run_command(message, &command).await,
        ParsedText::Text(_) if is_public && message.mentioned == Some(false) => {
            caller.note(&message).await
        }
        ParsedText::Text(text) => {
            let input = input(&message, text, &caller.sender)?;
            caller.ask(&message, input).await
        }
    }
}

impl Received {
    /// Waits for the answer where there is one to wait for.
    pub async fn finish(self, caller: &InboundCaller) -> Result<Outcome> {
        match self {
            Self::Answered(outcome) => Ok(outcome),
            Self::Waiting(waiting) => waiting.finish(caller).await,
        }
    }
}

impl InboundCaller {
    pub(super) fn tenant_id(&self) -> TenantId {
        self.caller.tenant_id()
    }

    pub(super) async fn begin(&self) -> Result<TenantTx> {
        self.caller.begin(&self.app.db).await
    }

    /// The rights with which ids are shown to the caller.
    pub(super) fn access(&self) -> Access {
        let user_id = self.sender.user_id;
        let identity = self.sender.identity.clone();
        match self.caller {
            TenantCaller::User(_) => Access::of_user(user_id, identity),
            TenantCaller::Key(_) => Access::of_service(user_id, identity),
        }
    }

    /// Others have read the text. Committed by itself: whatever becomes of the message, its codes were seen.
    async fn void_codes(&self, text: &str) -> Result<()> {
        let mut tx = self.begin().await?;
        people::void_codes_in(&self.app, &mut tx, text).await?;
        tx.commit().await
    }

    /// Lets the agent answer.
    async fn ask(&self, message: &InboundMessage<'_>, input: TurnInput) -> Result<Received> {
        let limit = message.agent.limits.tokens_per_minute;
        // Before the transaction: the limiter may wait for Redis.
        self.app
            .limits
            .check_tokens(self.tenant_id(), limit)
            .await?;
        let mut tx = self.begin().await?;
        if let Some(earlier) = self.find_earlier(&mut tx).await? {
            return self.replay(tx, earlier, message.waits).await;
        }
        if let Some(earlier) = claim(&self.app, &mut tx, &self.sender, message).await? {
            return self.answer_duplicate(tx, earlier, message.waits).await;
        }
        self.accept(tx, message, input).await
    }

    /// Accepts a turn; for a caller that waits, only if there is a connection for it.
    async fn accept(
        &self,
        mut tx: TenantTx,
        message: &InboundMessage<'_>,
        input: TurnInput,
    ) -> Result<Received> {
        let connection = self.connection(message.waits)?;
        let accepted = accept(&self.app, &mut tx, &self.sender, message, input).await?;
        self.note_turn(&mut tx, accepted.turn_id).await?;
        tx.commit().await?;
        let updates = if connection.is_some() {
            LiveUpdates::Subscribe
        } else {
            LiveUpdates::Ignore
        };
        let app = &self.app;
        let tenant_id = self.tenant_id();
        let (turn, live) = turns::launch(app, tenant_id, accepted, updates);
        let inbound = InboundTurn {
            user_id: turn.user_id.unwrap_or(self.sender.user_id),
            is_duplicate: false,
            turn: turn.clone(),
        };
        let Some(connection) = connection else {
            return self.accepted(&inbound).map(Received::Answered);
        };
        let now = app.clock.now();
        Ok(Received::Waiting(Box::new(WaitingReply {
            stream: TurnStream::new(app, tenant_id, turn, live, 0),
            inbound,
            until: deadline(now, now),
            is_replay: false,
            _connection: connection,
        })))
    }

    /// The answer to a caller whose turn's answer comes as a delivery.
    pub(super) fn accepted(&self, inbound: &InboundTurn) -> Result<Outcome> {
        let response = InboundResponse::of_turn(inbound, &self.access());
        Ok(Outcome::Fresh(Answer::new(202, &response)?))
    }

    /// A place among the connections of the tenant, for a caller that waits.
    fn connection(&self, waits: bool) -> Result<Option<Permit>> {
        if !waits {
            return Ok(None);
        }
        self.app.shares.connections(self.tenant_id(), 1).map(Some)
    }

    /// What the first request with the same `Idempotency-Key` came to.
    async fn find_earlier(&self, tx: &mut TenantTx) -> Result<Option<EarlierResult>> {
        match &self.idempotency {
            Some(request) => idempotency::find_earlier(&self.app, tx, request).await,
            None => Ok(None),
        }
    }

    async fn note_turn(&self, tx: &mut TenantTx, turn_id: TurnId) -> Result<()> {
        match &self.idempotency {
            Some(request) => idempotency::note_turn(tx, request, turn_id).await,
            None => Ok(()),
        }
    }

    /// Commits a message without a turn, and its answer.
    async fn settle(
        &self,
        mut tx: TenantTx,
        status: u16,
        response: &InboundResponse,
    ) -> Result<Received> {
        let answer = Answer::new(status, response)?;
        if let Some(request) = &self.idempotency {
            idempotency::note_answer(&self.app, &mut tx, request, &answer).await?;
        }
        tx.commit().await?;
        Ok(Received::Answered(Outcome::Fresh(answer)))
    }

    /// Answers a request with the same `Idempotency-Key` as its first try; a turn's answer as it stands now.
    async fn replay(&self, tx: TenantTx, earlier: EarlierResult, waits: bool) -> Result<Received> {
        let received = match earlier {
            EarlierResult::Turn(turn_id) => self.attach(tx, turn_id, waits, false).await?,
            EarlierResult::Answer(answer) => {
                tx.end().await?;
                Received::Answered(Outcome::Fresh(answer))
            }
        };
        Ok(match received {
            Received::Answered(outcome) => Received::Answered(outcome.replayed()),
            Received::Waiting(mut waiting) => {
                waiting.is_replay = true;
                Received::Waiting(waiting)
            }
        })
    }

    /// Answers a second copy of a message: as its first answer was, or will be.
    async fn answer_duplicate(
        &self,
        mut tx: TenantTx,
        earlier: EarlierMessage,
        waits: bool,
    ) -> Result<Received> {
        let user_id = self.sender.user_id;
        match earlier {
            EarlierMessage::Turn(turn_id) => {
                self.note_turn(&mut tx, turn_id).await?;
                self.attach(tx, turn_id, waits, true).await
            }
            EarlierMessage::Command(answer) => {
                let response = InboundResponse::of_command(answer, user_id, true);
                self.settle(tx, 200, &response).await
            }
            EarlierMessage::Unanswered => {
                let response = InboundResponse::empty(user_id, true);
                self.settle(tx, 202, &response).await
            }
        }
    }

    /// Answers with a turn that was accepted before.
    async fn attach(
        &self,
        mut tx: TenantTx,
        turn_id: TurnId,
        waits: bool,
        is_duplicate: bool,
    ) -> Result<Received> {
        let app = &self.app;
        let now = app.clock.now();
        let (turn, name) = find_earlier_turn(app, &mut tx, &self.sender, turn_id).await?;
        let via = replies::find_via(&mut tx, turn_id).await?;
        let is_returned = matches!(
            via,
            Some(ReplyVia::Waiting | ReplyVia::Returned | ReplyVia::Failed)
        );
        let connection = self.connection(waits && is_returned)?;
        tx.commit().await?;
        let accepted = AcceptedTurn {
            id: turn_id,
            name,
            session_id: turn.session_id(),
            session_info: turn.session_info.clone(),
            user_id: Some(self.sender.user_id),
            is_replay: true,
        };
        let inbound = InboundTurn {
            user_id: self.sender.user_id,
            is_duplicate,
            turn: accepted.clone(),
        };
        let Some(connection) = connection else {
            return self.accepted(&inbound).map(Received::Answered);
        };
        Ok(Received::Waiting(Box::new(WaitingReply {
            stream: TurnStream::new(app, self.tenant_id(), accepted, None, 0),
            inbound,
            until: deadline(turn.created_at, now),
            is_replay: false,
            _connection: connection,
        })))
    }

    async fn run_command(
        &self,
        mut message: InboundMessage<'_>,
        slash: &Command,
    ) -> Result<Received> {
        if let Command::Link(LinkCommand::Code(code)) = slash
            && message.chat.require_private().is_ok()
        {
            message.preview = Some(self.preview(code).await?);
        }
        let mut tx = self.begin().await?;
        if let Some(earlier) = self.find_earlier(&mut tx).await? {
            return self.replay(tx, earlier, message.waits).await;
        }
        if let Some(earlier) = claim(&self.app, &mut tx, &self.sender, &message).await? {
            return self.answer_duplicate(tx, earlier, message.waits).await;
        }
        match command(&self.app, &mut tx, &self.sender, &message, slash).await? {
            CommandResult::Answered(answer, next) => {
                let user_id = self.sender.user_id;
                let response = InboundResponse::of_command(*answer, user_id, false);
                let received = self.settle(tx, 200, &response).await?;
                if let Some(next) = next {
                    turns::start(&self.app, self.tenant_id(), *next, None);
                }
                Ok(received)
            }
            CommandResult::AskAgain(input) => self.accept(tx, &message, input).await,
        }
    }

    /// What a code would do, found in a transaction of its own, which is rolled back. An attempt is charged first.
    async fn preview(&self, code: &str) -> Result<Preview> {
        let identity_id = self.sender.identity.id;
        let charged =
            people::with_charged_attempt(&self.app, &self.caller, identity_id, async || {
                let mut tx = self.begin().await?;
                match preview(&self.app, &mut tx, &self.sender, code).await? {
                    Preview::Refused(Code::CodeNotFound) => {
                        Err(Error::new(Code::CodeNotFound, "no such code"))
                    }
                    preview @ (Preview::Joins(_) | Preview::Refused(_)) => Ok(preview),
                }
            });
        match charged.await {
            Err(error) if error.code.status() < 500 => Ok(Preview::Refused(error.code)),
            preview => preview,
        }
    }

    async fn edit(&self, message: &InboundMessage<'_>) -> Result<Received> {
        let text = match slash::parse(message.text) {
            ParsedText::Text(text) => text,
            ParsedText::Command(_) => message.text,
        };
        let input = input(message, text, &self.sender)?;
        let mut tx = self.begin().await?;
        if let Some(earlier) = self.find_earlier(&mut tx).await? {
            return self.replay(tx, earlier, message.waits).await;
        }
        let turn_id = edit(&self.app, &mut tx, &self.sender, message, &input).await?;
        let response = InboundResponse {
            turn_id,
            ..InboundResponse::empty(self.sender.user_id, turn_id.is_some())
        };
        self.settle(tx, 202, &response).await
    }

    /// Takes a message of a group that was not for the agent: it gets no answer.
    async fn note(&self, message: &InboundMessage<'_>) -> Result<Received> {
        let mut tx = self.begin().await?;
        if let Some(earlier) = self.find_earlier(&mut tx).await? {
            return self.replay(tx, earlier, message.waits).await;
        }
        let earlier = claim(&self.app, &mut tx, &self.sender, message).await?;
        let response = InboundResponse::empty(self.sender.user_id, earlier.is_some());
        self.settle(tx, 202, &response).await
    }
}
