//! Chat in a session: the request becomes a turn, and the answer is told from the turn as it runs here, or
//! from its events where it runs elsewhere.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use actix_web::http::header::{HeaderName, HeaderValue};
use actix_web::web::{self, Bytes};
use actix_web::{HttpResponse, HttpResponseBuilder};
use futures_util::stream;
use serde_json::Value;
use tokio::time::{Instant, timeout};

use super::chunks::{self, Frame};
use super::session_turn::{Next, Source, Turn};
use crate::app::App;
use crate::crypto;
use crate::domain::conversation::session::Permission;
use crate::domain::conversation::session_name::SessionRef;
use crate::domain::turn::TurnInput;
use crate::domain::turn::completion::CompletionRequest;
use crate::domain::turn::event::{Event, MESSAGE_DELTA, MESSAGE_DISCARDED, TURN_STARTED};
use crate::error::{Code, Error, FieldError, Result};
use crate::fair_queue::{Holder, Permit};
use crate::http::auth::conversation::CallerContext;
use crate::http::auth::credential::RawCredential;
use crate::http::request::idempotency_key::IdempotencyKey;
use crate::http::request::json_body::{BodyHash, SMALL_BYTES, off_this_thread};
use crate::http::response::event_stream::{self, Allowed, HEARTBEAT, KEEP_ALIVE};
use crate::idempotency;
use crate::ids::{SessionId, TenantId, TurnId};
use crate::limits::Memory;
use crate::sessions;
use crate::store::TenantTx;
use crate::store::turn::{events, turns as rows};
use crate::turns::{self, Disposition, Follower, Piece, Target, TurnRequest};

/// Only what comes after it waits for a model.
const ACCEPT_WITHIN: Duration = Duration::from_secs(65);

/// A request that is about a session.
pub struct Asking {
    pub app: web::Data<App>,
    pub context: CallerContext,
    pub credential: RawCredential,
    pub retryable: IdempotencyKey,
    pub body_hash: BodyHash,
    /// Of what is asked, until it is stored.
    pub memory: Memory,
    /// Whether the client says that it has asked before.
    pub is_retry: bool,
}

pub async fn answer(
    asking: Asking,
    asked: CompletionRequest,
    place: Target,
) -> Result<HttpResponse> {
    let asked = Arc::new(asked);
    let connection = asking
        .app
        .shares
        .connections(asking.context.tenant_id(), 1)?;
    let accepting = accept(&asking, &asked, place);
    let slow = |_| Error::new(Code::Timeout, "the request took too long");
    let turn = timeout(ACCEPT_WITHIN, accepting).await.map_err(slow)??;
    let wants_stream = asked.stream;
    let include_usage = asked.include_usage;
    let include_hermes_events = asked.include_hermes_events;
    let created = asking.app.clock.now().timestamp();
    let frame = Frame::new(turn.id, &asked.model, created);
    let mut head = if wants_stream {
        event_stream::head()
    } else {
        HttpResponse::Ok()
    };
    for (name, value) in headers(&asking.context, &turn) {
        if let Ok(value) = HeaderValue::from_str(&value) {
            head.insert_header((HeaderName::from_static(name), value));
        }
    }
    let conversation_id = turn.name.conversation_id;
    let Asking {
        app,
        context,
        credential,
        memory,
        ..
    } = asking;
    drop((asked, memory));
    let telling = Telling {
        turn,
        frame,
        allowed: Allowed::new(app, context, credential, conversation_id),
        include_usage,
        include_hermes_events,
        shown: false,
        heard: 0,
        refused: 0,
        known: 0,
        waiting: VecDeque::new(),
        quiet_since: Instant::now(),
        ended: false,
        _connection: connection,
    };
    if wants_stream {
        Ok(telling.stream(head))
    } else {
        telling.whole(head).await
    }
}

async fn accept(asking: &Asking, asked: &Arc<CompletionRequest>, place: Target) -> Result<Turn> {
    let app = &asking.app;
    let context = &asking.context;
    let tenant_id = context.tenant_id();
    let input = turn_input(app, tenant_id, asked).await?;
    let agent = app.models.find(tenant_id, &asked.model).await?;
    let agent = agent.ok_or_else(|| {
        let error = FieldError::new("/model", "there is no such agent");
        Error::fields(Code::ModelNotFound, vec![error])
    })?;
    let limit = agent.limits.tokens_per_minute;
    app.limits.check_tokens(tenant_id, limit).await?;
    let principal = context.principal();
    let said = serde_json::to_vec(&input.messages).map_err(Error::internal)?;
    let goes_on = input.answers_tools();
    let request = asking
        .retryable
        .request(principal.clone(), asking.body_hash);
    let mut tx = context.begin(&app.db).await?;
    if let Some(request) = &request
        && let Some(turn_id) = idempotency::find_turn(app, &mut tx, request).await?
    {
        return attach(asking, tx, turn_id).await;
    }
    let asked = TurnRequest {
        access: &context.access,
        place,
        agent,
        input,
        principal: &principal,
        hash: crypto::sha256(&said),
        is_retry: asking.is_retry && request.is_none(),
        on_busy: None,
        reply: None,
    };
    let accepted = turns::accept(app, &mut tx, asked, app.clock.now()).await?;
    if let Disposition::Attached = accepted.disposition {
        return attach(asking, tx, accepted.turn_id).await;
    }
    if let Some(request) = &request {
        idempotency::note_turn(&mut tx, request, accepted.turn_id).await?;
    }
    // What it said before it waited for its client is no part of this answer.
    let after = if goes_on {
        events::find_last_said(&mut tx, accepted.turn_id).await?
    } else {
        0
    };
    tx.commit().await?;
    let conversation_id = accepted.name.conversation_id;
    let ahead = turns::launch(app, tenant_id, conversation_id, accepted.disposition, true);
    let source = match ahead {
        Some(ahead) => Source::Live(ahead),
        None => follow(asking, conversation_id, accepted.turn_id, 0),
    };
    Ok(Turn {
        id: accepted.turn_id,
        name: accepted.name,
        session_id: accepted.session_id,
        session_info: accepted.session_info,
        after,
        replayed: false,
        source,
    })
}

/// What is new in the request, read off the threads that serve requests where it is large.
async fn turn_input(
    app: &App,
    tenant_id: TenantId,
    asked: &Arc<CompletionRequest>,
) -> Result<TurnInput> {
    if asked.bytes <= SMALL_BYTES {
        return asked.turn_input();
    }
    let parser = app.shares.parser(Holder::Tenant(tenant_id)).await?;
    let asked = asked.clone();
    off_this_thread(parser, move || asked.turn_input()).await
}

fn follow(asking: &Asking, conversation_id: SessionId, turn_id: TurnId, after: i64) -> Source {
    let app = &asking.app;
    let tenant_id = asking.context.tenant_id();
    let follower = Follower::of_turn(app, tenant_id, conversation_id, turn_id, after);
    Source::Events(Box::new(follower.until_idle()))
}

/// Follows a turn that an earlier request became, from what that request said.
async fn attach(asking: &Asking, mut tx: TenantTx, turn_id: TurnId) -> Result<Turn> {
    let access = &asking.context.access;
    let turn = rows::get(&mut tx, turn_id).await?;
    let session = SessionRef::Id(turn.conversation_id);
    let now = asking.app.clock.now();
    let tip = sessions::find(&mut tx, access, &session, Permission::Participate, now).await?;
    let after = events::find_last_said(&mut tx, turn_id).await?;
    tx.commit().await?;
    let source = follow(asking, turn.conversation_id, turn_id, after);
    Ok(Turn {
        id: turn_id,
        name: tip.name,
        session_id: turn.session_id(),
        session_info: turn.session_info,
        after,
        replayed: true,
        source,
    })
}

/// The effective session, as far as it is known before the turn has run.
fn headers(context: &CallerContext, turn: &Turn) -> Vec<(&'static str, String)> {
    let access = &context.access;
    let named = [
        (
            "x-hermes-session-id",
            Some(turn.name.shown_link(turn.session_id, access)),
        ),
        (
            "x-hermes-session-key",
            turn.session_info.session_key.clone(),
        ),
        (
            "x-throughline-conversation-id",
            Some(turn.name.shown(access)),
        ),
        ("x-throughline-turn-id", Some(turn.id.to_string())),
        (
            "idempotency-replayed",
            turn.replayed.then(|| "true".to_owned()),
        ),
    ];
    let given = named.into_iter();
    given
        .filter_map(|(name, value)| Some((name, value?)))
        .collect()
}

/// An answer that is under way.
struct Telling {
    turn: Turn,
    frame: Frame,
    allowed: Allowed,
    include_usage: bool,
    include_hermes_events: bool,
    /// Whether the client has seen words of it.
    shown: bool,
    /// How many bytes of text it has seen.
    heard: usize,
    /// How many bytes of a refusal.
    refused: usize,
    /// Of the text that comes next, how much it has seen before.
    known: usize,
    waiting: VecDeque<Bytes>,
    quiet_since: Instant,
    ended: bool,
    /// The client's, as long as it is answered.
    _connection: Permit,
}

impl Telling {
    async fn whole(mut self, mut head: HttpResponseBuilder) -> Result<HttpResponse> {
        loop {
            self.allowed.check().await?;
            match self.turn.next(self.allowed.due()).await? {
                Next::Ended(outcome) => {
                    self.allowed.check_before_answer().await?;
                    let context = &self.allowed.context;
                    let answered = chunks::said(&outcome).map_err(|error| Error {
                        headers: headers(context, &self.turn).into(),
                        ..error
                    })?;
                    let hermes = chunks::hermes(&outcome, &self.turn.name, &context.access);
                    let usage = outcome.usage;
                    let session_id = hermes["session_id"].as_str().unwrap_or_default();
                    head.insert_header(("x-hermes-session-id", session_id));
                    let whole = self.frame.whole(&answered, hermes, usage);
                    return Ok(head.json(whole));
                }
                Next::Elsewhere | Next::Behind => self.follow_events(),
                Next::Delta(_) | Next::Events(_) | Next::Quiet => {}
            }
        }
    }

    fn stream(mut self, mut head: HttpResponseBuilder) -> HttpResponse {
        if let Source::Live(_) = self.turn.source {
            self.tell_state(TURN_STARTED);
        }
        self.waiting.push_back(self.frame.role());
        head.streaming(stream::unfold(self, async |mut telling| {
            let next = telling.next().await?;
            Some((Ok::<Bytes, Error>(next), telling))
        }))
    }

    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if !self.waiting.is_empty() {
                self.quiet_since = Instant::now();
                return Some(self.claim_waiting());
            }
            if self.ended {
                return None;
            }
            let looked = self.look().await;
            if let Err(error) = self.check_words().await.and(looked) {
                self.waiting.push_back(chunks::error(&error));
                self.ended = true;
            }
        }
    }

    /// What has come is shown to who may read it now, and otherwise to nobody.
    async fn check_words(&mut self) -> Result<()> {
        let checked = if self.waiting.is_empty() {
            Ok(())
        } else {
            self.allowed.check_before_words().await
        };
        if checked.is_err() {
            self.waiting.clear();
        }
        checked
    }

    /// All that there is to send, in one piece.
    fn claim_waiting(&mut self) -> Bytes {
        match self.waiting.len() {
            1 => self.waiting.pop_front().unwrap_or_default(),
            _ => Bytes::from(self.waiting.drain(..).collect::<Vec<_>>().concat()),
        }
    }

    /// Waits for what comes next, and takes in what else has come by then.
    async fn look(&mut self) -> Result<()> {
        self.allowed.check().await?;
        let beat = self.quiet_since + HEARTBEAT;
        let mut next = Some(self.turn.next(self.allowed.due().min(beat)).await?);
        while let Some(come) = next {
            self.take_in(come, beat).await?;
            next = if self.ended {
                None
            } else {
                self.turn.at_hand()
            };
        }
        Ok(())
    }

    async fn take_in(&mut self, next: Next, beat: Instant) -> Result<()> {
        match next {
            Next::Delta(Piece { delta, logprobs }) => {
                let bytes =
                    |name: &str| delta.get(name).and_then(Value::as_str).map_or(0, str::len);
                let text = bytes("content");
                let refusal = bytes("refusal");
                if let Some(passed) = self.frame.pass(delta, &logprobs) {
                    self.shown = true;
                    self.heard += text;
                    self.refused += refusal;
                    self.waiting.push_back(passed);
                }
            }
            Next::Events(events) => {
                for event in &events {
                    self.tell(event)?;
                }
            }
            Next::Ended(outcome) => {
                if let Source::Live(_) = self.turn.source {
                    self.tell_state(outcome.event());
                }
                let access = &self.allowed.context.access;
                let answered = chunks::said(&outcome)?;
                let hermes = chunks::hermes(&outcome, &self.turn.name, access);
                let usage = self.include_usage.then_some(outcome.usage);
                // The events have the text alone.
                let refusal = self.frame.refusal(answered.content, self.refused);
                self.waiting.extend(refusal);
                let last = self.frame.end(&answered, &hermes, usage);
                self.waiting.extend(last);
                self.ended = true;
            }
            Next::Elsewhere if self.shown => return Err(self.lost().await),
            Next::Elsewhere => self.follow_events(),
            Next::Behind => {
                self.known = self.heard;
                self.follow_events();
            }
            Next::Quiet => {
                if Instant::now() >= beat {
                    self.waiting.push_back(KEEP_ALIVE);
                }
            }
        }
        Ok(())
    }

    /// An event of a turn that runs elsewhere.
    fn tell(&mut self, event: &Event) -> Result<()> {
        match event.kind.as_str() {
            MESSAGE_DELTA => {
                let data = event.data.as_ref().map_or("null", |data| data.get());
                let data: Value = serde_json::from_str(data).map_err(Error::internal)?;
                let text = data["text"].as_str().unwrap_or_default();
                let known = self.known.min(text.len());
                self.known -= known;
                if let Some(news) = text.get(known..).filter(|news| !news.is_empty()) {
                    self.shown = true;
                    self.waiting.push_back(self.frame.text(news));
                }
            }
            MESSAGE_DISCARDED if self.shown => return Err(restarted(self.turn.id)),
            kind if self.include_hermes_events => {
                let access = &self.allowed.context.access;
                let body = event_stream::body(event, &self.turn.name, access);
                let text = format!("event: hermes.{kind}\ndata: {body}\n\n");
                self.waiting.push_back(Bytes::from(text));
            }
            _ => {}
        }
        Ok(())
    }

    /// How a turn stands that runs here, ahead of its committed events; for who asked for such events.
    fn tell_state(&mut self, kind: &str) {
        if self.include_hermes_events {
            let access = &self.allowed.context.access;
            let turn = &self.turn;
            let body = serde_json::json!({
                "turn_id": turn.id,
                "session_id": turn.name.shown_link(turn.session_id, access),
                "conversation_id": turn.name.shown(access),
            });
            let text = format!("event: hermes.{kind}\ndata: {body}\n\n");
            self.waiting.push_back(Bytes::from(text));
        }
    }

    fn follow_events(&mut self) {
        self.turn.source = Source::Events(Box::new(self.follower()));
    }

    fn follower(&self) -> Follower {
        let app = &self.allowed.app;
        let tenant_id = self.allowed.context.tenant_id();
        let (turn, conversation_id) = (&self.turn, self.turn.name.conversation_id);
        Follower::of_turn(app, tenant_id, conversation_id, turn.id, turn.after).until_idle()
    }

    /// Why a turn of which words were shown is no longer this node's: somebody stopped it, or it begins anew
    /// elsewhere.
    async fn lost(&self) -> Error {
        let failure = self.follower().failure().await;
        failure.unwrap_or_else(|| restarted(self.turn.id))
    }
}

/// The turn's name stands in the message: clients keep nothing else of an error.
fn restarted(turn_id: TurnId) -> Error {
    let detail = format!(
        "the turn {turn_id} began anew on another node: what was shown is void; read /v1/turns/{turn_id}"
    );
    Error::new(Code::TurnRestarted, detail)
}
