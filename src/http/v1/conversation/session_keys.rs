//! `/v1/session-keys`: stable names that outlive the sessions they lead to.

use actix_web::{HttpResponse, get, post, web};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use super::session_messages::{MessageResponse, NewMessageRequest, appended_messages};
use crate::app::App;
use crate::domain::conversation::message::{NewMessage, Role};
use crate::domain::conversation::reset::ResetReason;
use crate::domain::conversation::session_name::{SessionKey, SessionRef};
use crate::domain::conversation::slot::{Current, Slot};
use crate::domain::people::access::Access;
use crate::domain::people::identity::UserName;
use crate::domain::values::resource_name::ResourceName;
use crate::error::Result;
use crate::http::auth::conversation::{ConversationReader, ConversationWriter};
use crate::http::request::extract::{PathKey, Query};
use crate::http::request::idempotency_key::IdempotencyKey;
use crate::http::request::json_body::{BodyHash, JsonBody, LargeJsonBody};
use crate::http::request::paging::{ListName, ListResponse};
use crate::http::request::precondition::{IfMatch, etag};
use crate::idempotency::Answer;
use crate::ids::UserId;
use crate::sessions::{self, Arrival};
use crate::store;

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct SlotResponse {
    /// The current key, even if the request named an older one.
    pub session_key: String,
    /// The tip of the current session; null before the first session, and after its deletion.
    pub session_id: Option<String>,
    pub conversation_id: Option<String>,
    pub user_id: Option<UserId>,
    pub agent: String,
    /// Counts the changes of the current session. Send it as `If-Match`.
    pub generation: i64,
    pub last_active_at: DateTime<Utc>,
}

impl SlotResponse {
    fn new(slot: Slot, access: &Access) -> Self {
        let current = slot.current.as_ref();
        let public_id =
            |current: &Current| current.name.public_session_id(current.session_id, access);
        Self {
            session_id: current.map(public_id),
            conversation_id: current.map(|current| current.name.public_id(access)),
            last_active_at: current.map_or(slot.last_user_at, |current| current.last_active_at),
            session_key: slot.key,
            user_id: slot.user_id,
            agent: slot.agent,
            generation: slot.generation,
        }
    }
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListSlotsParams {
    /// Returns this one slot instead of a list: for keys that do not fit into a path.
    #[param(min_length = 1, max_length = 256, pattern = "^[!-~]+$")]
    session_key: Option<String>,
    /// Only slots of this user.
    user_id: Option<UserId>,
    limit: Option<u32>,
    cursor: Option<String>,
}

/// A page of slots, or the requested one.
#[derive(Debug, Serialize, utoipa::ToSchema)]
#[serde(untagged)]
pub enum SlotsResponse {
    Page(ListResponse<SlotResponse>),
    One(SlotResponse),
}

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SwitchRequest {
    /// Any id of the chain that becomes current.
    #[schema(min_length = 1, max_length = 256, pattern = "^[!-~]+$")]
    pub session_id: String,
}

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AppendToKeyRequest {
    /// Written in this order, all or none.
    #[schema(min_items = 1, max_items = 1000)]
    pub messages: Vec<NewMessageRequest>,
    /// The agent of a new key. Default: `main`.
    pub agent: Option<ResourceName>,
    /// The owner of the key: `usr_…`, `platform:external_id`, or `me` with a user token.
    pub user: Option<UserName>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct AppendedToKeyResponse {
    pub session_key: String,
    /// The tip, which has the messages.
    pub session_id: String,
    pub conversation_id: String,
    /// Whether the session is new.
    pub created: bool,
    /// Why the session was reset, if it was.
    pub reset: Option<ResetResponse>,
    pub messages: Vec<MessageResponse>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct ResetResponse {
    pub reason: ResetReason,
    pub previous_session_id: String,
}

/// List session keys, newest first.
#[utoipa::path(
    operation_id = "list_session_keys",
    tag = "session keys",
    security(("api_key" = ["admin", "read", "bridge", "chat"]), ("user_token" = [])),
    params(ListSlotsParams),
    responses((status = 200, description = "A page, or the one slot of `session_key`", body = SlotsResponse))
)]
#[get("/session-keys")]
pub async fn list_session_keys(
    app: web::Data<App>,
    caller: ConversationReader,
    Query(params): Query<ListSlotsParams>,
) -> Result<HttpResponse> {
    if let Some(key) = &params.session_key {
        let key = SessionKey::parse(key, "/query/session_key")?;
        let (slot, generation) = find(&app, caller, &key).await?;
        let response = SlotsResponse::One(slot);
        return Ok(HttpResponse::Ok()
            .insert_header(etag(generation))
            .json(response));
    }
    let context = caller.context(&app, None).await?;
    let access = &context.access;
    let name = ListName::for_context(&context, format!("session_keys?{:?}", params.user_id));
    let page = name.open(&app.keyring, params.limit, params.cursor.as_deref())?;
    let mut tx = context.begin(&app.db).await?;
    let user_id = context.user_filter(&mut tx, params.user_id).await?;
    let page =
        store::conversation::slots::list(&mut tx, access, user_id, app.clock.now(), &page).await?;
    tx.commit().await?;
    let page = name.close(&app.keyring, page, |slot| SlotResponse::new(slot, access))?;
    Ok(HttpResponse::Ok().json(SlotsResponse::Page(page)))
}

/// The slot of a key, and its generation.
async fn find(
    app: &App,
    caller: ConversationReader,
    key: &SessionKey,
) -> Result<(SlotResponse, i64)> {
    let (context, mut tx) = caller.begin(app, None).await?;
    let slot = sessions::find_slot(&mut tx, &context.access, key, app.clock.now()).await?;
    tx.commit().await?;
    let generation = slot.generation;
    Ok((SlotResponse::new(slot, &context.access), generation))
}

/// Get a session key and its current session.
#[utoipa::path(
    operation_id = "get_session_key",
    tag = "session keys",
    security(("api_key" = ["admin", "read", "bridge", "chat"]), ("user_token" = [])),
    params(("key" = inline(SessionKey), Path, description = "The key, percent-encoded")),
    responses((status = 200, description = "The slot; its ETag is its generation", body = SlotResponse))
)]
#[get("/session-keys/{key}")]
pub async fn get_session_key(
    app: web::Data<App>,
    caller: ConversationReader,
    PathKey(key): PathKey,
) -> Result<HttpResponse> {
    let (slot, generation) = find(&app, caller, &key).await?;
    Ok(HttpResponse::Ok()
        .insert_header(etag(generation))
        .json(slot))
}

/// Reset a session key: a fresh session becomes the current one.
#[utoipa::path(
    operation_id = "reset_session_key",
    tag = "session keys",
    security(("api_key" = ["admin", "bridge", "chat"]), ("user_token" = [])),
    extensions(("x-retryable" = json!(true))),
    params(
        ("key" = inline(SessionKey), Path, description = "The key, percent-encoded"),
        ("If-Match" = Option<String>, Header, description = "The expected generation", max_length = 32, pattern = r#"^(\*|"?[0-9]+"?)$"#)
    ),
    responses(
        (status = 200, description = "The slot", body = SlotResponse),
        (status = 412, description = "The generation has changed", body = crate::http::response::problem::Problem, content_type = "application/problem+json")
    )
)]
#[post("/session-keys/{key}/reset")]
pub async fn reset_session_key(
    app: web::Data<App>,
    caller: ConversationWriter,
    PathKey(key): PathKey,
    IfMatch(generation): IfMatch,
    retryable: IdempotencyKey,
) -> Result<HttpResponse> {
    let context = caller.context(&app, None).await?;
    let access = &context.access;
    let nothing = BodyHash::empty();
    let tx = context.begin(&app.db).await?;
    retryable
        .answer(&app, tx, context.principal(), nothing, async |tx| {
            let slot = sessions::reset(tx, access, &key, generation, app.clock.now()).await?;
            Answer::new(200, &SlotResponse::new(slot, access))
        })
        .await
}

/// Make another session the current one, and reopen it if it had ended.
#[utoipa::path(
    operation_id = "switch_session_key",
    tag = "session keys",
    security(("api_key" = ["admin", "bridge", "chat"]), ("user_token" = [])),
    params(
        ("key" = inline(SessionKey), Path, description = "The key, percent-encoded"),
        ("If-Match" = Option<String>, Header, description = "The expected generation", max_length = 32, pattern = r#"^(\*|"?[0-9]+"?)$"#)
    ),
    request_body = SwitchRequest,
    responses(
        (status = 200, description = "The slot", body = SlotResponse),
        (status = 412, description = "The generation has changed", body = crate::http::response::problem::Problem, content_type = "application/problem+json")
    )
)]
#[post("/session-keys/{key}/switch")]
pub async fn switch_session_key(
    app: web::Data<App>,
    caller: ConversationWriter,
    PathKey(key): PathKey,
    IfMatch(generation): IfMatch,
    retryable: IdempotencyKey,
    body: JsonBody<SwitchRequest>,
) -> Result<HttpResponse> {
    let context = caller.context(&app, None).await?;
    let access = &context.access;
    let target = SessionRef::parse(&body.value.session_id, "/session_id")?;
    let tx = context.begin(&app.db).await?;
    retryable
        .answer(&app, tx, context.principal(), body.hash, async |tx| {
            let now = app.clock.now();
            let slot = sessions::switch(tx, access, &key, &target, generation, now).await?;
            Answer::new(200, &SlotResponse::new(slot, access))
        })
        .await
}

/// Append messages to the key's current session.
///
/// A new key gets a new session. The agent's reset policy may replace the current session first.
#[utoipa::path(
    operation_id = "append_to_session_key",
    tag = "session keys",
    security(("api_key" = ["admin", "bridge", "chat"]), ("user_token" = [])),
    params(("key" = inline(SessionKey), Path, description = "The key, percent-encoded")),
    request_body = AppendToKeyRequest,
    responses((status = 201, description = "Written", body = AppendedToKeyResponse))
)]
#[post("/session-keys/{key}/messages")]
pub async fn append_to_session_key(
    app: web::Data<App>,
    caller: ConversationWriter,
    PathKey(key): PathKey,
    retryable: IdempotencyKey,
    body: LargeJsonBody<AppendToKeyRequest>,
) -> Result<HttpResponse> {
    let request = body.value;
    let context = caller.context(&app, request.user.as_ref()).await?;
    let access = &context.access;
    let messages: Vec<NewMessage> = request.messages.into_iter().map(NewMessage::from).collect();
    let agent = request.agent.as_ref().map(ResourceName::as_str);
    let tx = context.begin(&app.db).await?;
    retryable
        .answer(&app, tx, context.principal(), body.hash, async |tx| {
            let now = app.clock.now();
            let arrival = Arrival {
                platform: access.sender.as_ref().map(|sender| sender.name.platform()),
                chat_type: None,
                by_user: messages.iter().any(|message| message.role == Role::User),
            };
            let chosen = sessions::choose_current(tx, access, &key, agent, arrival, now).await?;
            let session = SessionRef::Id(chosen.session_id);
            let appended = sessions::append(tx, access, &session, &messages, None, now).await?;
            let name = &appended.tip.name;
            let response = AppendedToKeyResponse {
                session_key: chosen.slot.key,
                session_id: name.public_session_id(appended.tip.session_id, access),
                conversation_id: name.public_id(access),
                created: chosen.created,
                reset: chosen.reset.map(|(reason, before)| ResetResponse {
                    reason,
                    previous_session_id: before.public_id(access),
                }),
                messages: appended_messages(&appended, &messages, access, now)?,
            };
            Answer::new(201, &response)
        })
        .await
}
