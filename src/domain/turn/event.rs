//! What happens in a conversation, as whoever watches it is told.

use chrono::{DateTime, Utc};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::domain::conversation::message::Role;
use crate::domain::turn::TurnState;
use crate::ids::{SessionId, TurnId};

pub const TURN_STARTED: &str = "turn.started";
/// Something was said and is in the transcript.
pub const MESSAGE_CREATED: &str = "message.created";
/// A piece of an answer that is under way.
pub const MESSAGE_DELTA: &str = "message.delta";
/// What was said in an attempt is void: its node was lost, and the model is asked again.
pub const MESSAGE_DISCARDED: &str = "message.discarded";
pub const TURN_WAITING: &str = "turn.waiting_client";

/// The last event of a turn.
pub const fn of_end(state: TurnState) -> &'static str {
    match state {
        TurnState::Failed => "turn.failed",
        TurnState::Cancelled => "turn.cancelled",
        TurnState::Interrupted => "turn.interrupted",
        TurnState::Completed
        | TurnState::Queued
        | TurnState::Running
        | TurnState::WaitingClient => "turn.completed",
    }
}

/// An event that is to be written.
#[derive(Debug, Clone, PartialEq)]
pub struct NewEvent {
    pub kind: &'static str,
    /// Of the messages that are written with it, the one it names.
    pub message: Option<usize>,
    pub data: Option<Value>,
}

impl NewEvent {
    pub const fn new(kind: &'static str) -> Self {
        Self {
            kind,
            message: None,
            data: None,
        }
    }

    pub const fn of_message(place: usize) -> Self {
        Self {
            kind: MESSAGE_CREATED,
            message: Some(place),
            data: None,
        }
    }

    pub fn delta(text: String) -> Self {
        Self::new(MESSAGE_DELTA).with(serde_json::json!({ "text": text }))
    }

    pub fn with(self, data: Value) -> Self {
        Self {
            data: Some(data),
            ..self
        }
    }
}

/// An event that was committed.
#[derive(Debug)]
pub struct Event {
    pub seq: i64,
    pub turn_id: TurnId,
    pub attempt: i32,
    pub kind: String,
    pub session_id: SessionId,
    pub conversation_id: SessionId,
    pub data: Option<Box<RawValue>>,
    /// The message it names, as it stands now.
    pub message: Option<EventMessage>,
    pub created_at: DateTime<Utc>,
}

#[derive(Debug)]
pub struct EventMessage {
    pub seq: i64,
    pub role: Role,
    pub content: Option<Box<RawValue>>,
    pub tool_calls: Option<Box<RawValue>>,
    pub tool_call_id: Option<String>,
}

impl Event {
    /// About how much memory it takes.
    pub fn size(&self) -> usize {
        let raw = |text: &Option<Box<RawValue>>| text.as_ref().map_or(0, |text| text.get().len());
        let said = |message: &EventMessage| raw(&message.content) + raw(&message.tool_calls);
        size_of::<Self>() + raw(&self.data) + self.message.as_ref().map_or(0, said)
    }

    /// Whether nothing comes after it until somebody asks again.
    pub fn idle_turn(&self) -> bool {
        self.ends_turn() || self.kind == TURN_WAITING
    }

    /// Whether nothing of its turn comes after it.
    pub fn ends_turn(&self) -> bool {
        matches!(
            self.kind.as_str(),
            "turn.completed" | "turn.failed" | "turn.cancelled" | "turn.interrupted"
        )
    }
}
