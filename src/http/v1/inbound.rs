//! `/v1/inbound`: the bridge's one call. Handles the waiting for an answer; what becomes of a message is in
//! `inbound`.

use std::time::Duration;

use actix_web::{HttpResponse, post, web};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tokio::time::Instant;

use crate::app::App;
use crate::domain::agent::{DEFAULT_AGENT, OnBusy};
use crate::domain::chat::Chat;
use crate::domain::command::{self, Command, Link, Said};
use crate::domain::delivery::{Address, ReplyVia};
use crate::domain::display_name::DisplayName;
use crate::domain::identity::IdentityName;
use crate::domain::inbound::{MAX_ATTACHMENTS, MAX_TEXT_CHARS};
use crate::domain::resource_name::ResourceName;
use crate::domain::session::ChainName;
use crate::domain::turn::{ToldReset, TurnInput};
use crate::domain::viewer::Viewer;
use crate::error::{Code, Error, FieldError, Result};
use crate::http::acting::find_present_user;
use crate::http::callers::Credential;
use crate::http::json_body::JsonBody;
use crate::http::v1::link_codes::guarded;
use crate::http::vouching::{Vouched, Voucher};
use crate::ids::{SessionId, TurnId, UserId};
use crate::inbound::{self, After, Before, CommandAnswer, Done, Message, Notice, Preview, Speaker};
use crate::store::{TenantTx, replies};
use crate::turns::{self, Accepted, Outcome, Waiter};

/// How often a caller who waits is checked again.
const CHECK_INTERVAL: Duration = Duration::from_secs(3);

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct InboundRequest {
    /// Who speaks; else the header `X-Throughline-Identity`, else the token's own account.
    pub identity: Option<IdentityName>,
    /// Where; their own direct chat if it is left out.
    pub chat: Option<Chat>,
    #[schema(max_length = 100_000)]
    pub text: String,
    /// Content parts as OpenAI has them: `{"type": "image_url", "image_url": {"url": …}}`.
    #[serde(default)]
    #[schema(max_items = 32, value_type = Vec<Object>)]
    pub attachments: Vec<Map<String, Value>>,
    /// The platform's id of the message: from the same sender in the same chat it is taken once.
    #[schema(min_length = 1, max_length = 256)]
    pub message_id: Option<String>,
    /// When it was sent.
    pub sent_at: Option<DateTime<Utc>>,
    /// The platform's id of the message that it answers.
    #[schema(min_length = 1, max_length = 256)]
    pub reply_to: Option<String>,
    /// How the sender is called in that chat.
    pub display_name: Option<DisplayName>,
    /// Whether the agent was spoken to: in a chat of several it does not answer where this is false.
    pub mentioned: Option<bool>,
    /// Whether this is a changed version of a message that was brought before.
    #[serde(default)]
    pub edit: bool,
    pub agent: Option<ResourceName>,
    pub on_busy: Option<OnBusy>,
    /// Whether the answer is waited for, up to 55 seconds; otherwise it becomes a delivery.
    #[serde(default = "yes")]
    #[schema(default = true)]
    pub wait: bool,
}

const fn yes() -> bool {
    true
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct InboundResponse {
    pub turn_id: Option<TurnId>,
    pub session_key: Option<String>,
    pub session_id: Option<String>,
    pub conversation_id: Option<String>,
    pub user_id: UserId,
    /// The answer; null where it comes as a delivery, or where there is none.
    pub reply: Option<ReplyResponse>,
    /// What the service itself has to say.
    pub notices: Vec<Notice>,
    pub reset: Option<ToldReset>,
    /// Always null: offers are not here yet.
    #[schema(value_type = Option<Object>)]
    pub offer: Option<()>,
    /// Whether the message was brought before.
    pub duplicate: bool,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct ReplyResponse {
    pub text: String,
}

/// Bring a message in: it is resolved, taken once, and answered by a command or by the agent.
#[utoipa::path(
    operation_id = "create_inbound",
    tag = "bridges",
    security(("api_key" = ["admin", "bridge"]), ("user_token" = [])),
    extensions(("x-acts-for" = json!("the named identity, or the token's user"))),
    request_body = InboundRequest,
    responses(
        (status = 200, description = "Answered", body = InboundResponse),
        (status = 202, description = "Taken; the answer comes as a delivery", body = InboundResponse),
        (status = 409, description = "The conversation is busy, and messages are not queued", body = crate::http::problem::Problem, content_type = "application/problem+json")
    )
)]
#[post("/inbound")]
pub async fn create_inbound(
    app: web::Data<App>,
    caller: Voucher,
    credential: Credential,
    body: JsonBody<InboundRequest>,
) -> Result<HttpResponse> {
    let request = body.value;
    check(&request)?;
    let vouched = caller.vouch(request.identity.clone(), request.chat.as_ref())?;
    let known = vouched.contact(&app).await?;
    let speaker = Speaker {
        identity: vouched.identity(&known),
        user_id: known.user_id,
        namespace: vouched.namespace(),
        principal: vouched.principal(),
        actor: vouched.actor(),
    };
    let chat = request.chat.clone().unwrap_or(Chat::DM);
    let address = Address::of(&chat, &speaker.identity.name);
    let name = request
        .agent
        .as_ref()
        .map_or(DEFAULT_AGENT, ResourceName::as_str);
    let tenant_id = vouched.tenant_id();
    let agent = app.models.find(tenant_id, name).await?;
    let agent = agent.ok_or_else(|| {
        let error = FieldError::new("/agent", "there is no such agent");
        Error::invalid(vec![error])
    })?;
    let attachments: Vec<Value> = request.attachments.into_iter().map(Value::Object).collect();
    let message = Message {
        chat: &chat,
        address: &address,
        text: &request.text,
        attachments: &attachments,
        message_id: request.message_id.as_deref(),
        sent_at: request.sent_at,
        display_name: request.display_name.as_ref().map(DisplayName::as_str),
        agent,
        on_busy: request.on_busy,
        waits: request.wait,
        preview: None,
    };
    let taking = Taking {
        app,
        vouched,
        credential,
        speaker,
    };
    if request.edit {
        return taking.edit(&message).await;
    }
    let silent = chat.require_private().is_err() && request.mentioned == Some(false);
    match command::read(message.text) {
        // A command is said to the service, whoever else is there.
        Said::Command(command) => taking.command(message, &command).await,
        Said::Text(_) if silent => taking.only_note(&message).await,
        Said::Text(text) => {
            let input = inbound::input(&message, text, &taking.speaker)?;
            taking.ask(&message, input).await
        }
    }
}

fn check(request: &InboundRequest) -> Result<()> {
    let mut errors = Vec::new();
    let mut wrong = |pointer: &str, detail: &str| errors.push(FieldError::new(pointer, detail));
    if request.text.chars().count() > MAX_TEXT_CHARS {
        wrong("/text", "must have at most 100000 characters");
    }
    if request.text.trim().is_empty() && request.attachments.is_empty() {
        wrong("/text", "says nothing, and there is no attachment");
    }
    if request.attachments.len() > MAX_ATTACHMENTS {
        wrong("/attachments", "must be at most 32");
    }
    for (member, value) in [
        ("/message_id", &request.message_id),
        ("/reply_to", &request.reply_to),
    ] {
        let fine = |id: &String| (1..=256).contains(&id.chars().count()) && !id.contains('\0');
        if value.as_ref().is_some_and(|id| !fine(id)) {
            wrong(member, "must have 1 to 256 characters");
        }
    }
    Error::check(errors)
}

/// A message on its way in.
struct Taking {
    app: web::Data<App>,
    vouched: Vouched,
    /// Checked again while an answer is waited for.
    credential: Credential,
    speaker: Speaker,
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

    /// Asks the agent, and waits for the answer if somebody does.
    async fn ask(&self, message: &Message<'_>, input: TurnInput) -> Result<HttpResponse> {
        let limit = message.agent.limits.tokens_per_minute;
        let tenant_id = self.vouched.tenant_id();
        self.app.limits.check_tokens(tenant_id, limit).await?;
        let mut tx = self.begin().await?;
        if let Some(before) = inbound::claim(&self.app, &mut tx, &self.speaker, message).await? {
            return self.again(tx, before, message.waits).await;
        }
        let accepted = inbound::ask(&self.app, &mut tx, &self.speaker, message, input).await?;
        self.answer(tx, accepted, message.waits).await
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
            if let Some(outcome) = waiter.wait(until.min(due)).await? {
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
        self.credential.check(&self.app).await?;
        match self.check_sender(turn_id).await {
            Err(error) if matches!(error.code, Code::Unavailable | Code::Timeout) => Ok(()),
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
        self.credential.check(&self.app).await?;
        let mut tx = self.begin().await?;
        let mine = replies::mark_told(&mut tx, shown.turn_id).await?;
        tx.commit().await?;
        if !mine {
            self.check_caller(shown.turn_id).await?;
            return self.taken(shown);
        }
        let (reply, notices) = match turns::text_of(outcome) {
            Ok(text) => {
                let text = text.to_owned();
                (Some(ReplyResponse { text }), Vec::new())
            }
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
        let turn_id = match before {
            Before::Turn(turn_id) => turn_id,
            Before::Command(answer) => {
                tx.commit().await?;
                return Ok(HttpResponse::Ok().json(self.of_command(answer, true)));
            }
            Before::Nothing => {
                tx.commit().await?;
                return Ok(HttpResponse::Accepted().json(self.of_nothing(true)));
            }
        };
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
            duplicate: true,
        };
        let by_http = matches!(via, Some(ReplyVia::Http | ReplyVia::Told));
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

    async fn command(&self, mut message: Message<'_>, command: &Command) -> Result<HttpResponse> {
        let private = message.chat.require_private().is_ok();
        if let (Command::Link(Link::Code(code)), true) = (command, private) {
            message.preview = Some(self.preview(code).await?);
        }
        let mut tx = self.begin().await?;
        if let Some(before) = inbound::claim(&self.app, &mut tx, &self.speaker, &message).await? {
            return self.again(tx, before, message.waits).await;
        }
        let done = inbound::command(&self.app, &mut tx, &self.speaker, &message, command).await?;
        match done {
            Done::Answered(answer, after) => {
                tx.commit().await?;
                self.finish(after);
                Ok(HttpResponse::Ok().json(self.of_command(*answer, false)))
            }
            Done::Again(input) => {
                let accepted =
                    inbound::ask(&self.app, &mut tx, &self.speaker, &message, input).await?;
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

    async fn edit(&self, message: &Message<'_>) -> Result<HttpResponse> {
        let text = match command::read(message.text) {
            Said::Text(text) => text,
            Said::Command(_) => message.text,
        };
        let input = inbound::input(message, text, &self.speaker)?;
        let mut tx = self.begin().await?;
        let turn_id = inbound::edit(&self.app, &mut tx, &self.speaker, message, &input).await?;
        tx.commit().await?;
        Ok(HttpResponse::Accepted().json(InboundResponse {
            turn_id,
            ..self.of_nothing(turn_id.is_some())
        }))
    }

    /// What was not said to the agent is only known.
    async fn only_note(&self, message: &Message<'_>) -> Result<HttpResponse> {
        let mut tx = self.begin().await?;
        let before = inbound::claim(&self.app, &mut tx, &self.speaker, message).await?;
        tx.commit().await?;
        Ok(HttpResponse::Accepted().json(self.of_nothing(before.is_some())))
    }
}
