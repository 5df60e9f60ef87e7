//! `/v1/chat/completions` and `/v1/models`, as OpenAI's clients know them. What names no session is
//! stateless: passed to the agent's model and back, and gone with the connection.

use actix_web::web::Bytes;
use actix_web::{HttpRequest, HttpResponse, get, post, web};
use futures_util::stream;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::acting::{Acting, ConversationReader, Converser};
use super::extract::{LargeJsonBody, PathName};
use super::problem;
use crate::app::App;
use crate::chat::{Answering, Call};
use crate::domain::completion::CompletionRequest;
use crate::domain::identity::IdentityName;
use crate::error::{Code, Error, Result};
use crate::store;

const SESSION_HEADERS: [&str; 2] = ["x-hermes-session-id", "x-hermes-session-key"];

/// A model, as OpenAI lists it.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct ModelResponse {
    /// The agent's name.
    pub id: String,
    pub object: &'static str,
    /// Seconds since 1970.
    pub created: i64,
    pub owned_by: &'static str,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct ModelsResponse {
    pub object: &'static str,
    pub data: Vec<ModelResponse>,
}

impl From<store::agents::AgentRow> for ModelResponse {
    fn from(agent: store::agents::AgentRow) -> Self {
        Self {
            id: agent.name,
            object: "model",
            created: agent.created_at.timestamp(),
            owned_by: "tenant",
        }
    }
}

/// What the document says of a request; members that it does not name are passed to the model.
#[derive(Deserialize, utoipa::ToSchema)]
#[expect(
    dead_code,
    reason = "the request is read as it is; this is its documentation"
)]
pub struct ChatCompletionRequest {
    /// The name of an agent.
    #[schema(min_length = 1, max_length = 64)]
    model: String,
    #[schema(min_items = 1, max_items = 10_000)]
    messages: Vec<ChatMessage>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    /// A label for the model's server.
    #[schema(max_length = 512)]
    user: Option<String>,
}

#[derive(Deserialize, utoipa::ToSchema)]
#[expect(dead_code, reason = "see above")]
pub struct ChatMessage {
    role: ChatRole,
    /// A text or a list of parts.
    #[schema(value_type = Option<String>)]
    content: Value,
}

#[derive(Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ChatRole {
    System,
    Developer,
    User,
    Assistant,
    Tool,
}

#[derive(Deserialize, utoipa::ToSchema)]
#[expect(dead_code, reason = "see above")]
pub struct StreamOptions {
    /// Whether the stream ends with a chunk about its usage.
    include_usage: Option<bool>,
}

/// The tenant's agents, as models.
#[utoipa::path(
    operation_id = "list_models",
    tag = "chat",
    security(("api_key" = ["admin", "read", "bridge", "chat"]), ("user_token" = [])),
    extensions(("x-acts-for" = json!("the named person, the token's user, or the tenant"))),
    responses((status = 200, description = "All of them", body = ModelsResponse))
)]
#[get("/models")]
pub async fn list_models(app: web::Data<App>, caller: ConversationReader) -> Result<HttpResponse> {
    let acting = caller.acting(&app, None).await?;
    let mut tx = acting.begin(&app.db).await?;
    let agents = store::agents::list(&mut tx).await?;
    tx.commit().await?;
    let data = agents.into_iter().map(ModelResponse::from).collect();
    Ok(HttpResponse::Ok().json(ModelsResponse {
        object: "list",
        data,
    }))
}

/// One agent, as a model.
#[utoipa::path(
    operation_id = "get_model",
    tag = "chat",
    security(("api_key" = ["admin", "read", "bridge", "chat"]), ("user_token" = [])),
    extensions(("x-acts-for" = json!("the named person, the token's user, or the tenant"))),
    params(("name" = inline(crate::domain::resource_name::ResourceName), Path, description = "The agent's name")),
    responses((status = 200, description = "The model", body = ModelResponse))
)]
#[get("/models/{name}")]
pub async fn get_model(
    app: web::Data<App>,
    caller: ConversationReader,
    name: PathName,
) -> Result<HttpResponse> {
    let name = name.or_missing()?;
    let acting = caller.acting(&app, None).await?;
    let mut tx = acting.begin(&app.db).await?;
    let agent = store::agents::find(&mut tx, name.as_str()).await?;
    tx.commit().await?;
    let agent = agent.ok_or_else(|| Error::new(Code::ModelNotFound, "no such model"))?;
    Ok(HttpResponse::Ok().json(ModelResponse::from(agent)))
}

/// Ask an agent. Without a session it is stateless: history is what the request holds, and the answer ends
/// with the connection.
#[utoipa::path(
    operation_id = "create_chat_completion",
    tag = "chat",
    security(("api_key" = ["admin", "bridge", "chat"]), ("user_token" = [])),
    extensions(("x-acts-for" = json!("the named person, the token's user, or the tenant"))),
    request_body = ChatCompletionRequest,
    responses(
        (status = 200, description = "The answer, whole or as a stream", content(
            (Object = "application/json"),
            (String = "text/event-stream")
        )),
        (status = 501, description = "Sessions are not available here yet", body = Object),
        (status = 502, description = "The model's server failed", body = Object)
    )
)]
#[post("/chat/completions")]
pub async fn create_chat_completion(
    app: web::Data<App>,
    request: HttpRequest,
    caller: Converser,
    body: LargeJsonBody<Map<String, Value>>,
) -> Result<HttpResponse> {
    let asked = CompletionRequest::read(body.value)?;
    let acting = caller.acting(&app, None).await?;
    if names_session(&request, &acting, asked.user.as_deref()) {
        let detail =
            "chat in sessions is not available yet: leave out session headers and identities";
        return Err(Error::new(Code::NotAvailable, detail));
    }
    let wants_stream = asked.stream;
    let call = Call::new(&app, acting.tenant_id(), acting.viewer.person, asked).await?;
    if !wants_stream {
        return Ok(HttpResponse::Ok().json(call.complete().await?));
    }
    let chunks = stream::unfold(Some(call.stream().await?), next_event);
    Ok(HttpResponse::Ok()
        .content_type("text/event-stream")
        .insert_header(("cache-control", "no-cache"))
        // Proxies that buffer would hold the words back.
        .insert_header(("x-accel-buffering", "no"))
        .streaming(chunks))
}

/// Whether the request is about a conversation that is kept.
fn names_session(request: &HttpRequest, acting: &Acting, user: Option<&str>) -> bool {
    let by_header = SESSION_HEADERS
        .iter()
        .any(|name| request.headers().contains_key(*name));
    let by_user = user.is_some_and(|user| {
        let identity = user.parse::<IdentityName>();
        acting.vouches_for(user, identity.ok().as_ref())
    });
    by_header || by_user
}

/// The next event of a stream; an error is told as OpenAI's clients read it, and ends it.
async fn next_event(answering: Option<Answering>) -> Option<(Result<Bytes>, Option<Answering>)> {
    let mut answering = answering?;
    let event = match answering.next().await {
        Ok(Some(chunk)) => {
            let event = Bytes::from(format!("data: {chunk}\n\n"));
            return Some((Ok(event), Some(answering)));
        }
        Ok(None) => "data: [DONE]\n\n".to_owned(),
        Err(error) => {
            tracing::warn!(code = error.code.as_str(), "a stream broke off: {error}");
            format!("data: {}\n\n", problem::openai_body(&error))
        }
    };
    Some((Ok(Bytes::from(event)), None))
}
