//! Chat in a session: the request becomes a turn, and the turn's stream is rendered as a completion, whole or in chunks.

use std::sync::Arc;
use std::time::Duration;

use actix_web::http::header::{HeaderName, HeaderValue};
use actix_web::web::{self, Bytes};
use actix_web::{HttpResponse, HttpResponseBuilder};
use serde_json::json;
use tokio::time::{Instant, timeout};

use super::chunks::{self, Frame};
use crate::agent_runtime::AgentMember;
use crate::app::App;
use crate::domain::turn::TurnInput;
use crate::domain::turn::completion::CompletionRequest;
use crate::error::{Code, Error, Result};
use crate::fair_queue::{Holder, Permit};
use crate::http::auth::conversation::CallerContext;
use crate::http::auth::credential::RawCredential;
use crate::http::request::idempotency_key::IdempotencyKey;
use crate::http::request::json_body::{BodyHash, SMALL_BYTES, off_this_thread};
use crate::http::response::event_stream;
use crate::http::response::reader::Reader;
use crate::http::response::sse::{self, Batch, EventSource};
use crate::ids::TenantId;
use crate::limits::Memory;
use crate::turns::{self, AcceptedTurn, Target, TurnRequest, TurnStream, Update};

/// Only what comes after it waits for a model.
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(65);

/// A chat request about a session.
pub struct ChatTurnRequest {
    pub app: web::Data<App>,
    pub context: CallerContext,
    pub credential: RawCredential,
    pub idempotency_key: IdempotencyKey,
    pub body_hash: BodyHash,
    /// Of the request, until it is stored.
    pub memory: Memory,
    /// Whether the client says that this is a retry.
    pub is_retry: bool,
}

pub async fn answer(
    request: ChatTurnRequest,
    completion: CompletionRequest,
    target: Target,
) -> Result<HttpResponse> {
    let completion = Arc::new(completion);
    let tenant_id = request.context.tenant_id();
    let connection = request.app.shares.connections(tenant_id, 1)?;
    let accepting = ask(&request, &completion, target);
    let late = |_| Error::new(Code::Timeout, "the request took too long");
    let turn = timeout(ACCEPT_TIMEOUT, accepting).await.map_err(late)??;
    let created = request.app.clock.now().timestamp();
    let frame = Frame::new(turn.turn.id, &completion.model, created);
    let mut head = if completion.stream {
        sse::head()
    } else {
        HttpResponse::Ok()
    };
    for (name, value) in headers(&request.context, &turn.turn) {
        if let Ok(value) = HeaderValue::from_str(&value) {
            head.insert_header((HeaderName::from_static(name), value));
        }
    }
    let conversation_id = turn.turn.name.conversation_id;
    // The model is waited for without the request, and so without the room for it.
    drop(request.memory);
    let answer = ChatAnswer {
        turn,
        frame,
        reader: Reader::new(
            request.app,
            request.context,
            request.credential,
            conversation_id,
        ),
        include_usage: completion.include_usage,
        include_hermes_events: completion.include_hermes_events,
        refusal_bytes: 0,
        _connection: connection,
    };
    let streams = completion.stream;
    drop(completion);
    if streams {
        Ok(answer.stream(head))
    } else {
        answer.whole(head).await
    }
}

async fn ask(
    request: &ChatTurnRequest,
    completion: &Arc<CompletionRequest>,
    target: Target,
) -> Result<TurnStream> {
    let app = &request.app;
    let context = &request.context;
    let input = turn_input(app, context.tenant_id(), completion).await?;
    let models = &app.models;
    let agent = models.get(context.tenant_id(), &completion.model, AgentMember::Model);
    let agent = agent.await?;
    let principal = context.principal();
    let idempotency = request
        .idempotency_key
        .request(principal.clone(), request.body_hash);
    let turn = TurnRequest {
        access: &context.access,
        target,
        agent,
        input,
        principal: &principal,
        is_retry: request.is_retry && idempotency.is_none(),
        on_busy: None,
        reply: None,
    };
    turns::ask(app, context.caller(), turn, idempotency.as_ref()).await
}

/// What is new in the request. A large one is read off the threads that serve requests.
async fn turn_input(
    app: &App,
    tenant_id: TenantId,
    completion: &Arc<CompletionRequest>,
) -> Result<TurnInput> {
    if completion.bytes <= SMALL_BYTES {
        return completion.turn_input();
    }
    let parser = app.shares.parser(Holder::Tenant(tenant_id)).await?;
    let completion = completion.clone();
    off_this_thread(parser, move || completion.turn_input()).await
}

/// The effective session, as far as it is known before the turn has run.
fn headers(context: &CallerContext, turn: &AcceptedTurn) -> Vec<(&'static str, String)> {
    let access = &context.access;
    let session_id = turn.name.public_session_id(turn.session_id, access);
    let mut headers = vec![
        ("x-hermes-session-id", session_id),
        ("x-throughline-conversation-id", turn.name.public_id(access)),
        ("x-throughline-turn-id", turn.id.to_string()),
    ];
    if let Some(session_key) = &turn.session_info.session_key {
        headers.push(("x-hermes-session-key", session_key.clone()));
    }
    if turn.is_replay {
        headers.push(("idempotency-replayed", "true".to_owned()));
    }
    headers
}

/// An answer that is under way.
struct ChatAnswer {
    turn: TurnStream,
    frame: Frame,
    reader: Reader,
    include_usage: bool,
    include_hermes_events: bool,
    /// Bytes of a refusal that the client has got. Stored events have its text alone.
    refusal_bytes: usize,
    /// The client's, as long as it is answered.
    _connection: Permit,
}

impl ChatAnswer {
    async fn whole(mut self, mut head: HttpResponseBuilder) -> Result<HttpResponse> {
        loop {
            self.reader.check().await?;
            let Some(outcome) = self.turn.outcome(self.reader.due()).await? else {
                continue;
            };
            self.reader.check_before_answer().await?;
            let context = &self.reader.context;
            let turn = &self.turn.turn;
            let answer = chunks::answer_of(&outcome).map_err(|error| Error {
                headers: headers(context, turn).into(),
                ..error
            })?;
            let hermes = chunks::hermes(&outcome, &turn.name, &context.access);
            let session_id = hermes["session_id"].as_str().unwrap_or_default();
            head.insert_header(("x-hermes-session-id", session_id));
            let whole = self.frame.whole(&answer, hermes, outcome.usage);
            return Ok(head.json(whole));
        }
    }

    fn stream(mut self, head: HttpResponseBuilder) -> HttpResponse {
        let mut first = Batch::default();
        // How a turn stands that runs here; its answer takes longer.
        if let Some(Update::State(kind)) = self.turn.try_next() {
            first.extend(self.state_event(kind));
        }
        first.push(self.frame.role());
        sse::respond(head, first, self)
    }

    /// Waits for the next update, and takes in what else has come by then.
    async fn collect(&mut self, batch: &mut Batch, until: Instant) -> Result<()> {
        self.reader.check().await?;
        let until = self.reader.due().min(until);
        let mut next = Some(self.turn.next(until).await?);
        while let Some(update) = next {
            self.render(update, batch)?;
            next = if batch.has_ended() {
                None
            } else {
                self.turn.try_next()
            };
        }
        Ok(())
    }

    fn render(&mut self, update: Update, batch: &mut Batch) -> Result<()> {
        match update {
            Update::State(kind) => batch.extend(self.state_event(kind)),
            Update::Delta(piece) => {
                let refusal = piece.delta.get("refusal").and_then(|text| text.as_str());
                let refusal_bytes = refusal.map_or(0, str::len);
                if let Some(chunk) = self.frame.pass(piece.delta, &piece.logprobs) {
                    self.refusal_bytes += refusal_bytes;
                    batch.push(chunk);
                }
            }
            Update::Text(text) => batch.push(self.frame.text(&text)),
            Update::Event(event) if self.include_hermes_events => {
                let access = &self.reader.context.access;
                let body = event_stream::body(&event, &self.turn.turn.name, access);
                batch.push(sse::event(&format!("hermes.{}", event.kind), &body));
            }
            Update::Ended(outcome) => {
                let access = &self.reader.context.access;
                let answer = chunks::answer_of(&outcome)?;
                let hermes = chunks::hermes(&outcome, &self.turn.turn.name, access);
                let usage = self.include_usage.then_some(outcome.usage);
                batch.extend(self.frame.refusal(answer.content, self.refusal_bytes));
                batch.extend(self.frame.end(&answer, &hermes, usage));
                batch.end();
            }
            Update::Event(_) | Update::Idle => {}
        }
        Ok(())
    }

    /// How a turn stands that runs here, ahead of its committed event; for clients that want such events.
    fn state_event(&self, kind: &str) -> Option<Bytes> {
        if !self.include_hermes_events {
            return None;
        }
        let access = &self.reader.context.access;
        let turn = &self.turn.turn;
        let body = json!({
            "turn_id": turn.id,
            "session_id": turn.name.public_session_id(turn.session_id, access),
            "conversation_id": turn.name.public_id(access),
        });
        Some(sse::event(&format!("hermes.{kind}"), &body.to_string()))
    }
}

impl EventSource for ChatAnswer {
    async fn fill(&mut self, batch: &mut Batch, until: Instant) -> Result<()> {
        let collected = self.collect(batch, until).await;
        // Words go to a reader that may read them now, and otherwise nowhere.
        if !batch.is_empty()
            && let Err(error) = self.reader.check_before_words().await
        {
            batch.clear();
            return Err(error);
        }
        collected
    }

    fn error_event(&self, error: &Error) -> Bytes {
        chunks::error(error)
    }
}
