//! `/v1/sessions`: create, list, get, update and delete sessions. Every id of a chain names it.

use actix_web::{HttpResponse, delete, get, patch, post, web};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use super::session_messages::NewMessageRequest;
use crate::app::App;
use crate::domain::conversation::message::{MAX_MESSAGES, NewMessage};
use crate::domain::conversation::session::{Edge, EndReason, Permission, Session, SessionState};
use crate::domain::conversation::session_name::{
    ClientSessionId, SessionKey, SessionRef, session_key_not_found,
};
use crate::domain::people::access::Access;
use crate::domain::people::display_name::DisplayName;
use crate::domain::people::identity::UserName;
use crate::domain::values::resource_name::ResourceName;
use crate::error::Result;
use crate::http::auth::conversation::{ConversationReader, ConversationWriter};
use crate::http::request::extract::{PathSession, Query, given};
use crate::http::request::idempotency_key::IdempotencyKey;
use crate::http::request::json_body::{JsonBody, LargeJsonBody};
use crate::http::request::paging::{ListName, ListResponse};
use crate::http::request::precondition::etag;
use crate::idempotency::Answer;
use crate::ids::{SessionId, UserId};
use crate::sessions::{self, NewSession};
use crate::store::conversation::conversations::{Change, Filter};
use crate::store::{self, TenantTx};

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct SessionResponse {
    /// `ses_…`, or the client's own id.
    pub id: String,
    /// The session key it was created under.
    pub session_key: Option<String>,
    pub user_id: Option<UserId>,
    pub agent: String,
    /// The id of the chain's first session.
    pub conversation_id: String,
    pub parent_id: Option<String>,
    /// How it was derived from its parent.
    pub edge: Option<Edge>,
    pub state: SessionState,
    pub end_reason: Option<EndReason>,
    pub title: Option<String>,
    /// The number of compressions before it.
    pub depth: i32,
    /// Whether it is current in a session key; in a list with `session_key`, whether it is current in that one.
    pub current: bool,
    /// Without the copies of a compression.
    pub message_count: i64,
    /// The tokens of its whole transcript.
    pub token_count: i64,
    pub created_at: DateTime<Utc>,
    pub last_active_at: DateTime<Utc>,
    pub ended_at: Option<DateTime<Utc>>,
    pub archived: bool,
    pub pinned: bool,
}

impl SessionResponse {
    pub fn new(session: Session, access: &Access) -> Self {
        Self {
            id: session.name.public_session_id(session.id, access),
            conversation_id: session.name.public_id(access),
            parent_id: session.parent.map(|parent| parent.public_id(access)),
            session_key: session.owner.session_key,
            user_id: session.owner.user_id,
            agent: session.agent,
            edge: session.edge,
            state: session.state,
            end_reason: session.end_reason,
            title: session.title,
            depth: session.depth,
            current: session.current,
            message_count: session.message_count,
            token_count: session.token_count,
            created_at: session.created_at,
            last_active_at: session.last_active_at,
            ended_at: session.ended_at,
            archived: session.archived,
            pinned: session.pinned,
        }
    }
}

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateSessionRequest {
    /// The client's own id, unique for ever. It must not look like an id of the service.
    #[schema(min_length = 1, max_length = 256, pattern = "^[!-~]+$")]
    pub id: Option<String>,
    /// The session key of the session. A new key is created, and gets the session as its current one.
    #[schema(min_length = 1, max_length = 256, pattern = "^[!-~]+$")]
    pub session_key: Option<String>,
    /// Default: `main`.
    pub agent: Option<ResourceName>,
    /// The owner of the session: `usr_…`, `platform:external_id`, or `me` with a user token.
    pub user: Option<UserName>,
    pub title: Option<DisplayName>,
    #[serde(default)]
    #[schema(max_items = 1000)]
    pub messages: Vec<NewMessageRequest>,
}

const _: () = assert!(MAX_MESSAGES == 1000);

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListSessionsParams {
    /// Only sessions of this user.
    user_id: Option<UserId>,
    /// Only sessions created under this key, or switched to by it.
    #[param(min_length = 1, max_length = 256, pattern = "^[!-~]+$")]
    session_key: Option<String>,
    agent: Option<ResourceName>,
    state: Option<SessionState>,
    archived: Option<bool>,
    limit: Option<u32>,
    cursor: Option<String>,
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ExactParams {
    /// Read the named session itself, and not the tip of its chain.
    #[serde(default)]
    #[param(default = false)]
    pub exact: bool,
}

/// Absent members stay as they are; a title of null is removed. A change holds for the whole chain.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct UpdateSessionRequest {
    #[serde(default, deserialize_with = "given")]
    #[schema(value_type = Option<DisplayName>)]
    pub title: Option<Option<DisplayName>>,
    pub archived: Option<bool>,
    pub pinned: Option<bool>,
}

/// Renders a link that the caller may see.
pub async fn session_response(
    tx: &mut TenantTx,
    access: &Access,
    id: SessionId,
) -> Result<SessionResponse> {
    let session = store::conversation::sessions::get(tx, access, id).await?;
    Ok(SessionResponse::new(session, access))
}

/// Create a session.
#[utoipa::path(
    operation_id = "create_session",
    tag = "sessions",
    security(("api_key" = ["admin", "bridge", "chat"]), ("user_token" = [])),
    request_body = CreateSessionRequest,
    responses((status = 201, description = "Created", body = SessionResponse))
)]
#[post("/sessions")]
pub async fn create_session(
    app: web::Data<App>,
    caller: ConversationWriter,
    retryable: IdempotencyKey,
    body: LargeJsonBody<CreateSessionRequest>,
) -> Result<HttpResponse> {
    let request = body.value;
    let context = caller.context(&app, request.user.as_ref()).await?;
    let parse_id = |id: &String| ClientSessionId::parse(id, "/id");
    let parse_key = |key: &String| SessionKey::parse(key, "/session_key");
    let new = NewSession {
        id: request.id.as_ref().map(parse_id).transpose()?,
        session_key: request.session_key.as_ref().map(parse_key).transpose()?,
        agent: request.agent.map(|agent| agent.to_string()),
        title: request.title.map(|title| title.as_str().to_owned()),
        messages: request.messages.into_iter().map(NewMessage::from).collect(),
    };
    let tx = context.begin(&app.db).await?;
    retryable
        .answer(&app, tx, context.principal(), body.hash, async |tx| {
            let id = sessions::create(tx, &context.access, new, app.clock.now()).await?;
            Answer::new(201, &session_response(tx, &context.access, id).await?)
        })
        .await
}

/// List sessions by their tips, newest first.
#[utoipa::path(
    operation_id = "list_sessions",
    tag = "sessions",
    security(("api_key" = ["admin", "read", "bridge", "chat"]), ("user_token" = [])),
    params(ListSessionsParams),
    responses((status = 200, description = "A page", body = ListResponse<SessionResponse>))
)]
#[get("/sessions")]
pub async fn list_sessions(
    app: web::Data<App>,
    caller: ConversationReader,
    Query(params): Query<ListSessionsParams>,
) -> Result<HttpResponse> {
    let context = caller.context(&app, None).await?;
    let access = &context.access;
    let list = format!(
        "sessions?{:?}&{:?}&{:?}&{:?}&{:?}",
        params.user_id, params.session_key, params.agent, params.state, params.archived
    );
    let name = ListName::for_context(&context, list);
    let page = name.open(&app.keyring, params.limit, params.cursor.as_deref())?;
    let mut tx = context.begin(&app.db).await?;
    let mut filter = Filter {
        user_id: context.user_filter(&mut tx, params.user_id).await?,
        slot_id: None,
        agent: params.agent.map(|agent| agent.to_string()),
        state: params.state,
        archived: params.archived,
    };
    if let Some(key) = &params.session_key {
        let key = SessionKey::parse(key, "/query/session_key")?;
        match sessions::find_slot(&mut tx, access, &key, app.clock.now()).await {
            Ok(slot) => filter.slot_id = Some(slot.id),
            // No session exists under the key yet. A reserved key exists or does not.
            Err(error) if error.code == session_key_not_found().code && !key.is_reserved() => {
                return Ok(HttpResponse::Ok().json(ListResponse::<SessionResponse>::empty()));
            }
            Err(error) => return Err(error),
        }
    }
    let page = store::conversation::conversations::list(&mut tx, access, &filter, &page).await?;
    tx.commit().await?;
    let response = name.close(&app.keyring, page, |session| {
        SessionResponse::new(session, access)
    })?;
    Ok(HttpResponse::Ok().json(response))
}

/// Get a session: the tip of its chain, or exactly the named link.
#[utoipa::path(
    operation_id = "get_session",
    tag = "sessions",
    security(("api_key" = ["admin", "read", "bridge", "chat"]), ("user_token" = [])),
    params(("id" = inline(SessionRef), Path, description = "Any id of the chain"), ExactParams),
    responses((status = 200, description = "The session; its ETag is its last seq", body = SessionResponse))
)]
#[get("/sessions/{id}")]
pub async fn get_session(
    app: web::Data<App>,
    caller: ConversationReader,
    PathSession(id): PathSession,
    Query(params): Query<ExactParams>,
) -> Result<HttpResponse> {
    let (context, mut tx) = caller.begin(&app, None).await?;
    let access = &context.access;
    let now = app.clock.now();
    let tip = sessions::find(&mut tx, access, &id, Permission::Participate, now).await?;
    let session_id = if params.exact {
        tip.requested_id
    } else {
        tip.session_id
    };
    let session = store::conversation::sessions::get(&mut tx, access, session_id).await?;
    tx.commit().await?;
    let etag = etag(session.last_seq);
    let response = SessionResponse::new(session, access);
    Ok(HttpResponse::Ok().insert_header(etag).json(response))
}

/// Rename, archive or pin a conversation.
#[utoipa::path(
    operation_id = "update_session",
    tag = "sessions",
    security(("api_key" = ["admin", "bridge", "chat"]), ("user_token" = [])),
    params(("id" = inline(SessionRef), Path, description = "Any id of the chain")),
    request_body = UpdateSessionRequest,
    responses((status = 200, description = "The session", body = SessionResponse))
)]
#[patch("/sessions/{id}")]
pub async fn update_session(
    app: web::Data<App>,
    caller: ConversationWriter,
    PathSession(id): PathSession,
    body: JsonBody<UpdateSessionRequest>,
) -> Result<HttpResponse> {
    let context = caller.context(&app, None).await?;
    let access = &context.access;
    let title = body.value.title;
    let change = Change {
        title: title.map(|title| title.map(|title| title.as_str().to_owned())),
        archived: body.value.archived,
        pinned: body.value.pinned,
    };
    let mut tx = context.begin(&app.db).await?;
    let tip = sessions::find(&mut tx, access, &id, Permission::Manage, app.clock.now()).await?;
    store::conversation::conversations::update(&mut tx, tip.name.conversation_id, &change).await?;
    let response = session_response(&mut tx, access, tip.session_id).await?;
    tx.commit().await?;
    Ok(HttpResponse::Ok().json(response))
}

/// Delete a whole conversation. Its ids are never given again.
#[utoipa::path(
    operation_id = "delete_session",
    tag = "sessions",
    security(("api_key" = ["admin", "bridge", "chat"]), ("user_token" = [])),
    params(("id" = inline(SessionRef), Path, description = "Any id of the chain")),
    responses((status = 204, description = "Deleted"))
)]
#[delete("/sessions/{id}")]
pub async fn delete_session(
    app: web::Data<App>,
    caller: ConversationWriter,
    PathSession(id): PathSession,
) -> Result<HttpResponse> {
    let (context, mut tx) = caller.begin(&app, None).await?;
    sessions::delete(&app, &mut tx, &context.actor(), &context.access, &id).await?;
    tx.commit().await?;
    Ok(HttpResponse::NoContent().finish())
}
