//! Streams of events (SSE): their head, how they are written, and that whoever reads one is judged again
//! while they do. A reader is given a batch when it has taken the last one, so a slow one costs no memory.

use std::collections::VecDeque;
use std::time::Duration;

use actix_web::web::{self, Bytes};
use actix_web::{HttpResponse, HttpResponseBuilder};
use futures_util::stream;
use serde::Serialize;
use serde_json::value::RawValue;
use tokio::time::Instant;

use super::acting::Acting;
use super::callers::Credential;
use crate::app::App;
use crate::domain::event::Event;
use crate::domain::session::{ChainName, Need};
use crate::domain::session_name::SessionRef;
use crate::domain::viewer::{Reach, Viewer};
use crate::error::{Code, Error, Result};
use crate::ids::{SessionId, SlotId, TurnId};
use crate::limits::StreamGuard;
use crate::sessions;
use crate::store::slots;
use crate::turns::Follower;

/// How often whoever reads is judged again.
const JUDGED: Duration = Duration::from_secs(3);
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

pub const ALIVE: Bytes = Bytes::from_static(b": still here\n\n");

/// Whether a reader may still read.
pub struct Allowed {
    pub app: web::Data<App>,
    pub acting: Acting,
    credential: Credential,
    conversation_id: SessionId,
    /// The slot that has to lead there.
    slot_id: Option<SlotId>,
    judged_at: Instant,
}

impl Allowed {
    pub fn new(
        app: web::Data<App>,
        acting: Acting,
        credential: Credential,
        conversation_id: SessionId,
    ) -> Self {
        Self {
            app,
            acting,
            credential,
            conversation_id,
            slot_id: None,
            judged_at: Instant::now(),
        }
    }

    /// Only as long as this slot leads to the conversation.
    pub fn through(self, slot_id: Option<SlotId>) -> Self {
        Self { slot_id, ..self }
    }

    /// When it is to be judged next.
    pub fn due(&self) -> Instant {
        self.judged_at + JUDGED
    }

    /// Judges credential, account and the right to the conversation, if it is time. While the database does
    /// not answer the last judgement stands.
    pub async fn check(&mut self) -> Result<()> {
        if Instant::now() < self.due() {
            return Ok(());
        }
        self.judged_at = Instant::now();
        match self.judge().await {
            Err(error) if matches!(error.code, Code::Unavailable | Code::Timeout) => Ok(()),
            judged => judged,
        }
    }

    /// Checks at once: before a whole answer is given. What belongs to no person changes hands only by being
    /// deleted, which ends its turn.
    pub async fn check_before_answer(&mut self) -> Result<()> {
        if let Reach::Person(_) = self.acting.viewer.reach {
            self.judged_at = Instant::now() - JUDGED;
            return self.check().await;
        }
        self.credential.check(&self.app).await
    }

    async fn judge(&self) -> Result<()> {
        self.credential.check(&self.app).await?;
        let mut tx = self.acting.begin(&self.app.db).await?;
        self.acting.check_present(&mut tx).await?;
        let session = SessionRef::Id(self.conversation_id);
        let now = self.app.clock.now();
        let viewer = &self.acting.viewer;
        sessions::find(&mut tx, viewer, &session, Need::ReadOrSpeak, now).await?;
        if let Some(slot_id) = self.slot_id
            && slots::find_leading(&mut tx, slot_id).await? != Some(self.conversation_id)
        {
            let detail = "the key leads to another session now";
            return Err(Error::new(Code::SessionMoved, detail));
        }
        tx.commit().await
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
pub fn body(event: &Event, name: &ChainName, viewer: &Viewer) -> String {
    let message = event.message.as_ref().map(|message| MessageBody {
        seq: message.seq,
        role: message.role.as_str(),
        content: message.content.as_deref(),
        tool_calls: message.tool_calls.as_deref(),
        tool_call_id: message.tool_call_id.as_deref(),
    });
    let body = EventBody {
        turn_id: event.turn_id,
        session_id: name.shown_link(event.session_id, viewer),
        conversation_id: name.shown(viewer),
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
    pub name: ChainName,
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
}

pub fn respond(watch: Watch) -> HttpResponse {
    let watching = Watching {
        watch,
        waiting: VecDeque::new(),
        quiet_since: Instant::now(),
        ended: false,
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
        let until = watch.allowed.due().min(beat);
        let draining = watch.allowed.app.draining.clone();
        let events = tokio::select! {
            events = watch.follower.next(until) => events?,
            () = draining.cancelled() => {
                self.end(reconnect());
                return Ok(());
            }
        };
        let viewer = &watch.allowed.acting.viewer;
        for event in &events {
            let body = body(event, &watch.name, viewer);
            let text = format!("id: {}\nevent: {}\ndata: {body}\n\n", event.seq, event.kind);
            self.waiting.push_back(Bytes::from(text));
            self.ended |= watch.of_turn && event.ends_turn();
        }
        if events.is_empty() {
            // A turn whose events are no longer kept has nothing to tell but that it has ended.
            self.ended |= watch.of_turn && watch.follower.has_ended().await?;
            if Instant::now() >= beat {
                self.waiting.push_back(ALIVE);
            }
        }
        Ok(())
    }

    fn end(&mut self, last: Bytes) {
        self.waiting.push_back(last);
        self.ended = true;
    }
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
