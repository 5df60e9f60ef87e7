//! Events of a conversation, for its subscribers.

use chrono::{DateTime, Utc};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::domain::conversation::message::Role;
use crate::domain::turn::TurnState;
use crate::ids::{SessionId, TurnId};

pub const TURN_STARTED: &str = "turn.started";
/// A message was added to the transcript.
pub const MESSAGE_CREATED: &str = "message.created";
/// A part of a running answer.
pub const MESSAGE_DELTA: &str = "message.delta";
/// The output of an attempt is void: its node was lost, and the model is called again.
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

/// An event to insert.
#[derive(Debug, Clone, PartialEq)]
pub struct NewEvent {
    pub kind: &'static str,
    /// The index of its message among those that are inserted with it.
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

    pub const fn of_message(index: usize) -> Self {
        Self {
            kind: MESSAGE_CREATED,
            message: Some(index),
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

/// A committed event.
#[derive(Debug)]
pub struct Event {
    pub seq: i64,
    pub turn_id: TurnId,
    pub attempt: i32,
    pub kind: String,
    pub session_id: SessionId,
    pub conversation_id: SessionId,
    pub data: Option<Box<RawValue>>,
    /// Its message in the present state.
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
    /// The approximate size in memory.
    pub fn size(&self) -> usize {
        let raw = |text: &Option<Box<RawValue>>| text.as_ref().map_or(0, |text| text.get().len());
        let message_size =
            |message: &EventMessage| raw(&message.content) + raw(&message.tool_calls);
        size_of::<Self>() + raw(&self.data) + self.message.as_ref().map_or(0, message_size)
    }

    /// Whether no event follows until the next request.
    pub fn is_turn_idle(&self) -> bool {
        self.ends_turn() || self.kind == TURN_WAITING
    }

    /// Whether no event of its turn follows.
    pub fn ends_turn(&self) -> bool {
        matches!(
            self.kind.as_str(),
            "turn.completed" | "turn.failed" | "turn.cancelled" | "turn.interrupted"
        )
    }
}
