//! `/v1/inbound`: the bridge's one call.

use actix_web::{HttpResponse, post, web};
use chrono::{DateTime, Utc};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::agent_runtime::AgentMember;
use crate::app::App;
use crate::domain::bridge::chat::Chat;
use crate::domain::bridge::delivery::Address;
use crate::domain::bridge::inbound::{MAX_ATTACHMENTS, MAX_TEXT_CHARS};
use crate::domain::people::display_name::{DisplayName, without_misleading};
use crate::domain::people::identity::IdentityName;
use crate::domain::tenant::agent::{DEFAULT_AGENT, OnBusy};
use crate::domain::values::resource_name::ResourceName;
use crate::error::{Error, FieldError, Result};
use crate::http::auth::credential::RawCredential;
use crate::http::auth::identity::{Claim, IdentityCaller};
use crate::http::request::idempotency_key::{self, IdempotencyKey};
use crate::http::request::json_body::LargeJsonBody;
use crate::http::response::problem::Problem;
use crate::inbound::{self, InboundCaller, InboundMessage, InboundResponse, Sender};

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
    /// How the sender is called in that chat. Characters that turn the reading direction around are left out.
    #[serde(default, deserialize_with = "without_misleading")]
    #[schema(
        value_type = Option<String>, min_length = 1, max_length = 100,
        pattern = r"^(?=.*\S)[^\u0000-\u001f\u007f-\u009f\u2028\u2029]+$"
    )]
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
        (status = 409, description = "The conversation is busy, and messages are not queued", body = Problem, content_type = "application/problem+json")
    )
)]
#[post("/inbound")]
pub async fn create_inbound(
    app: web::Data<App>,
    caller: IdentityCaller,
    credential: RawCredential,
    idempotency_key: IdempotencyKey,
    body: LargeJsonBody<InboundRequest>,
) -> Result<HttpResponse> {
    let mut request = body.value;
    check(&request)?;
    let display_name = request.display_name.as_ref().map(DisplayName::as_str);
    let verified = caller.vouch(Claim {
        identity: request.identity.clone(),
        chat: request.chat.as_ref(),
        display_name,
    })?;
    let owner = verified.contact(&app).await?;
    let sender = Sender {
        identity: verified.identity(&owner),
        user_id: owner.user_id,
        namespace: verified.namespace(),
        principal: verified.principal(),
        actor: verified.actor(),
    };
    let agent = request
        .agent
        .as_ref()
        .map_or(DEFAULT_AGENT, ResourceName::as_str);
    let agent = app
        .models
        .get(verified.tenant_id(), agent, AgentMember::Agent);
    let agent = agent.await?;
    let attachments = std::mem::take(&mut request.attachments);
    let attachments: Vec<Value> = attachments.into_iter().map(Value::Object).collect();
    let chat = request.chat.clone().unwrap_or(Chat::DM);
    let message = InboundMessage {
        chat: &chat,
        address: &Address::of(&chat, &sender.identity.name),
        text: &request.text,
        attachments: &attachments,
        message_id: request.message_id.as_deref(),
        sent_at: request.sent_at,
        display_name,
        agent,
        on_busy: request.on_busy,
        mentioned: request.mentioned,
        is_edit: request.edit,
        waits: request.wait,
        preview: None,
    };
    let caller = InboundCaller {
        app: app.as_ref().clone(),
        credential: credential.share(&app),
        idempotency: idempotency_key.request(verified.principal(), body.hash),
        caller: verified.into_caller(),
        sender,
    };
    let received = inbound::receive(&caller, message).await?;
    // The model is waited for without the message, and so without the room for it.
    drop((request, attachments, body.memory));
    idempotency_key::render(received.finish(&caller).await?)
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
