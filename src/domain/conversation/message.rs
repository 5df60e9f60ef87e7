//! Messages: what a client may send, what is stored, and how many tokens a model counts.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use utoipa::openapi::schema::{
    AdditionalProperties, ArrayBuilder, ObjectBuilder, OneOfBuilder, Type,
};
use utoipa::openapi::{RefOr, Schema};

use crate::domain::conversation::message_extra::Extra;
use crate::domain::turn::token_estimate::{self, weight_of_text, weight_of_value};
use crate::domain::values::text_enum::text_enum;
use crate::error::{Code, Error, FieldError, Result};
use crate::ids::{SessionId, TurnId};

/// The most messages of one call.
pub const MAX_MESSAGES: usize = 1000;
const MAX_PARTS: usize = 256;
const MAX_TOOL_CALLS: usize = 128;
const MAX_ID_CHARS: usize = 256;
pub const MAX_CONTENT_CHARS: usize = 1024 * 1024;
/// The cost of a value in a part or a tool call, in addition to its characters, and how much of that cost is
/// free: so a message in parts may be as long as one text.
const VALUE_CHARS: usize = 16;
const FRAME_CHARS: usize = 64 * MAX_PARTS;
pub const MAX_TOKENS: u32 = 10_000_000;

text_enum!(
    /// The role of a message's author.
    Role { System = "system", User = "user", Assistant = "assistant", Tool = "tool" }
);
text_enum!(
    /// The purpose of a message in the conversation.
    MessageKind { Normal = "normal", Summary = "summary", Handoff = "handoff", Notice = "notice" }
);

/// A text, or a list of parts as in OpenAI's API; stored as the client sent it.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Content(Value);

impl Content {
    pub fn text(text: &str) -> Self {
        Self(Value::from(text))
    }

    /// An assistant's refusal in OpenAI's form, after the text before it.
    pub fn refusal(text: &str, refusal: &str) -> Self {
        let refusal = json!({"type": "refusal", "refusal": refusal});
        Self(if text.is_empty() {
            json!([refusal])
        } else {
            json!([{"type": "text", "text": text}, refusal])
        })
    }

    pub fn value(&self) -> &Value {
        &self.0
    }
}

/// Whether a text has more characters. They are only counted where the number of bytes does not decide it.
pub fn is_longer(text: &str, max_chars: usize) -> bool {
    text.len() > max_chars && text.chars().count() > max_chars
}

/// The characters of all names and texts in a value, and the cost of the values.
fn count_chars(value: &Value) -> usize {
    let inside = match value {
        Value::String(text) => text.chars().count(),
        Value::Array(items) => items.iter().map(count_chars).sum(),
        Value::Object(members) => members
            .iter()
            .map(|(name, value)| name.chars().count() + count_chars(value))
            .sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    };
    VALUE_CHARS + inside
}

/// The readable text of a content: its texts and refusals.
pub fn display_text(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => {
            let text = |part: &Value| {
                part["text"]
                    .as_str()
                    .or(part["refusal"].as_str())
                    .map(str::to_owned)
            };
            parts.iter().filter_map(text).collect::<Vec<_>>().join("\n")
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => String::new(),
    }
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let is_part = |part: &Value| part.get("type").is_some_and(Value::is_string);
        let is_long = match &value {
            Value::String(text) => is_longer(text, MAX_CONTENT_CHARS),
            Value::Array(parts) => {
                let texts = parts.iter().filter_map(|part| part["text"].as_str());
                let is_long = |text: &str| is_longer(text, MAX_CONTENT_CHARS);
                let together = count_chars(&value);
                together > MAX_CONTENT_CHARS + FRAME_CHARS || texts.into_iter().any(is_long)
            }
            Value::Object(_) | Value::Null | Value::Bool(_) | Value::Number(_) => false,
        };
        if is_long {
            let detail = format!(
                "a text, or what is in all parts, has at most {MAX_CONTENT_CHARS} characters"
            );
            return Err(serde::de::Error::custom(detail));
        }
        let is_valid = match &value {
            Value::String(_) => true,
            Value::Array(parts) => {
                (1..=MAX_PARTS).contains(&parts.len()) && parts.iter().all(is_part)
            }
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => false,
        };
        if is_valid {
            Ok(Self(value))
        } else {
            Err(serde::de::Error::custom(format!(
                "must be a text, or 1 to {MAX_PARTS} parts that each have a type"
            )))
        }
    }
}

impl utoipa::PartialSchema for Content {
    fn schema() -> RefOr<Schema> {
        let text = || {
            ObjectBuilder::new()
                .schema_type(Type::String)
                .max_length(Some(MAX_CONTENT_CHARS))
        };
        let part = ObjectBuilder::new()
            .property("type", text())
            .property("text", text())
            .required("type")
            .additional_properties(Some(AdditionalProperties::FreeForm(true)));
        let parts = ArrayBuilder::new()
            .items(part)
            .min_items(Some(1))
            .max_items(Some(MAX_PARTS));
        Schema::OneOf(OneOfBuilder::new().item(text()).item(parts).build()).into()
    }
}

impl utoipa::ToSchema for Content {}

/// A tool call of an assistant. Additional members of a provider are kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ToolCall {
    #[schema(min_length = 1, max_length = 256)]
    pub id: String,
    #[serde(rename = "type")]
    #[schema(min_length = 1, max_length = 256)]
    pub kind: String,
    pub function: ToolFunction,
    #[serde(flatten)]
    #[schema(value_type = Object)]
    pub rest: Map<String, Value>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ToolFunction {
    #[schema(min_length = 1, max_length = 256)]
    pub name: String,
    /// JSON text, as the model wrote it.
    #[schema(max_length = 1_048_576)]
    pub arguments: String,
    #[serde(flatten)]
    #[schema(value_type = Object)]
    pub rest: Map<String, Value>,
}

impl ToolCall {
    fn count_chars(&self) -> usize {
        let rest = self.rest.iter().chain(&self.function.rest);
        let rest = rest.map(|(name, value)| name.chars().count() + count_chars(value));
        self.function.arguments.chars().count() + rest.sum::<usize>()
    }
}

/// A message from a client. The service sets its position, time, identity and platform.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NewMessage {
    pub role: Role,
    pub kind: MessageKind,
    pub content: Option<Content>,
    pub tool_calls: Option<Vec<ToolCall>>,
    pub tool_call_id: Option<String>,
    /// The author's count; estimated if it is missing.
    pub token_count: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extra: Option<Box<Extra>>,
}

impl NewMessage {
    /// A tool's result, or a notice in its place.
    pub fn tool_result(call_id: &str, text: &str) -> Self {
        Self {
            role: Role::Tool,
            kind: MessageKind::Normal,
            content: Some(Content::text(text)),
            tool_calls: None,
            tool_call_id: Some(call_id.to_owned()),
            token_count: None,
            extra: None,
        }
    }

    /// The readable text of the message.
    pub fn text(&self) -> String {
        self.content
            .as_ref()
            .map(|content| display_text(&content.0))
            .unwrap_or_default()
    }

    /// An assistant's answer without text.
    pub fn empty_answer() -> Self {
        Self {
            role: Role::Assistant,
            kind: MessageKind::Normal,
            content: Some(Content::text("")),
            tool_calls: None,
            tool_call_id: None,
            token_count: None,
            extra: None,
        }
    }

    /// Validates the message. Errors have pointers below `at`.
    pub fn check(&self, at: &str, errors: &mut Vec<FieldError>) {
        let mut refuse = |member: &str, detail: String| {
            errors.push(FieldError::new(format!("{at}/{member}"), detail));
        };
        let calls = self.tool_calls.as_deref().unwrap_or_default();
        if self.content.is_none() && (self.role != Role::Assistant || calls.is_empty()) {
            refuse("content", "is required".to_owned());
        }
        if self.tool_calls.is_some() && self.role != Role::Assistant {
            refuse("tool_calls", "only an assistant calls tools".to_owned());
        }
        if self.tool_calls.is_some() && !(1..=MAX_TOOL_CALLS).contains(&calls.len()) {
            refuse("tool_calls", format!("must be 1 to {MAX_TOOL_CALLS}"));
        }
        let long = |text: &str| !(1..=MAX_ID_CHARS).contains(&text.chars().count());
        for (index, call) in calls.iter().enumerate() {
            let is_duplicate = calls[..index].iter().any(|other| other.id == call.id);
            if long(&call.id) || long(&call.function.name) || long(&call.kind) || is_duplicate {
                let detail = format!(
                    "id, type and name have 1 to {MAX_ID_CHARS} characters, and an id is given once"
                );
                refuse(&format!("tool_calls/{index}"), detail);
            }
            if is_longer(&call.function.arguments, MAX_CONTENT_CHARS) {
                let detail = format!("must have at most {MAX_CONTENT_CHARS} characters");
                refuse(&format!("tool_calls/{index}/function/arguments"), detail);
            }
        }
        let chars: usize = calls.iter().map(ToolCall::count_chars).sum();
        if chars > MAX_CONTENT_CHARS + FRAME_CHARS {
            let detail = format!("all together have at most {MAX_CONTENT_CHARS} characters");
            refuse("tool_calls", detail);
        }
        match (&self.tool_call_id, self.role) {
            (None, Role::Tool) => refuse(
                "tool_call_id",
                "is required: the tool call this message answers".to_owned(),
            ),
            (Some(id), Role::Tool) if long(id) => {
                refuse(
                    "tool_call_id",
                    format!("must have 1 to {MAX_ID_CHARS} characters"),
                );
            }
            (Some(_), Role::System | Role::User | Role::Assistant) => {
                refuse("tool_call_id", "only a tool's answer has one".to_owned());
            }
            (None | Some(_), _) => {}
        }
        match self.name() {
            Some(_) if self.role != Role::User => {
                refuse("name", "only a user's message has one".to_owned());
            }
            Some(name) if long(name) => {
                refuse("name", format!("must have 1 to {MAX_ID_CHARS} characters"));
            }
            Some(_) | None => {}
        }
        if self.token_count.is_some_and(|count| count > MAX_TOKENS) {
            refuse("token_count", format!("must be at most {MAX_TOKENS}"));
        }
    }

    /// The author's name, from the client.
    pub fn name(&self) -> Option<&str> {
        self.extra.as_ref()?.name.as_deref()
    }

    pub fn tokens(&self) -> i32 {
        let counted = self.token_count.unwrap_or_else(|| self.estimate());
        i32::try_from(counted).unwrap_or(i32::MAX)
    }

    fn estimate(&self) -> u32 {
        let content = self.content.as_ref();
        let content = content.map_or(0, |content| weight_of_value(&content.0));
        let calls = self
            .tool_calls
            .iter()
            .flatten()
            .map(|call| &call.function)
            .map(|call| weight_of_text(&call.name) + weight_of_text(&call.arguments));
        let tokens = token_estimate::tokens(content + calls.sum::<u64>());
        PER_MESSAGE + u32::try_from(tokens).unwrap_or(u32::MAX - PER_MESSAGE)
    }
}

/// The tokens that most models need to frame a message.
const PER_MESSAGE: u32 = 4;

/// A summary in place of earlier messages: data that is quoted to the model, without an author.
pub fn summary(text: &str) -> NewMessage {
    NewMessage {
        role: Role::User,
        kind: MessageKind::Summary,
        content: Some(Content::text(text)),
        tool_calls: None,
        tool_call_id: None,
        token_count: None,
        extra: None,
    }
}

/// Validates the list of messages at `pointer`, and the caller's right to write their roles.
pub fn check_all(messages: &[NewMessage], pointer: &str, may_write_any_role: bool) -> Result<()> {
    if messages.len() > MAX_MESSAGES {
        let detail = format!("at most {MAX_MESSAGES} messages at once");
        return Err(Error::invalid(vec![FieldError::new(pointer, detail)]));
    }
    let mut errors = Vec::new();
    for (index, message) in messages.iter().enumerate() {
        message.check(&format!("{pointer}/{index}"), &mut errors);
    }
    Error::check(errors)?;
    let foreign = messages
        .iter()
        .position(|message| message.role != Role::User);
    match foreign {
        Some(index) if !may_write_any_role => {
            let pointer = format!("{pointer}/{index}/role");
            let detail = "only admin and chat keys write other roles than user";
            Err(Error::fields(
                Code::RoleNotAllowed,
                vec![FieldError::new(pointer, detail)],
            ))
        }
        Some(_) | None => Ok(()),
    }
}

/// A stored message.
#[derive(Debug, Clone)]
pub struct Message {
    pub session_id: SessionId,
    pub seq: i64,
    pub role: Role,
    pub kind: MessageKind,
    pub content: Option<Box<RawValue>>,
    pub tool_calls: Option<Box<RawValue>>,
    pub tool_call_id: Option<String>,
    /// The sender's identity as `platform:external_id`.
    pub identity: Option<String>,
    pub platform: Option<String>,
    pub token_count: i32,
    pub turn_id: Option<TurnId>,
    /// The session and seq of the original, for a copy.
    pub copied_from: Option<(SessionId, i64)>,
    pub created_at: DateTime<Utc>,
    /// The time of its undo. No model receives an undone message.
    pub undone_at: Option<DateTime<Utc>>,
    pub extra: Option<Box<Extra>>,
}

#[cfg(test)]
#[path = "message_tests.rs"]
mod tests;
