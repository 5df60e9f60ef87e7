//! `/v1/turns/{id}` and the events of conversations: get, list and cancel turns, and stream events, which any node
//! can resume.

use actix_web::{FromRequest, HttpRequest, HttpResponse, dev::Payload, get, post, web};
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::Value;
use std::future::{Ready, ready};

use crate::app::App;
use crate::domain::conversation::session::{ConversationHandle, Permission, Tip};
use crate::domain::conversation::session_name::{SessionKey, SessionRef, session_key_not_found};
use crate::domain::people::access::Access;
use crate::domain::turn::{Turn, TurnState};
use crate::error::{Code, Error, FieldError, Result};
use crate::http::auth::conversation::{CallerContext, ConversationReader, ConversationWriter};
use crate::http::auth::credential::RawCredential;
use crate::http::request::extract::{PathId, PathKey, PathSession, Query};
use crate::http::request::paging::{ListName, ListResponse, PageParams};
use crate::http::response::event_stream::{self, ConversationEvents, Scope};
use crate::http::response::reader::Reader;
use crate::ids::{SessionId, SlotId, TurnId};
use crate::sessions;
use crate::store::TenantTx;
use crate::store::turn::{events, turns as rows};
use crate::turns::{self, Follower};

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct TurnResponse {
    pub id: TurnId,
    /// The session in which it runs, or ended.
    pub session_id: String,
    pub conversation_id: String,
    pub session_key: Option<String>,
    pub agent: String,
    pub state: TurnState,
    /// Why it ended without an answer.
    pub reason: Option<String>,
    pub detail: Option<String>,
    /// The attempt of the model call: above 1 after the loss of a node.
    pub attempt: i32,
    /// The agent's answer; null before the first part.
    #[schema(value_type = Option<Object>)]
    pub message: Option<Value>,
    pub usage: TurnUsage,
    pub created_at: DateTime<Utc>,
    pub started_at: Option<DateTime<Utc>>,
    pub ended_at: Option<DateTime<Utc>>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct TurnUsage {
    pub input_tokens: i64,
    pub output_tokens: i64,
    /// Whether the counts are an estimate, because the provider reported none.
    pub estimated: bool,
}

impl TurnResponse {
    fn new(turn: Turn, message: Option<Value>, name: &ConversationHandle, access: &Access) -> Self {
        Self {
            id: turn.id,
            session_id: name.public_session_id(turn.session_id(), access),
            conversation_id: name.public_id(access),
            session_key: turn.session_info.session_key,
            agent: turn.agent,
            state: turn.state,
            reason: turn.reason,
            detail: turn.detail,
            attempt: turn.attempt,
            message,
            usage: TurnUsage {
                input_tokens: turn.usage.input,
                output_tokens: turn.usage.output,
                estimated: turn.usage.estimated,
            },
            created_at: turn.created_at,
            started_at: turn.started_at,
            ended_at: turn.ended_at,
        }
    }
}

/// A turn that `access` may see, with its conversation. A foreign turn is not found.
async fn find(
    app: &App,
    tx: &mut TenantTx,
    access: &Access,
    id: TurnId,
    permission: Permission,
) -> Result<(Turn, Tip)> {
    let no_such_turn = || Error::not_found("turn");
    let turn = rows::find(tx, id).await?;
    // Without a turn, a random conversation: the lookup takes as long as for a foreign one.
    let conversation_id = turn
        .as_ref()
        .map_or_else(SessionId::generate, |turn| turn.conversation_id);
    let session = SessionRef::Id(conversation_id);
    let found = sessions::find(tx, access, &session, permission, app.clock.now()).await;
    match found {
        Ok(tip) => Ok((turn.ok_or_else(no_such_turn)?, tip)),
        Err(error) if error.code == Code::SessionNotFound => Err(no_such_turn()),
        Err(error) => Err(error),
    }
}

async fn render(tx: &mut TenantTx, turn: Turn, tip: &Tip, access: &Access) -> Result<TurnResponse> {
    let answer = rows::find_last_answer(tx, turn.id).await?;
    let message = answer.map(|answer| {
        let mut message = serde_json::json!({
            "role": "assistant", "content": answer.content.map(|content| content.0),
        });
        if let Some(calls) = answer.tool_calls {
            message["tool_calls"] = calls.0;
        }
        message
    });
    Ok(TurnResponse::new(turn, message, &tip.name, access))
}

/// Get a turn.
#[utoipa::path(
    operation_id = "get_turn",
    tag = "turns",
    security(("api_key" = ["admin", "read", "bridge", "chat"]), ("user_token" = [])),
    params(("id" = inline(TurnId), Path, description = "The turn")),
    responses((status = 200, description = "The turn", body = TurnResponse))
)]
#[get("/turns/{id}")]
pub async fn get_turn(
    app: web::Data<App>,
    caller: ConversationReader,
    PathId(id): PathId<TurnId>,
) -> Result<HttpResponse> {
    let (context, mut tx) = caller.begin(&app, None).await?;
    let access = &context.access;
    let (turn, tip) = find(&app, &mut tx, access, id, Permission::Participate).await?;
    let response = render(&mut tx, turn, &tip, access).await?;
    sessions::audit_read(&app, &mut tx, &context.actor(), access, &tip).await?;
    tx.commit().await?;
    Ok(HttpResponse::Ok().json(response))
}

/// Cancel a turn.
///
/// The node that runs it stops it at once; the answer so far stays. A turn that has ended stays as it is.
#[utoipa::path(
    operation_id = "cancel_turn",
    tag = "turns",
    security(("api_key" = ["admin", "bridge", "chat"]), ("user_token" = [])),
    params(("id" = inline(TurnId), Path, description = "The turn")),
    responses((status = 202, description = "The turn, which is ending or has ended", body = TurnResponse))
)]
#[post("/turns/{id}/cancel")]
pub async fn cancel_turn(
    app: web::Data<App>,
    caller: ConversationWriter,
    PathId(id): PathId<TurnId>,
) -> Result<HttpResponse> {
    let (context, mut tx) = caller.begin(&app, None).await?;
    let access = &context.access;
    let (turn, tip) = find(&app, &mut tx, access, id, Permission::Participate).await?;
    // A guest may cancel only their own turns.
    let is_own = access.sender.as_ref().map(|sender| sender.id) == turn.identity_id;
    if !is_own {
        tip.owner.check(access, Permission::Manage)?;
    }
    let next = turns::cancel(&app, &mut tx, &turn, app.clock.now()).await?;
    let turn = rows::get(&mut tx, id).await?;
    let response = render(&mut tx, turn, &tip, access).await?;
    tx.commit().await?;
    if let Some(next) = next {
        turns::start(&app, context.tenant_id(), next, None);
    }
    Ok(HttpResponse::Accepted().json(response))
}

/// List the turns of a conversation, newest first.
#[utoipa::path(
    operation_id = "list_turns",
    tag = "turns",
    security(("api_key" = ["admin", "read", "bridge", "chat"]), ("user_token" = [])),
    params(("id" = inline(SessionRef), Path, description = "Any id of the chain"), PageParams),
    responses((status = 200, description = "A page of turns, without their messages", body = ListResponse<TurnResponse>))
)]
#[get("/sessions/{id}/turns")]
pub async fn list_turns(
    app: web::Data<App>,
    caller: ConversationReader,
    PathSession(id): PathSession,
    Query(params): Query<PageParams>,
) -> Result<HttpResponse> {
    let (context, mut tx) = caller.begin(&app, None).await?;
    let access = &context.access;
    let tip = sessions::find(
        &mut tx,
        access,
        &id,
        Permission::Participate,
        app.clock.now(),
    )
    .await?;
    let conversation_id = tip.name.conversation_id;
    let name = ListName::for_context(&context, format!("turns/{conversation_id}"));
    let page = name.open(&app.keyring, params.limit, params.cursor.as_deref())?;
    let page = rows::list(&mut tx, conversation_id, &page).await?;
    tx.commit().await?;
    let show = |turn: Turn| TurnResponse::new(turn, None, &tip.name, access);
    Ok(HttpResponse::Ok().json(name.close(&app.keyring, page, show)?))
}

/// The header `Last-Event-ID`: the last event that a reconnecting client has received.
pub struct LastEvent(Option<i64>);

impl FromRequest for LastEvent {
    type Error = Error;
    type Future = Ready<Result<Self>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        let Some(value) = request.headers().get("last-event-id") else {
            return ready(Ok(Self(None)));
        };
        let number = value.to_str().ok().and_then(|text| text.parse().ok());
        let number = number.filter(|number| *number >= 0);
        ready(number.map(|number| Self(Some(number))).ok_or_else(|| {
            let pointer = "/header/Last-Event-ID";
            let error = FieldError::new(pointer, "must be the id of an event");
            Error::fields(Code::InvalidRequest, vec![error])
        }))
    }
}

/// A client that opens a stream, before the stream's subject is determined.
struct StreamOpener {
    app: web::Data<App>,
    context: CallerContext,
    credential: RawCredential,
}

impl StreamOpener {
    /// Opens the stream of a conversation, or of one turn of it, and audits that.
    async fn open(
        self,
        mut tx: TenantTx,
        tip: Tip,
        turn_id: Option<TurnId>,
        slot_id: Option<SlotId>,
        last: Option<i64>,
    ) -> Result<HttpResponse> {
        let Self {
            app,
            context,
            credential,
        } = self;
        let tenant_id = context.tenant_id();
        let guard = app
            .limits
            .open_stream(tenant_id, context.limits().open_streams)?;
        let conversation_id = tip.name.conversation_id;
        let after = match (last, turn_id) {
            (Some(last), _) => last,
            (None, Some(_)) => 0,
            (None, None) => events::find_beginning(&mut tx, conversation_id).await?,
        };
        sessions::audit_read(&app, &mut tx, &context.actor(), &context.access, &tip).await?;
        tx.commit().await?;
        let follower = match turn_id {
            Some(turn_id) => Follower::of_turn(&app, tenant_id, conversation_id, turn_id, after),
            None => Follower::of_conversation(&app, tenant_id, conversation_id, after),
        };
        let reader = Reader::new(app, context, credential, conversation_id);
        Ok(event_stream::respond(ConversationEvents {
            follower,
            reader: reader.through(slot_id),
            name: tip.name,
            scope: if turn_id.is_some() {
                Scope::Turn
            } else {
                Scope::Conversation
            },
            _guard: guard,
        }))
    }
}

/// Stream the events of a turn, from its beginning or after `Last-Event-ID`, until it ends.
#[utoipa::path(
    operation_id = "stream_turn_events",
    tag = "turns",
    security(("api_key" = ["admin", "read", "bridge", "chat"]), ("user_token" = [])),
    params(
        ("id" = inline(TurnId), Path, description = "The turn"),
        ("Last-Event-ID" = Option<String>, Header, description = "The last received event", max_length = 19, pattern = r"^[0-9]+$")
    ),
    responses((status = 200, description = "Events", content_type = "text/event-stream", body = String))
)]
#[get("/turns/{id}/events")]
pub async fn stream_turn_events(
    app: web::Data<App>,
    caller: ConversationReader,
    credential: RawCredential,
    PathId(id): PathId<TurnId>,
    LastEvent(last): LastEvent,
) -> Result<HttpResponse> {
    let (context, mut tx) = caller.begin(&app, None).await?;
    let (turn, tip) = find(&app, &mut tx, &context.access, id, Permission::Participate).await?;
    let opener = StreamOpener {
        app,
        context,
        credential,
    };
    opener.open(tx, tip, Some(turn.id), None, last).await
}

/// Stream the events of a conversation, from the beginning of its active turn or after `Last-Event-ID`.
#[utoipa::path(
    operation_id = "stream_session_events",
    tag = "turns",
    security(("api_key" = ["admin", "read", "bridge", "chat"]), ("user_token" = [])),
    params(
        ("id" = inline(SessionRef), Path, description = "Any id of the chain"),
        ("Last-Event-ID" = Option<String>, Header, description = "The last received event", max_length = 19, pattern = r"^[0-9]+$")
    ),
    responses((status = 200, description = "Events", content_type = "text/event-stream", body = String))
)]
#[get("/sessions/{id}/events")]
pub async fn stream_session_events(
    app: web::Data<App>,
    caller: ConversationReader,
    credential: RawCredential,
    PathSession(id): PathSession,
    LastEvent(last): LastEvent,
) -> Result<HttpResponse> {
    let (context, mut tx) = caller.begin(&app, None).await?;
    let access = &context.access;
    let now = app.clock.now();
    let tip = sessions::find(&mut tx, access, &id, Permission::Participate, now).await?;
    let opener = StreamOpener {
        app,
        context,
        credential,
    };
    opener.open(tx, tip, None, None, last).await
}

/// Stream the events of a key's current session.
///
/// When another session becomes current, the stream closes with `session_moved`.
#[utoipa::path(
    operation_id = "stream_session_key_events",
    tag = "turns",
    security(("api_key" = ["admin", "read", "bridge", "chat"]), ("user_token" = [])),
    params(
        ("key" = inline(SessionKey), Path, description = "The key, percent-encoded"),
        ("Last-Event-ID" = Option<String>, Header, description = "The last received event", max_length = 19, pattern = r"^[0-9]+$")
    ),
    responses((status = 200, description = "Events", content_type = "text/event-stream", body = String))
)]
#[get("/session-keys/{key}/events")]
pub async fn stream_session_key_events(
    app: web::Data<App>,
    caller: ConversationReader,
    credential: RawCredential,
    PathKey(key): PathKey,
    LastEvent(last): LastEvent,
) -> Result<HttpResponse> {
    let (context, mut tx) = caller.begin(&app, None).await?;
    let access = &context.access;
    let now = app.clock.now();
    let slot = sessions::find_slot(&mut tx, access, &key, now).await?;
    let current = slot.current.ok_or_else(session_key_not_found)?;
    let session = SessionRef::Id(current.session_id);
    let tip = sessions::find(&mut tx, access, &session, Permission::Participate, now).await?;
    let opener = StreamOpener {
        app,
        context,
        credential,
    };
    opener.open(tx, tip, None, Some(slot.id), last).await
}
