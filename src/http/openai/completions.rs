//! `/v1/chat/completions`, as OpenAI's clients know it. What names no session is stateless: passed to the
//! agent's model and back, and gone with the connection. The rest is a turn.

use std::pin::Pin;

use actix_web::http::header::ContentType;
use actix_web::web::Bytes;
use actix_web::{HttpRequest, HttpResponse, post, web};
use futures_util::FutureExt;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::task::yield_now;
use tokio::time::{Instant, timeout, timeout_at};

use super::chat_turn::{self, ChatTurnRequest};
use crate::app::App;
use crate::completions::{Call, CompletionStream};
use crate::domain::bridge::chat::Chat;
use crate::domain::conversation::message::{Content, ToolCall};
use crate::domain::conversation::session_name::{SessionKey, SessionRef};
use crate::domain::turn::ResetInfo;
use crate::domain::turn::completion::CompletionRequest;
use crate::error::{Code, Error, FieldError, Result};
use crate::http::auth::conversation::ConversationWriter;
use crate::http::auth::credential::RawCredential;
use crate::http::middleware;
use crate::http::request::idempotency_key::IdempotencyKey;
use crate::http::request::json_body::{BodyHash, FromJsonText, LargeJsonText};
use crate::http::response::held_answer;
use crate::http::response::problem;
use crate::http::response::reader::Reader;
use crate::http::response::sse::{self, Batch, EventSource, KEEP_ALIVE_EVERY};
use crate::ids::TurnId;
use crate::limits::Memory;
use crate::telemetry::{self, CallPurpose};
use crate::turns::Target;

const SESSION_ID: &str = "X-Hermes-Session-Id";
const SESSION_KEY: &str = "X-Hermes-Session-Key";
/// Says that nothing was stored, and that there is no session.
const STATELESS: (&str, &str) = (held_answer::STATELESS, "true");
/// Bytes of a stream that are sent in one piece, about.
const MAX_BATCH_BYTES: usize = 16 * 1024;
/// How often one of the official clients has tried before.
const RETRY_COUNT: &str = "x-stainless-retry-count";

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
    /// In a session, only what follows the last message of an assistant is used; a system message is an
    /// instruction for this turn.
    #[schema(min_items = 1, max_items = 10_000)]
    messages: Vec<ChatMessage>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    /// The sender: `platform:external_id` of an identity that the key vouches for, or `me` with a user token
    /// (also in the header `X-Throughline-Identity`). Anything else is a label for the model's server.
    #[schema(max_length = 512)]
    user: Option<String>,
    /// False: a user token that names neither a session nor `me` is answered without one.
    store: Option<bool>,
}

#[derive(Deserialize, utoipa::ToSchema)]
#[expect(dead_code, reason = "see above")]
pub struct ChatMessage {
    role: ChatRole,
    content: Option<Content>,
    /// Of a tool: which call it answers.
    #[schema(min_length = 1, max_length = 256)]
    tool_call_id: Option<String>,
    /// Of a user: what its author is called.
    #[schema(min_length = 1, max_length = 256)]
    name: Option<String>,
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
    /// Whether a session's stream also has events named `hermes.…`.
    include_hermes_events: Option<bool>,
}

/// A whole answer, as OpenAI has it.
#[derive(Serialize, utoipa::ToSchema)]
pub struct ChatCompletionResponse {
    id: String,
    /// `chat.completion`.
    object: String,
    created: i64,
    /// The agent.
    model: String,
    choices: Vec<ChatChoice>,
    usage: Option<ChatUsage>,
    /// As the model's server says.
    system_fingerprint: Option<String>,
    /// As the model's server says.
    service_tier: Option<String>,
    /// The effective session; only in a session. In a stream it is on the chunk with `finish_reason`.
    hermes: Option<EffectiveSession>,
}

#[derive(Serialize, utoipa::ToSchema)]
pub struct ChatChoice {
    index: i64,
    message: ChatAnswer,
    /// Where they were asked for: `{content, refusal}`. More than 1 MiB of them are not kept in a session.
    #[schema(value_type = Option<Object>)]
    logprobs: Option<Value>,
    finish_reason: Option<String>,
}

#[derive(Serialize, utoipa::ToSchema)]
pub struct ChatAnswer {
    /// `assistant`.
    role: String,
    content: Option<String>,
    /// Why the model does not answer.
    refusal: Option<String>,
    /// What the model thought before it answered, where it says so. In a stream under the name that its server uses.
    reasoning_content: Option<String>,
    tool_calls: Option<Vec<ToolCall>>,
}

/// In a session, of all calls of the turn.
#[derive(Serialize, utoipa::ToSchema)]
pub struct ChatUsage {
    prompt_tokens: i64,
    completion_tokens: i64,
    total_tokens: i64,
    /// Such as `cached_tokens`, where the model's server tells them.
    #[schema(value_type = Option<Object>)]
    prompt_tokens_details: Option<Value>,
    /// Such as `reasoning_tokens`, where the model's server tells them.
    #[schema(value_type = Option<Object>)]
    completion_tokens_details: Option<Value>,
}

#[derive(Serialize, utoipa::ToSchema)]
pub struct EffectiveSession {
    session_id: String,
    session_key: Option<String>,
    conversation_id: String,
    /// The id that the request gave.
    requested_session_id: Option<String>,
    compressed: bool,
    reset: Option<ResetInfo>,
    turn_id: TurnId,
    /// The key whose long-term memory was used.
    memory_key: Option<String>,
}

/// Ask an agent. With a session id, a session key or a sender it is a turn in a session: history comes from the
/// store, and a dropped connection does not stop it. A user token that gives none of them speaks in its user's own
/// session, as with `user: "me"`, unless `store` is false. Otherwise it is stateless: history is what the request
/// holds, the answer ends with the connection and has the header `X-Throughline-Stateless: true`.
///
/// With an `Idempotency-Key` a request about a session is one turn, however often it is repeated. A stateless one
/// stores nothing that could be given again: there the key has no effect.
///
/// An answer that is not streamed is waited for as long as the agent's `upstream.timeout_seconds` says, and nothing is
/// sent before it; a stream gets a comment every five seconds while the model is silent, and an error that comes then
/// is told in the stream. Errors that cost a model call carry `x-should-retry: false`.
///
/// An answer is as good as its credential: one that is revoked or expires meanwhile, or whose user is erased, ends a
/// stream within five seconds, with an error in it.
#[utoipa::path(
    operation_id = "create_chat_completion",
    tag = "chat",
    security(("api_key" = ["admin", "bridge", "chat"]), ("user_token" = [])),
    extensions(("x-acts-for" = json!("the named person, the token's user, or the tenant"))),
    params(
        ("X-Hermes-Session-Id" = Option<String>, Header, description = "Continue this session", min_length = 1, max_length = 256, pattern = "^[!-~]+$"),
        ("X-Hermes-Session-Key" = Option<String>, Header, description = "The long-term scope; alone, its current session", min_length = 1, max_length = 256, pattern = "^[!-~]+$")
    ),
    request_body = ChatCompletionRequest,
    responses(
        (status = 200, description = "The answer, whole or as a stream", content(
            (ChatCompletionResponse = "application/json"),
            (String = "text/event-stream")
        ), headers(
            ("X-Hermes-Session-Id" = String, description = "The session that the turn was accepted in; not of a stateless answer"),
            ("X-Hermes-Session-Key" = String, description = "Its session key, where it has one"),
            ("X-Throughline-Conversation-Id" = String, description = "Its conversation"),
            ("X-Throughline-Turn-Id" = String, description = "The turn"),
            ("X-Throughline-Stateless" = String, description = "`true` of a stateless answer")
        )),
        (status = 502, description = "The model's server failed", body = Object),
        (status = 504, description = "The model's server did not answer in time", body = Object)
    )
)]
#[post("/chat/completions")]
pub async fn create_chat_completion(
    app: web::Data<App>,
    request: HttpRequest,
    caller: ConversationWriter,
    credential: RawCredential,
    idempotency_key: IdempotencyKey,
    body: LargeJsonText<CompletionRequest>,
) -> Result<HttpResponse> {
    let completion = body.value;
    let session = read_header(&request, SESSION_ID, SessionRef::parse)?;
    let key = read_header(&request, SESSION_KEY, SessionKey::parse)?;
    let (context, own_chat) = caller
        .speaking(&app, completion.user.as_deref(), completion.stores)
        .await?;
    let target = match (session, key, own_chat) {
        (Some(session), key, _) => Target::Session { session, key },
        (None, Some(key), _) => Target::Key(key),
        (None, None, Some(identity)) => Target::Chat {
            identity,
            chat: Chat::DM,
        },
        (None, None, None) => {
            let call = Call::new(
                &app,
                context.tenant_id(),
                context.access.user_id,
                &completion,
            )
            .await?;
            // From here on there are only the bytes that the model is asked.
            drop((completion, body.memory));
            let reader = Reader::stateless(app, context, credential);
            let request_id = middleware::id_of(&request);
            return answer_stateless(call, body.bytes_memory, reader, request_id).await;
        }
    };
    let request = ChatTurnRequest {
        app,
        context,
        credential,
        idempotency_key,
        body_hash: request_hash(&request, body.hash),
        memory: body.memory,
        is_retry: is_retry(&request),
    };
    drop(body.bytes_memory);
    // Apart: a request without a session shall not carry the room for one.
    Box::pin(chat_turn::answer(request, completion, target)).await
}

impl FromJsonText for CompletionRequest {
    fn from_json_text(text: &str) -> Result<Self> {
        Self::read(text)
    }
}

fn read_header<T>(
    request: &HttpRequest,
    name: &str,
    parse: fn(&str, &str) -> Result<T>,
) -> Result<Option<T>> {
    let Some(value) = request.headers().get(name) else {
        return Ok(None);
    };
    let pointer = format!("/header/{name}");
    match value.to_str() {
        Ok(text) => parse(text, &pointer).map(Some),
        Err(_) => {
            let error = FieldError::new(pointer, "must be visible ASCII characters");
            let code = match name {
                SESSION_KEY => Code::InvalidSessionKey,
                _ => Code::InvalidSessionId,
            };
            Err(Error::fields(code, vec![error]))
        }
    }
}

/// What a request asks: its body, and the session it is about. One key for two sessions is a conflict.
fn request_hash(request: &HttpRequest, body: BodyHash) -> BodyHash {
    let mut asked = Vec::new();
    for name in [SESSION_ID, SESSION_KEY] {
        let value = request.headers().get(name);
        asked.push(0);
        asked.extend_from_slice(value.map_or(&[], |value| value.as_bytes()));
    }
    body.with(&asked)
}

fn is_retry(request: &HttpRequest) -> bool {
    let count = request.headers().get(RETRY_COUNT);
    let count = count.and_then(|value| value.to_str().ok()?.parse::<u32>().ok());
    count.is_some_and(|count| count > 0)
}

/// `memory` is held until the model has begun to answer: until then it may be asked again.
async fn answer_stateless(
    call: Call,
    memory: Memory,
    mut reader: Reader,
    request_id: String,
) -> Result<HttpResponse> {
    if !call.wants_stream() {
        let answer = reader.during(call.complete()).await?;
        reader.check().await?;
        let head = &mut HttpResponse::Ok();
        head.insert_header(STATELESS);
        return Ok(head.content_type(ContentType::json()).body(answer));
    }
    let mut opening: Opening = Box::pin(async move {
        let opened = call.stream().await;
        drop(memory);
        opened
    });
    // Until then an error has a status of its own; afterwards the client gets comments while it waits.
    let source = match timeout(KEEP_ALIVE_EVERY, &mut opening).await {
        Ok(opened) => Source::Open(opened?),
        Err(_) => Source::Opening(opening),
    };
    let stream = StatelessStream {
        source,
        reader,
        request_id,
    };
    let mut head = sse::head();
    head.insert_header(STATELESS);
    Ok(sse::respond(head, Batch::default(), stream))
}

type Opening = Pin<Box<dyn Future<Output = Result<CompletionStream>>>>;

/// Where the chunks come from. An answer that has not begun is one future, however often its wait is interrupted.
enum Source {
    Opening(Opening),
    Open(CompletionStream),
}

impl Source {
    fn has_begun(&self) -> bool {
        match self {
            Self::Opening(_) => false,
            Self::Open(answering) => answering.has_begun(),
        }
    }

    /// The next chunk. Nothing is lost when its future is dropped.
    async fn next(&mut self) -> Result<Option<String>> {
        loop {
            match self {
                Self::Opening(opening) => *self = Self::Open(opening.await?),
                Self::Open(answering) => return answering.next().await,
            }
        }
    }
}

/// A stateless answer that is under way.
struct StatelessStream {
    source: Source,
    reader: Reader,
    request_id: String,
}

impl EventSource for StatelessStream {
    /// The chunks that have come by then go in one piece, but the first words go at once.
    async fn fill(&mut self, batch: &mut Batch, until: Instant) -> Result<()> {
        let has_begun = self.source.has_begun();
        let next = self.reader.during(self.source.next());
        let next = timeout_at(until, next).await.ok();
        self.reader.check().await?;
        let Some(first) = next else {
            return Ok(());
        };
        push_chunk(batch, first?);
        while has_begun && !batch.has_ended() && batch.bytes() < MAX_BATCH_BYTES {
            // Lets the connection to the model read on.
            yield_now().await;
            let Some(next) = self.source.next().now_or_never() else {
                break;
            };
            push_chunk(batch, next?);
        }
        Ok(())
    }

    fn error_event(&self, error: &Error) -> Bytes {
        if let Some(failed) = &error.failed_call {
            telemetry::warn_of_failed_call(failed, CallPurpose::Request(&self.request_id));
        } else {
            tracing::warn!(code = error.code.as_str(), "stream aborted: {error}");
        }
        sse::data(&problem::openai_body(error).to_string())
    }
}

fn push_chunk(batch: &mut Batch, chunk: Option<String>) {
    match chunk {
        Some(chunk) => batch.push(sse::data(&chunk)),
        None => {
            batch.push(sse::data("[DONE]"));
            batch.end();
        }
    }
}
