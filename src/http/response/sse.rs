//! Server-sent events: how they are written, and the pump that every stream of them runs on. A reader gets a batch
//! when it has taken the last one, so a slow one costs no memory.

use std::fmt::{Display, Write};
use std::time::Duration;

use actix_web::web::Bytes;
use actix_web::{HttpResponse, HttpResponseBuilder};
use futures_util::stream;
use tokio::time::Instant;

use crate::error::{Error, Result};

/// So that no proxy takes a quiet stream for a dead one; and a reader who has left, which shows only when something
/// is written, holds its place no longer than two of them.
pub const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(5);
const KEEP_ALIVE: Bytes = Bytes::from_static(b": still here\n\n");
/// How long a client should wait before it comes back.
const RECONNECT_MS: u32 = 500;

pub fn head() -> HttpResponseBuilder {
    let mut head = HttpResponse::Ok();
    head.content_type("text/event-stream")
        .insert_header(("cache-control", "no-cache"))
        // Proxies that buffer would hold the words back.
        .insert_header(("x-accel-buffering", "no"));
    head
}

/// An event without a name.
pub fn data(data: &str) -> Bytes {
    let mut event = String::with_capacity(data.len() + 8);
    for part in ["data: ", data, "\n\n"] {
        event.push_str(part);
    }
    Bytes::from(event)
}

/// An event of a name, on one line of data.
pub fn event(name: &str, data: &str) -> Bytes {
    Bytes::from(format!("event: {name}\ndata: {data}\n\n"))
}

/// The same, with the id from which a client resumes.
pub fn event_with_id(id: impl Display, name: &str, data: &str) -> Bytes {
    let mut event = String::with_capacity(data.len() + name.len() + 64);
    let _ = write!(event, "id: {id}\nevent: {name}\ndata: {data}\n\n");
    Bytes::from(event)
}

/// The last event of a stream that ends with an error.
pub fn closed(error: &Error) -> Bytes {
    let code = error.code.as_str();
    event("closed", &format!("{{\"code\":\"{code}\"}}"))
}

/// The last event of a stream whose node stops: another node goes on where it ended.
pub fn reconnect() -> Bytes {
    Bytes::from(format!(
        "event: reconnect\nretry: {RECONNECT_MS}\ndata: {{}}\n\n"
    ))
}

/// What is sent in one piece.
#[derive(Default)]
pub struct Batch {
    pieces: Vec<Bytes>,
    bytes: usize,
    is_last: bool,
}

impl Batch {
    pub fn push(&mut self, event: Bytes) {
        self.bytes += event.len();
        self.pieces.push(event);
    }

    pub fn extend(&mut self, events: impl IntoIterator<Item = Bytes>) {
        events.into_iter().for_each(|event| self.push(event));
    }

    /// The stream ends with this batch.
    pub fn end(&mut self) {
        self.is_last = true;
    }

    pub fn has_ended(&self) -> bool {
        self.is_last
    }

    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn clear(&mut self) {
        self.pieces.clear();
        self.bytes = 0;
    }

    fn take(&mut self) -> Bytes {
        self.bytes = 0;
        match self.pieces.len() {
            1 => self.pieces.pop().unwrap_or_default(),
            _ => Bytes::from(std::mem::take(&mut self.pieces).concat()),
        }
    }
}

/// Where the events of a stream come from.
pub(in crate::http) trait EventSource {
    /// Waits for what comes next, until `until` at most, and puts it into `batch`. What comes with an error is sent
    /// before it, unless the batch was cleared.
    async fn fill(&mut self, batch: &mut Batch, until: Instant) -> Result<()>;

    /// How the client learns of an error, which ends the stream.
    fn error_event(&self, error: &Error) -> Bytes {
        closed(error)
    }
}

struct Pump<S> {
    source: S,
    batch: Batch,
    quiet_since: Instant,
}

impl<S: EventSource> Pump<S> {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if !self.batch.is_empty() {
                self.quiet_since = Instant::now();
                return Some(self.batch.take());
            }
            if self.batch.has_ended() {
                return None;
            }
            let keep_alive_at = self.quiet_since + KEEP_ALIVE_EVERY;
            if let Err(error) = self.source.fill(&mut self.batch, keep_alive_at).await {
                self.batch.push(self.source.error_event(&error));
                self.batch.end();
            }
            if self.batch.is_empty() && !self.batch.has_ended() && Instant::now() >= keep_alive_at {
                self.batch.push(KEEP_ALIVE);
            }
        }
    }
}

/// Streams what `source` gives, after `first`.
pub(in crate::http) fn respond(
    mut head: HttpResponseBuilder,
    first: Batch,
    source: impl EventSource + 'static,
) -> HttpResponse {
    let pump = Pump {
        source,
        batch: first,
        quiet_since: Instant::now(),
    };
    head.streaming(stream::unfold(pump, async |mut pump| {
        let next = pump.next().await?;
        Some((Ok::<Bytes, Error>(next), pump))
    }))
}
