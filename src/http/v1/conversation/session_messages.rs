//! `/v1/sessions/{id}/messages`: read a transcript, and append to it.

use actix_web::{HttpResponse, get, post, web};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::app::App;
use crate::domain::conversation::message::{
    Content, Message, MessageKind, NewMessage, Role, ToolCall,
};
use crate::domain::conversation::message_extra::Extra;
use crate::domain::conversation::session::{ConversationHandle, Permission};
use crate::domain::conversation::session_name::SessionRef;
use crate::domain::people::access::Access;
use crate::error::{Error, FieldError, Result};
use crate::http::auth::conversation::{ConversationReader, ConversationWriter};
use crate::http::request::extract::{PathSession, Query};
use crate::http::request::idempotency_key::IdempotencyKey;
use crate::http::request::json_body::LargeJsonBody;
use crate::http::request::paging::{ListName, ListResponse};
use crate::http::request::precondition::{IfMatch, etag};
use crate::idempotency::Answer;
use crate::ids::{SessionId, TurnId};
use crate::sessions::{self, AppendResult};
use crate::store;
use crate::store::conversation::messages::Order;

#[derive(Debug, Clone, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewMessageRequest {
    /// Only admin and chat keys may write other roles than `user`.
    pub role: Role,
    pub content: Option<Content>,
    /// Only for the role `assistant`.
    #[schema(min_items = 1, max_items = 128)]
    pub tool_calls: Option<Vec<ToolCall>>,
    /// Only for the role `tool`: the call it answers.
    #[schema(min_length = 1, max_length = 256)]
    pub tool_call_id: Option<String>,
    /// Only for the role `user`: the author's name, which the model receives.
    #[schema(min_length = 1, max_length = 256)]
    pub name: Option<String>,
    /// The client's count; estimated if absent.
    #[schema(maximum = 10_000_000)]
    pub token_count: Option<u32>,
}

impl From<NewMessageRequest> for NewMessage {
    fn from(request: NewMessageRequest) -> Self {
        let extra = Extra {
            name: request.name,
            ..Extra::default()
        };
        Self {
            role: request.role,
            kind: MessageKind::Normal,
            content: request.content,
            tool_calls: request.tool_calls,
            tool_call_id: request.tool_call_id,
            token_count: request.token_count,
            extra: extra.non_empty(),
        }
    }
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct MessageResponse {
    /// The session that holds the message.
    pub session_id: String,
    /// Counts without a gap within its session.
    pub seq: i64,
    pub role: Role,
    pub kind: MessageKind,
    #[schema(value_type = Option<Content>)]
    pub content: Option<Box<RawValue>>,
    #[schema(value_type = Option<Vec<ToolCall>>)]
    pub tool_calls: Option<Box<RawValue>>,
    pub tool_call_id: Option<String>,
    /// The author's name, as the client sent it.
    pub name: Option<String>,
    /// The model's reasoning, if its provider returns it. It is not sent to a model.
    pub reasoning_content: Option<String>,
    /// The sender: `platform:external_id`.
    pub identity: Option<String>,
    pub platform: Option<String>,
    pub token_count: i32,
    pub turn_id: Option<TurnId>,
    /// The original, if the message is a copy.
    pub copied_from: Option<CopiedFrom>,
    pub created_at: DateTime<Utc>,
    /// When `/undo` removed it: it keeps its number, and is not sent to a model.
    pub undone_at: Option<DateTime<Utc>>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct CopiedFrom {
    pub session_id: String,
    pub seq: i64,
}

impl MessageResponse {
    pub fn new(message: Message, chain: &ConversationHandle, access: &Access) -> Self {
        let public_id = |id: SessionId| chain.public_session_id(id, access);
        let extra = message.extra.map_or_else(Extra::default, |extra| *extra);
        Self {
            session_id: public_id(message.session_id),
            seq: message.seq,
            role: message.role,
            kind: message.kind,
            content: message.content,
            tool_calls: message.tool_calls,
            tool_call_id: message.tool_call_id,
            name: extra.name,
            reasoning_content: extra.reasoning_content,
            identity: message.identity,
            platform: message.platform,
            token_count: message.token_count,
            turn_id: message.turn_id,
            copied_from: message.copied_from.map(|(id, seq)| CopiedFrom {
                session_id: public_id(id),
                seq,
            }),
            created_at: message.created_at,
            undone_at: message.undone_at,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// The messages of one session, as a model receives them: the summary, the kept messages, and all later ones.
    #[default]
    Session,
    /// Each original message of the whole chain once, and the summaries, marked by their `kind`.
    Conversation,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum OrderParam {
    #[default]
    Asc,
    /// Newest first; for one session only.
    Desc,
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListMessagesParams {
    /// Read the named session itself, and not the tip of its chain.
    #[serde(default)]
    #[param(default = false)]
    exact: bool,
    #[serde(default)]
    #[param(inline)]
    scope: Scope,
    #[serde(default)]
    #[param(inline)]
    order: OrderParam,
    limit: Option<u32>,
    cursor: Option<String>,
}

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AppendMessagesRequest {
    /// Written in this order, all or none.
    #[schema(min_items = 1, max_items = 1000)]
    pub messages: Vec<NewMessageRequest>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct AppendedResponse {
    /// The tip, which has the messages.
    pub session_id: String,
    pub messages: Vec<MessageResponse>,
}

/// The appended messages as they are stored.
pub fn appended_messages(
    appended: &AppendResult,
    messages: &[NewMessage],
    access: &Access,
    now: DateTime<Utc>,
) -> Result<Vec<MessageResponse>> {
    let raw = |json: serde_json::Result<String>| {
        json.and_then(RawValue::from_string)
            .map_err(Error::internal)
    };
    messages
        .iter()
        .zip(appended.first_seq..)
        .map(|(message, seq)| {
            let sender = access
                .sender
                .as_ref()
                .filter(|_| message.role == Role::User);
            Ok(MessageResponse {
                session_id: appended
                    .tip
                    .name
                    .public_session_id(appended.tip.session_id, access),
                seq,
                role: message.role,
                kind: message.kind,
                content: message
                    .content
                    .as_ref()
                    .map(|content| raw(serde_json::to_string(content)))
                    .transpose()?,
                tool_calls: message
                    .tool_calls
                    .as_ref()
                    .map(|calls| raw(serde_json::to_string(calls)))
                    .transpose()?,
                tool_call_id: message.tool_call_id.clone(),
                name: message.name().map(str::to_owned),
                reasoning_content: None,
                identity: sender.map(|sender| sender.name.to_string()),
                platform: sender.map(|sender| sender.name.platform().to_string()),
                token_count: message.tokens(),
                turn_id: None,
                copied_from: None,
                created_at: now,
                undone_at: None,
            })
        })
        .collect()
}

/// List the messages of a session, or of a whole chain.
#[utoipa::path(
    operation_id = "list_messages",
    tag = "sessions",
    security(("api_key" = ["admin", "read", "bridge", "chat"]), ("user_token" = [])),
    params(("id" = inline(SessionRef), Path, description = "Any id of the chain"), ListMessagesParams),
    responses(
        (status = 200, description = "A page; the ETag is the tip's last seq", body = ListResponse<MessageResponse>),
        (status = 422, description = "The parameters do not go together", body = crate::http::response::problem::Problem, content_type = "application/problem+json")
    )
)]
#[get("/sessions/{id}/messages")]
pub async fn list_messages(
    app: web::Data<App>,
    caller: ConversationReader,
    PathSession(id): PathSession,
    Query(params): Query<ListMessagesParams>,
) -> Result<HttpResponse> {
    let whole = params.scope == Scope::Conversation;
    if whole && (params.exact || params.order == OrderParam::Desc) {
        let detail =
            "a whole conversation is read from its beginning, without exact and order=desc";
        return Err(Error::invalid(vec![FieldError::new(
            "/query/scope",
            detail,
        )]));
    }
    let (context, mut tx) = caller.begin(&app, None).await?;
    let access = &context.access;
    let now = app.clock.now();
    let tip = sessions::find(&mut tx, access, &id, Permission::Participate, now).await?;
    let session_id = if params.exact {
        tip.requested_id
    } else {
        tip.session_id
    };
    let listed_id = if whole {
        tip.name.conversation_id
    } else {
        session_id
    };
    let list = format!("messages/{listed_id}/{:?}/{:?}", params.scope, params.order);
    let name = ListName::for_context(&context, list);
    let render = |message: Message| MessageResponse::new(message, &tip.name, access);
    let limit = params.limit;
    let cursor = params.cursor.as_deref();
    let response = if whole {
        let page = name.open(&app.keyring, limit, cursor)?;
        let page =
            store::conversation::messages::list_conversation(&mut tx, listed_id, &page).await?;
        name.close(&app.keyring, page, |(_, message)| render(message))?
    } else {
        let order = match params.order {
            OrderParam::Asc => Order::OldestFirst,
            OrderParam::Desc => Order::NewestFirst,
        };
        let page = name.open(&app.keyring, limit, cursor)?;
        let page = store::conversation::messages::list(&mut tx, session_id, order, &page).await?;
        name.close(&app.keyring, page, render)?
    };
    sessions::audit_read(&app, &mut tx, &context.actor(), access, &tip).await?;
    tx.commit().await?;
    let etag = etag(tip.last_seq());
    Ok(HttpResponse::Ok().insert_header(etag).json(response))
}

/// Append messages to the tip of a chain, whichever of its ids is named.
#[utoipa::path(
    operation_id = "append_messages",
    tag = "sessions",
    security(("api_key" = ["admin", "bridge", "chat"]), ("user_token" = [])),
    params(
        ("id" = inline(SessionRef), Path, description = "Any id of the chain"),
        ("If-Match" = Option<String>, Header, description = "The expected last seq", max_length = 32, pattern = r#"^(\*|"?[0-9]+"?)$"#)
    ),
    request_body = AppendMessagesRequest,
    responses(
        (status = 201, description = "Written; the ETag is the new last seq", body = AppendedResponse),
        (status = 412, description = "There are newer messages", body = crate::http::response::problem::Problem, content_type = "application/problem+json")
    )
)]
#[post("/sessions/{id}/messages")]
pub async fn append_messages(
    app: web::Data<App>,
    caller: ConversationWriter,
    PathSession(id): PathSession,
    IfMatch(expected_last): IfMatch,
    retryable: IdempotencyKey,
    body: LargeJsonBody<AppendMessagesRequest>,
) -> Result<HttpResponse> {
    let context = caller.context(&app, None).await?;
    let access = &context.access;
    let messages: Vec<NewMessage> = body
        .value
        .messages
        .into_iter()
        .map(NewMessage::from)
        .collect();
    let tx = context.begin(&app.db).await?;
    let mut last_seq = None;
    let mut response = retryable
        .answer(&app, tx, context.principal(), body.hash, async |tx| {
            let now = app.clock.now();
            let appended = sessions::append(tx, access, &id, &messages, expected_last, now).await?;
            last_seq = Some(appended.first_seq + messages.len() as i64 - 1);
            let response = AppendedResponse {
                session_id: appended
                    .tip
                    .name
                    .public_session_id(appended.tip.session_id, access),
                messages: appended_messages(&appended, &messages, access, now)?,
            };
            Answer::new(201, &response)
        })
        .await?;
    if let Some(last_seq) = last_seq {
        let (name, value) = etag(last_seq);
        response.headers_mut().insert(name, value);
    }
    Ok(response)
}
