//! Turns: one accepted message and everything the agent does to answer it. The state and the input of a
//! turn, and the admission of another one to a conversation.

pub mod answer;
pub mod completion;
pub mod completion_object;
pub mod demo_model;
pub mod event;
pub mod prompt;
pub mod prompt_messages;
pub mod token_estimate;

use chrono::{DateTime, TimeDelta, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::domain::conversation::message::{Content, MessageKind, NewMessage, Role, ToolCall};
use crate::domain::tenant::agent::OnBusy;
use crate::domain::turn::completion::TokenUsage;
use crate::domain::values::raw_members::RawMembers;
use crate::domain::values::text_enum::text_enum;
use crate::error::{Code, Error, FieldError, Result};
use crate::ids::{BootId, IdentityId, SessionId, TurnId};

/// The most queued messages of one conversation.
pub const MAX_QUEUED: i64 = 100;
/// A turn that was lost with its node this many times is not retried.
pub const MAX_LOST: i32 = 5;
/// How long a turn waits for the results of client tools.
pub const CLIENT_TOOL_TIMEOUT: TimeDelta = TimeDelta::minutes(10);

text_enum!(
    /// How a turn stands. The last four are its end.
    TurnState {
        Queued = "queued",
        Running = "running",
        WaitingClient = "waiting_client",
        Completed = "completed",
        Failed = "failed",
        Cancelled = "cancelled",
        Interrupted = "interrupted",
    }
);

impl TurnState {
    pub const fn has_ended(self) -> bool {
        match self {
            Self::Queued | Self::Running | Self::WaitingClient => false,
            Self::Completed | Self::Failed | Self::Cancelled | Self::Interrupted => true,
        }
    }
}

text_enum!(
    /// Why a turn was stopped. A turn that failed has the code of its error as its reason.
    StopReason {
        /// Somebody asked for it.
        Cancelled = "cancelled",
        /// Another message came, and the agent lets messages interrupt.
        Superseded = "superseded",
        /// Nobody brought the results of the client's tools.
        ToolResultsMissing = "tool_results_missing",
        TenantSuspended = "tenant_suspended",
        ConversationDeleted = "conversation_deleted",
        UserErased = "person_erased",
    }
);

impl StopReason {
    /// In which state a turn ends that is stopped for this.
    pub const fn state(self) -> TurnState {
        match self {
            Self::Superseded | Self::ToolResultsMissing => TurnState::Interrupted,
            Self::Cancelled
            | Self::TenantSuspended
            | Self::ConversationDeleted
            | Self::UserErased => TurnState::Cancelled,
        }
    }

    /// What was asked of a running turn, as its row holds it.
    pub fn from_stop_request(text: Option<&str>) -> Self {
        match text {
            Some("superseded") => Self::Superseded,
            Some(_) | None => Self::Cancelled,
        }
    }
}

/// The accepted input of a turn: everything that any node needs to run it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TurnInput {
    pub messages: Vec<NewMessage>,
    /// The request's instruction for this turn, which is no part of the transcript.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instruction: Option<String>,
    /// Members of the request that are forwarded to the model's server unchanged.
    #[serde(default, skip_serializing_if = "RawMembers::is_empty")]
    pub options: RawMembers,
}

impl TurnInput {
    /// User messages with these contents, without instruction and options.
    pub fn from_contents(contents: impl IntoIterator<Item = Content>) -> Self {
        let message = |content| NewMessage {
            role: Role::User,
            kind: MessageKind::Normal,
            content: Some(content),
            tool_calls: None,
            tool_call_id: None,
            token_count: None,
            extra: None,
        };
        Self {
            messages: contents.into_iter().map(message).collect(),
            instruction: None,
            options: RawMembers::default(),
        }
    }

    /// Whether the client has a tool of this name.
    pub fn has_client_tool(&self, name: &str) -> bool {
        /// The name of a tool.
        #[derive(Deserialize)]
        struct Tool {
            function: ToolName,
        }
        #[derive(Deserialize)]
        struct ToolName {
            name: String,
        }
        let tools = self.options.read::<Vec<Box<RawValue>>>("tools");
        let mut tools = tools.iter().flatten();
        tools.any(|tool| {
            let tool = serde_json::from_str::<Tool>(tool.get());
            tool.is_ok_and(|tool| tool.function.name == name)
        })
    }

    /// Whether it consists of tool results.
    pub fn has_tool_results(&self) -> bool {
        let first = self.messages.first();
        first.is_some_and(|message| message.role == Role::Tool)
    }
}

/// The session's properties in the response to the accepted turn.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionInfo {
    pub session_key: Option<String>,
    pub memory_key: Option<String>,
    pub requested_session_id: Option<String>,
    pub reset: Option<ResetInfo>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = ToldReset)]
pub struct ResetInfo {
    pub reason: String,
    pub previous_session_id: String,
}

/// A stored turn.
#[derive(Debug, Clone)]
pub struct Turn {
    pub id: TurnId,
    pub conversation_id: SessionId,
    pub turn_no: i64,
    pub state: TurnState,
    pub reason: Option<String>,
    pub detail: Option<String>,
    pub agent: String,
    pub identity_id: Option<IdentityId>,
    pub session_info: SessionInfo,
    pub start_session_id: Option<SessionId>,
    pub end_session_id: Option<SessionId>,
    pub finish_reason: Option<String>,
    pub attempt: i32,
    pub node: Option<BootId>,
    pub usage: TokenUsage,
    pub created_at: DateTime<Utc>,
    pub started_at: Option<DateTime<Utc>>,
    pub ended_at: Option<DateTime<Utc>>,
}

impl Turn {
    /// The session with the turn's answer: the one it ended in, or its present one.
    pub fn session_id(&self) -> SessionId {
        self.end_session_id
            .or(self.start_session_id)
            .unwrap_or(self.conversation_id)
    }

    pub fn compressed(&self) -> bool {
        self.end_session_id.is_some() && self.end_session_id != self.start_session_id
    }

    /// The error of a turn without an answer. It is final: a retry does not change it.
    pub fn failure(&self) -> Error {
        let reason = self.reason.as_deref().unwrap_or_default();
        let code = match self.state {
            TurnState::Cancelled | TurnState::Interrupted => Code::TurnStopped,
            TurnState::Failed => Code::parse(reason).unwrap_or(Code::Internal),
            TurnState::Queued
            | TurnState::Running
            | TurnState::WaitingClient
            | TurnState::Completed => Code::Internal,
        };
        let detail = self.detail.clone().unwrap_or_else(|| reason.to_owned());
        Error {
            is_final: true,
            ..Error::new(code, format!("turn {}: {detail}", self.id))
        }
    }
}

/// The load of a locked conversation.
#[derive(Debug, Clone, Default)]
pub struct ConversationLoad {
    /// The turn that runs or waits for its client.
    pub active: Option<(TurnId, TurnState)>,
    pub queued: i64,
    /// Running turns of the whole tenant.
    pub running_in_tenant: i64,
}

/// The admission of a new message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    Start,
    Queue,
    /// It waits for the running turn, which is cancelled.
    Interrupt(TurnId),
    /// It ends the turn that waits for client tools, and starts.
    Supersede(TurnId),
}

impl ConversationLoad {
    /// A turn that waits for client tools is active only until the next message.
    pub fn admit(&self, on_busy: OnBusy, concurrent_turns: u32) -> Result<Admission> {
        let Some((active, state)) = self.active else {
            if self.queued > 0 {
                return self.queue();
            }
            if self.running_in_tenant >= i64::from(concurrent_turns) {
                return Err(too_many_turns(concurrent_turns));
            }
            return Ok(Admission::Start);
        };
        if state == TurnState::WaitingClient && self.queued == 0 {
            return Ok(Admission::Supersede(active));
        }
        match on_busy {
            OnBusy::Queue => self.queue(),
            OnBusy::Interrupt => self.queue().map(|_| Admission::Interrupt(active)),
            OnBusy::Reject => Err(session_busy(active)),
        }
    }

    fn queue(&self) -> Result<Admission> {
        if self.queued >= MAX_QUEUED {
            let detail = format!("{MAX_QUEUED} messages are queued in this conversation");
            return Err(Error {
                retry_after: Some(1),
                ..Error::new(Code::QueueFull, detail)
            });
        }
        Ok(Admission::Queue)
    }
}

pub fn too_many_turns(concurrent_turns: u32) -> Error {
    let detail = format!("the limit is {concurrent_turns} turns at one time");
    Error {
        retry_after: Some(1),
        ..Error::new(Code::TooManyTurns, detail)
    }
}

pub fn session_busy(active: TurnId) -> Error {
    Error {
        retry_after: Some(1),
        ..Error::new(Code::SessionBusy, format!("the turn {active} is active"))
    }
}

/// Matches a client's results to the calls that its turn waits for, in the order of the calls. Missing
/// results are `None`.
pub fn match_results<'a>(
    calls: &'a [ToolCall],
    results: &'a [NewMessage],
) -> Result<Vec<(&'a ToolCall, Option<&'a NewMessage>)>> {
    for (index, message) in results.iter().enumerate() {
        let Some(id) = &message.tool_call_id else {
            continue;
        };
        if !calls.iter().any(|call| call.id == *id) {
            return Err(unknown_call(index));
        }
    }
    let answer_to = |call: &ToolCall| {
        let answers = |message: &&NewMessage| message.tool_call_id.as_deref() == Some(&*call.id);
        results.iter().find(answers)
    };
    Ok(calls.iter().map(|call| (call, answer_to(call))).collect())
}

pub fn unknown_call(place: usize) -> Error {
    let pointer = format!("/messages/{place}/tool_call_id");
    let error = FieldError::new(pointer, "no turn is waiting for this tool call");
    Error::fields(Code::ToolCallUnknown, vec![error])
}

/// The result of a tool call with an unknown outcome.
pub fn interrupted_result(call_id: &str, why: &str) -> NewMessage {
    NewMessage::tool_result(call_id, &format!("[interrupted: {why}]"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn load(state: Option<TurnState>, queued: i64, running: i64) -> ConversationLoad {
        ConversationLoad {
            active: state.map(|state| (TurnId::generate(), state)),
            queued,
            running_in_tenant: running,
        }
    }

    #[test]
    fn a_conversation_admits_one_turn_at_a_time() {
        use TurnState::{Running, WaitingClient};
        let code =
            |load: &ConversationLoad, on_busy| load.admit(on_busy, 2).err().map(|error| error.code);
        assert_eq!(
            load(None, 0, 1).admit(OnBusy::Reject, 2).unwrap(),
            Admission::Start
        );
        assert_eq!(
            code(&load(None, 0, 2), OnBusy::Queue),
            Some(Code::TooManyTurns)
        );
        let running = load(Some(Running), 3, 2);
        let active = running.active.unwrap().0;
        assert_eq!(running.admit(OnBusy::Queue, 2).unwrap(), Admission::Queue);
        assert_eq!(
            running.admit(OnBusy::Interrupt, 2).unwrap(),
            Admission::Interrupt(active)
        );
        assert_eq!(code(&running, OnBusy::Reject), Some(Code::SessionBusy));
        for on_busy in [OnBusy::Queue, OnBusy::Interrupt] {
            let full = load(Some(Running), MAX_QUEUED, 1);
            assert_eq!(code(&full, on_busy), Some(Code::QueueFull));
        }
        let waiting = load(Some(WaitingClient), 0, 0);
        let active = waiting.active.unwrap().0;
        assert_eq!(
            waiting.admit(OnBusy::Reject, 2).unwrap(),
            Admission::Supersede(active)
        );
    }

    #[test]
    fn results_are_matched_to_the_pending_calls() {
        let call = |id: &str| -> ToolCall {
            serde_json::from_value(json!({"id": id, "type": "function",
                                          "function": {"name": "f", "arguments": "{}"}}))
            .unwrap()
        };
        let calls = [call("a"), call("b")];
        let results = [NewMessage::tool_result("b", "two")];
        let matched = match_results(&calls, &results).unwrap();
        assert_eq!(matched[0], (&calls[0], None));
        assert_eq!(matched[1], (&calls[1], Some(&results[0])));
        let unknown = [NewMessage::tool_result("c", "x")];
        let error = match_results(&calls, &unknown).unwrap_err();
        assert_eq!(error.code, Code::ToolCallUnknown);
        assert_eq!(error.errors[0].pointer, "/messages/0/tool_call_id");
    }
}
