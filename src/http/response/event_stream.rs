//! Streams of events (SSE): their head, how they are written, and that whoever reads one is judged again
//! while they do. A reader is given a batch when it has taken the last one, so a slow one costs no memory.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use actix_web::web::{self, Bytes};
use actix_web::{HttpResponse, HttpResponseBuilder};
use futures_util::stream;
use serde::Serialize;
use serde_json::value::RawValue;
use tokio::time::Instant;

use crate::app::App;
use crate::domain::conversation::session::ConversationHandle;
use crate::domain::people::access::{Access, Visibility};
use crate::domain::turn::event::Event;
use crate::error::{Code, Error, Result};
use crate::http::auth::conversation::CallerContext;
use crate::http::auth::credential::RawCredential;
use crate::ids::{SessionId, SlotId, TurnId};
use crate::limits::StreamGuard;
use crate::retry::Backoff;
use crate::shutdown::Departure;
use crate::streams::{CheckedCredential, Right, Subject};
use crate::turns::Follower;

/// How often whoever reads looks at the shared verdict on its rights, which costs nothing.
const CHECKED: Duration = Duration::from_secs(1);
/// The bounds of the pauses before a check is tried again that the database did not answer.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LAST_PAUSE: Duration = Duration::from_secs(1);
/// How long a check is tried again for which the tenant has too many requests; then the answer breaks off.
const BUSY_LIMIT: Duration = Duration::from_secs(15);
/// So that nobody in between takes a quiet stream for a dead one; and a reader who has left, which shows
/// only when something is written, holds its place no longer than two of them.
pub const HEARTBEAT: Duration = Duration::from_secs(5);
/// How long a client should wait before it comes back.
const COME_BACK_MS: u32 = 500;

pub fn head() -> HttpResponseBuilder {
    let mut head = HttpResponse::Ok();
    head.content_type("text/event-stream")
        .insert_header(("cache-control", "no-cache"))
        // Proxies that buffer would hold the words back.
        .insert_header(("x-accel-buffering", "no"));
    head
}

pub const KEEP_ALIVE: Bytes = Bytes::from_static(b": still here\n\n");

/// Whether a reader may still read. Its credential and its right are checked together with all others of
/// this node (`streams`).
pub struct Allowed {
    pub app: web::Data<App>,
    pub context: CallerContext,
    credential: Arc<CheckedCredential>,
    conversation_id: Option<SessionId>,
    right: Arc<Right>,
    /// Until when the database is not asked before words are shown, because it did not answer.
    away_until: Option<Instant>,
}

impl Allowed {
    pub fn new(
        app: web::Data<App>,
        context: CallerContext,
        credential: RawCredential,
        conversation_id: SessionId,
    ) -> Self {
        Self::of(app, context, credential, Some(conversation_id))
    }

    /// For a call without a session.
    pub fn stateless(
        app: web::Data<App>,
        context: CallerContext,
        credential: RawCredential,
    ) -> Self {
        Self::of(app, context, credential, None)
    }

    fn of(
        app: web::Data<App>,
        context: CallerContext,
        credential: RawCredential,
        conversation_id: Option<SessionId>,
    ) -> Self {
        let subject = Subject::new(context.tenant_id(), &context.access, conversation_id);
        Self {
            credential: credential.share(&app),
            right: app.streams.rights.open(subject),
            app,
            context,
            conversation_id,
            away_until: None,
        }
    }

    /// Only as long as this slot leads to the conversation.
    pub fn through(self, slot_id: Option<SlotId>) -> Self {
        let context = &self.context;
        let subject = Subject::new(context.tenant_id(), &context.access, self.conversation_id);
        Self {
            right: self.app.streams.rights.open(subject.through(slot_id)),
            ..self
        }
    }

    /// When to check next.
    pub fn due(&self) -> Instant {
        Instant::now() + CHECKED
    }

    /// Checks credential, identity and the right to the conversation: asks the database only if nobody on
    /// this node has for a while. While the database does not answer the last verdict stands.
    pub async fn check(&mut self) -> Result<()> {
        let credential = &self.credential;
        self.until_known(async || credential.check(&self.app.verifiers).await)
            .await?;
        if self.right.is_fresh() {
            return self.right.read();
        }
        let now = Instant::now();
        match self.until_known(async || self.check_since(now).await).await {
            Err(error) if error.is_outage() => Ok(()),
            checked => checked,
        }
    }

    /// Repeats a check while the tenant is too busy for it: nothing is shown until somebody knows.
    async fn until_known(&self, check: impl AsyncFn() -> Result<()>) -> Result<()> {
        let until = Instant::now() + BUSY_LIMIT;
        let mut backoff = Backoff::new(FIRST_PAUSE, LAST_PAUSE);
        loop {
            match check().await {
                Err(error) if error.code == Code::Busy && Instant::now() < until => {}
                checked => return checked,
            }
            tokio::select! {
                () = tokio::time::sleep(backoff.next_pause()) => {}
                () = self.lost() => {
                    self.credential.read()?;
                    return self.right.read();
                }
            }
        }
    }

    /// The right to what was read at `since`: as it was then or later.
    pub async fn check_since(&self, since: Instant) -> Result<()> {
        let db = &self.app.db;
        let now = self.app.clock.now();
        self.right.check_since(db, since, now).await
    }

    /// Checks at once: before a whole answer is given.
    pub async fn check_before_answer(&mut self) -> Result<()> {
        let credential = &self.credential;
        self.until_known(async || credential.check_now(&self.app.verifiers).await)
            .await?;
        self.check_before_words().await
    }

    /// Checks the right to what was said up to now, before it is shown. What belongs to no person changes hands
    /// only by being deleted, which ends its turn. While the database does not answer, an answer goes on.
    pub async fn check_before_words(&mut self) -> Result<()> {
        let Visibility::Person(_) = self.context.access.reach else {
            return Ok(());
        };
        let now = Instant::now();
        if self.away_until.is_some_and(|until| now < until) {
            return self.right.read();
        }
        match self.until_known(async || self.check_since(now).await).await {
            Err(error) if error.is_outage() => {
                self.away_until = Some(Instant::now() + CHECKED);
                Ok(())
            }
            checked => checked,
        }
    }

    /// Waits until the reader may not read any more.
    async fn lost(&self) {
        tokio::select! {
            () = self.credential.refused() => {}
            () = self.right.refused() => {}
        }
    }

    /// Does something for the reader, until they may not read any more.
    pub async fn during<T>(&self, doing: impl Future<Output = Result<T>>) -> Result<T> {
        tokio::select! {
            done = doing => done,
            () = self.lost() => {
                self.credential.read()?;
                self.right.read()?;
                Err(Error::not_found("session"))
            }
        }
    }
}

/// An event on the wire.
#[derive(Serialize)]
struct EventBody<'a> {
    turn_id: TurnId,
    session_id: String,
    conversation_id: String,
    attempt: i32,
    created_at: chrono::DateTime<chrono::Utc>,
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<MessageBody<'a>>,
}

#[derive(Serialize)]
struct MessageBody<'a> {
    seq: i64,
    role: &'a str,
    content: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_call_id: Option<&'a str>,
}

/// What an event tells, in the names of whoever reads.
pub fn body(event: &Event, name: &ConversationHandle, access: &Access) -> String {
    let message = event.message.as_ref().map(|message| MessageBody {
        seq: message.seq,
        role: message.role.as_str(),
        content: message.content.as_deref(),
        tool_calls: message.tool_calls.as_deref(),
        tool_call_id: message.tool_call_id.as_deref(),
    });
    let body = EventBody {
        turn_id: event.turn_id,
        session_id: name.shown_link(event.session_id, access),
        conversation_id: name.shown(access),
        attempt: event.attempt,
        created_at: event.created_at,
        data: event.data.as_deref(),
        message,
    };
    serde_json::to_string(&body).unwrap_or_default()
}

/// Somebody who watches a conversation, or one turn of it.
pub struct Watch {
    pub follower: Follower,
    pub allowed: Allowed,
    pub name: ConversationHandle,
    /// Whether it ends with the turn.
    pub of_turn: bool,
    /// Held as long as it is open.
    pub _guard: StreamGuard,
}

struct Watching {
    watch: Watch,
    waiting: VecDeque<Bytes>,
    quiet_since: Instant,
    ended: bool,
    departure: Departure,
}

pub fn respond(watch: Watch) -> HttpResponse {
    let watching = Watching {
        watch,
        waiting: VecDeque::new(),
        quiet_since: Instant::now(),
        ended: false,
        departure: Departure::default(),
    };
    head().streaming(stream::unfold(watching, async |mut watching| {
        let next = watching.next().await?;
        Some((Ok::<Bytes, Error>(next), watching))
    }))
}

impl Watching {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(next) = self.waiting.pop_front() {
                self.quiet_since = Instant::now();
                return Some(next);
            }
            if self.ended {
                return None;
            }
            if let Err(error) = self.look().await {
                self.end(closed(&error));
            }
        }
    }

    async fn look(&mut self) -> Result<()> {
        let watch = &mut self.watch;
        watch.allowed.check().await?;
        let beat = self.quiet_since + HEARTBEAT;
        let app = watch.allowed.app.clone();
        let events = tokio::select! {
            events = next_events(&mut watch.follower, &watch.allowed, beat) => events?,
            () = watch.allowed.lost() => return Ok(()),
            () = self.departure.due(&app.shutdown) => {
                self.end(reconnect());
                return Ok(());
            }
        };
        let access = &watch.allowed.context.access;
        for event in &events {
            let body = body(event, &watch.name, access);
            let text = format!("id: {}\nevent: {}\ndata: {body}\n\n", event.seq, event.kind);
            self.waiting.push_back(Bytes::from(text));
            self.ended |= watch.of_turn && event.ends_turn();
        }
        if events.is_empty() {
            // A turn whose events are no longer kept has nothing to tell but that it has ended.
            self.ended |= watch.of_turn && watch.follower.has_ended().await?;
            if Instant::now() >= beat {
                self.waiting.push_back(KEEP_ALIVE);
            }
        }
        Ok(())
    }

    fn end(&mut self, last: Bytes) {
        self.waiting.push_back(last);
        self.ended = true;
    }
}

/// The next events, for a reader who had the right to read when they were there to be read.
async fn next_events(
    follower: &mut Follower,
    allowed: &Allowed,
    until: Instant,
) -> Result<Vec<Arc<Event>>> {
    let events = follower.next(until).await?;
    let mut backoff = Backoff::new(FIRST_PAUSE, LAST_PAUSE);
    while !events.is_empty() {
        match allowed.check_since(follower.read_at()).await {
            Err(error) if error.is_transient() => tokio::time::sleep(backoff.next_pause()).await,
            checked => {
                checked?;
                break;
            }
        }
    }
    Ok(events)
}

pub fn closed(error: &Error) -> Bytes {
    let code = error.code.as_str();
    Bytes::from(format!("event: closed\ndata: {{\"code\":\"{code}\"}}\n\n"))
}

/// This node ends: another one goes on where this one stopped.
pub fn reconnect() -> Bytes {
    Bytes::from(format!(
        "event: reconnect\nretry: {COME_BACK_MS}\ndata: {{}}\n\n"
    ))
}
