//! Events of a conversation, for its subscribers.

use chrono::{DateTime, Utc};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::domain::conversation::message::Role;
use crate::domain::turn::TurnState;
use crate::ids::{SessionId, TurnId};

pub const TURN_STARTED: &str = "turn.started";
pub const TURN_WAITING: &str = "turn.waiting_client";
pub const MESSAGE_CREATED: &str = "message.created";
pub const MESSAGE_DELTA: &str = "message.delta";
pub const MESSAGE_DISCARDED: &str = "message.discarded";

const TURN_COMPLETED: &str = "turn.completed";
const TURN_FAILED: &str = "turn.failed";
const TURN_CANCELLED: &str = "turn.cancelled";
const TURN_INTERRUPTED: &str = "turn.interrupted";

/// A kind of event, as the reference describes it.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    pub name: &'static str,
    /// The members besides those that every event has.
    pub members: &'static [&'static str],
    pub meaning: &'static str,
}

const fn kind(name: &'static str, members: &'static [&'static str], meaning: &'static str) -> Kind {
    Kind {
        name,
        members,
        meaning,
    }
}

const REASON: &[&str] = &["data.reason"];

/// Every kind of event of a conversation.
pub const KINDS: &[Kind] = &[
    kind(TURN_STARTED, &[], "The turn runs."),
    kind(
        MESSAGE_CREATED,
        &["message"],
        "A message was added to the transcript.",
    ),
    kind(
        MESSAGE_DELTA,
        &["data.text"],
        "A part of a running answer, of the attempt `attempt`.",
    ),
    kind(
        MESSAGE_DISCARDED,
        &["data.discarded_attempt"],
        "The output of that attempt is void: its node was lost, and the model is called again.",
    ),
    kind(
        TURN_WAITING,
        &[],
        "The model called tools of the client, and the turn waits for their results.",
    ),
    kind(
        TURN_COMPLETED,
        REASON,
        "The turn ended with an answer. The reason is null.",
    ),
    kind(
        TURN_FAILED,
        REASON,
        "The turn ended without an answer. The reason is an error code.",
    ),
    kind(
        TURN_CANCELLED,
        REASON,
        "The turn was stopped. The reason says by whom.",
    ),
    kind(
        TURN_INTERRUPTED,
        REASON,
        "The turn gave way to a later message, or the results of its tool calls did not come.",
    ),
];

/// The last event of a turn.
pub const fn of_end(state: TurnState) -> &'static str {
    match state {
        TurnState::Failed => TURN_FAILED,
        TurnState::Cancelled => TURN_CANCELLED,
        TurnState::Interrupted => TURN_INTERRUPTED,
        TurnState::Completed
        | TurnState::Queued
        | TurnState::Running
        | TurnState::WaitingClient => TURN_COMPLETED,
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
            TURN_COMPLETED | TURN_FAILED | TURN_CANCELLED | TURN_INTERRUPTED
        )
    }
}
