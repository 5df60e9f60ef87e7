//! The events of a conversation, or of one of its turns, as a stream.

use std::sync::Arc;

use actix_web::HttpResponse;
use serde::Serialize;
use serde_json::value::RawValue;
use tokio::time::Instant;

use super::reader::{FIRST_PAUSE, MAX_PAUSE, Reader};
use super::sse::{self, Batch, EventSource};
use crate::domain::conversation::session::ConversationHandle;
use crate::domain::people::access::Access;
use crate::domain::turn::event::Event;
use crate::error::Result;
use crate::ids::TurnId;
use crate::limits::StreamGuard;
use crate::retry::Backoff;
use crate::shutdown::Departure;
use crate::turns::Follower;

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

/// The data of an event, with the ids that its reader knows.
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
        session_id: name.public_session_id(event.session_id, access),
        conversation_id: name.public_id(access),
        attempt: event.attempt,
        created_at: event.created_at,
        data: event.data.as_deref(),
        message,
    };
    serde_json::to_string(&body).unwrap_or_default()
}

/// What a reader follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    Conversation,
    /// The stream ends with the turn.
    Turn,
}

/// A stream of events that is open.
pub struct ConversationEvents {
    pub follower: Follower,
    pub reader: Reader,
    pub name: ConversationHandle,
    pub scope: Scope,
    /// Held as long as it is open.
    pub _guard: StreamGuard,
}

struct OpenStream {
    events: ConversationEvents,
    departure: Departure,
}

pub fn respond(events: ConversationEvents) -> HttpResponse {
    let stream = OpenStream {
        events,
        departure: Departure::default(),
    };
    sse::respond(sse::head(), Batch::default(), stream)
}

impl EventSource for OpenStream {
    async fn fill(&mut self, batch: &mut Batch, until: Instant) -> Result<()> {
        let ConversationEvents {
            follower,
            reader,
            name,
            scope,
            ..
        } = &mut self.events;
        reader.check().await?;
        let app = reader.app.clone();
        let found = tokio::select! {
            found = next_events(follower, reader, until) => found?,
            () = reader.lost() => return Ok(()),
            () = self.departure.due(&app.shutdown) => {
                batch.push(sse::reconnect());
                batch.end();
                return Ok(());
            }
        };
        let is_turn = *scope == Scope::Turn;
        for event in &found {
            let body = body(event, name, &reader.context.access);
            batch.push(sse::event_with_id(event.seq, &event.kind, &body));
            if is_turn && event.ends_turn() {
                batch.end();
            }
        }
        // A turn whose events have expired has ended too, without one.
        if found.is_empty() && is_turn && follower.has_ended().await? {
            batch.end();
        }
        Ok(())
    }
}

/// The next events, for a reader that had the right to read when they were read.
async fn next_events(
    follower: &mut Follower,
    reader: &Reader,
    until: Instant,
) -> Result<Vec<Arc<Event>>> {
    let events = follower.next(until).await?;
    let mut backoff = Backoff::new(FIRST_PAUSE, MAX_PAUSE);
    while !events.is_empty() {
        match reader.check_since(follower.read_at()).await {
            Err(error) if error.is_transient() => tokio::time::sleep(backoff.next_pause()).await,
            checked => {
                checked?;
                break;
            }
        }
    }
    Ok(events)
}
