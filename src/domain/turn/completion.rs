//! A client's completion request in OpenAI's form. Only the members that the service uses are parsed; the
//! rest is forwarded unchanged.

use std::borrow::Cow;

use serde::{Deserialize, Serialize, Serializer};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::domain::conversation::message::{MessageKind, NewMessage, Role};
use crate::domain::conversation::message_extra::Extra;
use crate::domain::tenant::agent::{AgentSpec, UpstreamKind};
use crate::domain::turn::{TurnInput, token_estimate};
use crate::domain::values::raw_members::RawMembers;
use crate::error::{Code, Error, FieldError, Result};

const MAX_MESSAGES: usize = 10_000;
const MAX_NAME_CHARS: usize = 256;
const ROLES: [&str; 6] = [
    "system",
    "developer",
    "user",
    "assistant",
    "tool",
    "function",
];

const MAX_OPTIONS_BYTES: usize = 1024 * 1024;
/// The most members of a request.
const MAX_MEMBERS: usize = 256;

#[derive(Debug, Clone)]
pub struct CompletionRequest {
    /// The agent's name.
    pub model: String,
    pub stream: bool,
    /// Whether a stream ends with a chunk of its usage.
    pub include_usage: bool,
    /// Whether a stream also has events outside of OpenAI's API.
    pub include_hermes_events: bool,
    /// The acting user, or a label that the service ignores.
    pub user: Option<String>,
    /// Whether it may be stored in a session.
    pub stores: bool,
    /// The size of the whole request.
    pub bytes: usize,
    messages: Vec<RequestMessage>,
    stream_options: RawMembers,
    /// All members but the messages.
    members: RawMembers,
}

/// A message of a request, unchanged.
#[derive(Debug, Clone)]
struct RequestMessage {
    role: String,
    text: Box<RawValue>,
}

/// The members that every message of a request is validated by.
#[derive(Deserialize)]
struct MessageHead<'a> {
    #[serde(borrow, default)]
    role: Cow<'a, str>,
    #[serde(borrow)]
    name: Option<Cow<'a, str>>,
}

/// The members of a message that a session stores.
#[derive(Deserialize)]
struct NewMessageText {
    #[serde(default)]
    content: Value,
    tool_call_id: Option<Value>,
    name: Option<String>,
}

impl CompletionRequest {
    /// Parses a text that is valid JSON.
    pub fn read(text: &str) -> Result<Self> {
        let members = serde_json::from_str::<RawMembers>(text);
        let mut members = members.map_err(|_| {
            let error = FieldError::new("", "must be a JSON object");
            Error::fields(Code::InvalidRequest, vec![error])
        })?;
        let mut errors = Vec::new();
        let mut refuse =
            |pointer: &str, detail: &str| errors.push(FieldError::new(pointer, detail));
        if members.len() > MAX_MEMBERS {
            refuse("", "has more than 256 members");
        }
        let model = members.read::<String>("model");
        if model.is_none() {
            refuse("/model", "must be the name of an agent");
        }
        let list = members.remove("messages");
        let list =
            list.and_then(|list| serde_json::from_str::<Vec<Box<RawValue>>>(list.get()).ok());
        let mut messages = Vec::new();
        match list {
            None => refuse("/messages", "must be a list"),
            Some(list) if !(1..=MAX_MESSAGES).contains(&list.len()) => {
                refuse("/messages", "must have 1 to 10000 entries");
            }
            Some(list) => {
                for (index, text) in list.into_iter().enumerate() {
                    match read_role(&text) {
                        Ok(role) => messages.push(RequestMessage { role, text }),
                        Err((member, detail)) => {
                            refuse(&format!("/messages/{index}/{member}"), detail);
                        }
                    }
                }
            }
        }
        for (member, starts) in [
            ("stream", ["true", "false"].as_slice()),
            ("stream_options", &["{"]),
            ("user", &["\""]),
            ("tools", &["["]),
        ] {
            let text = members.get(member);
            if text.is_some_and(|text| !starts.iter().any(|start| text.starts_with(start))) {
                refuse(&format!("/{member}"), "has the wrong type");
            }
        }
        if !errors.is_empty() {
            return Err(Error::fields(Code::InvalidRequest, errors));
        }
        let stream_options: RawMembers = members.read("stream_options").unwrap_or_default();
        Ok(Self {
            model: model.unwrap_or_default(),
            stream: members.is_true("stream"),
            include_usage: stream_options.is_true("include_usage"),
            include_hermes_events: stream_options.is_true("include_hermes_events"),
            user: members.read("user"),
            stores: members.get("store") != Some("false"),
            bytes: text.len(),
            messages,
            stream_options,
            members,
        })
    }

    /// The input of a session's turn: the messages after the last message of an assistant, the
    /// instructions for this turn, and the model's options.
    pub fn turn_input(&self) -> Result<TurnInput> {
        let is_assistant = |message: &RequestMessage| message.role == "assistant";
        let first = self.messages.iter().rposition(is_assistant);
        let first = first.map_or(0, |last| last + 1);
        let mut errors = Vec::new();
        let mut messages = Vec::new();
        for (index, message) in self.messages.iter().enumerate().skip(first) {
            let at = format!("/messages/{index}");
            match message.role.as_str() {
                "system" | "developer" => {}
                "user" | "tool" => match read_message(message) {
                    Ok(read) => {
                        read.check(&at, &mut errors);
                        messages.push(read);
                    }
                    Err(error) => errors.push(FieldError::new(at, error.to_string())),
                },
                _ => {
                    let pointer = format!("{at}/role");
                    errors.push(FieldError::new(pointer, "is not allowed in a session"));
                }
            }
        }
        if messages.is_empty() && errors.is_empty() {
            let detail = "there is no message after the last message of the assistant";
            errors.push(FieldError::new("/messages", detail));
        }
        if self.members.get("n").is_some_and(|n| n != "1") {
            errors.push(FieldError::new("/n", "a session has exactly one choice"));
        }
        if !errors.is_empty() {
            return Err(Error::fields(Code::InvalidRequest, errors));
        }
        let is_instruction =
            |message: &&RequestMessage| message.role == "system" || message.role == "developer";
        let instructions = self.messages.iter().filter(is_instruction);
        let instructions = instructions.map(|message| {
            let message: Value = serde_json::from_str(message.text.get())?;
            Ok(text_of(&message))
        });
        let instructions: serde_json::Result<Vec<String>> = instructions.collect();
        let instruction = instructions.map_err(Error::internal)?.join("\n\n");
        let ours = ["model", "stream", "stream_options", "user"];
        let options: RawMembers = self.members.without(&ours).collect();
        // A turn stores them until it ends, however long it waits.
        if instruction.len() + options.bytes() > MAX_OPTIONS_BYTES {
            let detail = "instructions, tools and other options have at most 1 MiB in a session";
            return Err(Error::fields(
                Code::InvalidRequest,
                vec![FieldError::new("", detail)],
            ));
        }
        Ok(TurnInput {
            messages,
            instruction: (!instruction.is_empty()).then_some(instruction),
            options,
        })
    }

    /// The request to the agent's model: with the model's own name, the agent's instructions first, and in
    /// a stream always with the usage, which the service counts.
    pub fn for_model(&self, agent: &AgentSpec) -> Result<Vec<u8>> {
        let stream_options = self.stream.then(|| {
            let mut options = self.stream_options.clone();
            options.remove("include_hermes_events");
            options.insert_true("include_usage");
            options
        });
        let prompt = (!agent.system_prompt.is_empty())
            .then(|| json!({"role": "system", "content": agent.system_prompt}));
        let prompt = prompt.as_ref().map(PromptOrMessage::Prompt);
        let messages = self.messages.iter().map(|message| &*message.text);
        let request = ModelRequest {
            forwarded: ForwardedMembers(&self.members),
            model: match agent.upstream.kind {
                UpstreamKind::Openai => agent.upstream.model.as_deref().unwrap_or_default(),
                UpstreamKind::Demo => "demo",
            },
            messages: prompt
                .into_iter()
                .chain(messages.map(PromptOrMessage::Message))
                .collect(),
            stream_options: stream_options.as_ref(),
        };
        serde_json::to_vec(&request).map_err(Error::internal)
    }
}

/// The request to a model, without a copy of the forwarded members.
#[derive(Serialize)]
struct ModelRequest<'a> {
    #[serde(flatten)]
    forwarded: ForwardedMembers<'a>,
    model: &'a str,
    messages: Vec<PromptOrMessage<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream_options: Option<&'a RawMembers>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum PromptOrMessage<'a> {
    Prompt(&'a Value),
    Message(&'a RawValue),
}

/// Members of a request that `ModelRequest` does not set.
struct ForwardedMembers<'a>(&'a RawMembers);

impl Serialize for ForwardedMembers<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.without(&["model", "stream_options"]))
    }
}

/// The role of a message, or the invalid member and its error.
fn read_role(message: &RawValue) -> std::result::Result<String, (&'static str, &'static str)> {
    let no_role = ("role", "must be a role");
    let wrong_name = ("name", "must have 1 to 256 characters");
    let head = serde_json::from_str::<MessageHead>(message.get());
    let head = head.map_err(|_| {
        #[derive(Deserialize)]
        struct Role<'a> {
            #[serde(borrow)]
            role: Cow<'a, str>,
        }
        // If the role alone can be parsed, the name is invalid.
        match serde_json::from_str::<Role>(message.get()) {
            Ok(Role { role }) if ROLES.contains(&&*role) => wrong_name,
            Ok(_) | Err(_) => no_role,
        }
    })?;
    if !ROLES.contains(&&*head.role) {
        return Err(no_role);
    }
    let length = head.name.as_ref().map(|name| name.chars().count());
    if length.is_some_and(|length| !(1..=MAX_NAME_CHARS).contains(&length)) {
        return Err(wrong_name);
    }
    Ok(head.role.into_owned())
}

fn read_message(message: &RequestMessage) -> serde_json::Result<NewMessage> {
    let role = if message.role == "tool" {
        Role::Tool
    } else {
        Role::User
    };
    let read: NewMessageText = serde_json::from_str(message.text.get())?;
    let extra = Extra {
        name: read.name.filter(|_| role == Role::User),
        ..Extra::default()
    };
    let tool_call_id = read.tool_call_id.filter(|_| role == Role::Tool);
    Ok(NewMessage {
        role,
        kind: MessageKind::Normal,
        content: Deserialize::deserialize(read.content)?,
        tool_calls: None,
        tool_call_id: tool_call_id.and_then(|id| id.as_str().map(str::to_owned)),
        token_count: None,
        extra: extra.non_empty(),
    })
}

/// The text of a message with content in either form.
pub fn text_of(message: &Value) -> String {
    match &message["content"] {
        Value::String(text) => text.clone(),
        Value::Array(parts) => {
            let texts = parts.iter().filter_map(|part| part["text"].as_str());
            texts.collect::<Vec<_>>().join(" ")
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => String::new(),
    }
}

/// Tokens of one call of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenUsage {
    pub input: i64,
    pub output: i64,
    /// Whether the service estimated them by length.
    pub estimated: bool,
}

impl TokenUsage {
    pub const NONE: Self = Self {
        input: 0,
        output: 0,
        estimated: false,
    };

    pub fn add(&mut self, more: Self) {
        self.input = self.input.saturating_add(more.input);
        self.output = self.output.saturating_add(more.output);
        self.estimated |= more.estimated;
    }

    /// Parses a provider's member `usage` of an answer or a chunk.
    pub fn from_usage(usage: &Value) -> Option<Self> {
        let count = |member: &str| usage[member].as_i64().filter(|count| *count >= 0);
        Some(Self {
            input: count("prompt_tokens")?,
            output: count("completion_tokens")?,
            estimated: false,
        })
    }

    /// By length.
    pub fn estimate(asked_bytes: usize, answered_bytes: usize) -> Self {
        let tokens =
            |bytes: usize| i64::try_from(token_estimate::tokens(bytes as u64)).unwrap_or(i64::MAX);
        Self {
            input: tokens(asked_bytes),
            output: tokens(answered_bytes),
            estimated: true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::tenant::agent::AgentSpec;

    fn read(body: Value) -> Result<CompletionRequest> {
        CompletionRequest::read(&body.to_string())
    }

    #[test]
    fn errors_have_pointers_and_unknown_members_are_forwarded() {
        let messages = json!([{"role": "user", "content": "hi"}]);
        for (body, pointer) in [
            (json!({"messages": messages}), "/model"),
            (json!({"model": "main"}), "/messages"),
            (json!({"model": "main", "messages": []}), "/messages"),
            (
                json!({"model": "main", "messages": [{"role": "x"}]}),
                "/messages/0/role",
            ),
            (
                json!({"model": "main", "messages": ["hi"]}),
                "/messages/0/role",
            ),
            (
                json!({"model": "main", "messages": messages, "stream": "yes"}),
                "/stream",
            ),
            (
                json!({"model": "main", "messages": messages, "user": 5}),
                "/user",
            ),
        ] {
            let error = read(body).unwrap_err();
            assert_eq!(error.code, Code::InvalidRequest);
            assert_eq!(error.errors[0].pointer, pointer);
        }
        let request = json!({"model": "main", "messages": messages, "temperature": 0.5, "user": null, "x": [1]});
        let request = read(request).unwrap();
        let body = request.for_model(&AgentSpec::demo()).unwrap();
        let body: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(
            (&body["temperature"], &body["x"]),
            (&json!(0.5), &json!([1]))
        );
    }

    #[test]
    fn the_model_gets_its_own_name_the_prompt_and_include_usage() {
        let mut agent = AgentSpec::demo();
        agent.system_prompt = "Be brief.".to_owned();
        let request = read(json!({
            "model": "main", "messages": [{"role": "user", "content": "hi"}], "stream": true,
            "stream_options": {"include_hermes_events": true},
        }))
        .unwrap();
        assert!(request.stream && !request.include_usage);
        let body = request.for_model(&agent).unwrap();
        let body: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(body["model"], "demo");
        assert_eq!(
            body["messages"][0],
            json!({"role": "system", "content": "Be brief."})
        );
        assert_eq!(body["stream_options"], json!({"include_usage": true}));
    }

    #[test]
    fn usage_is_the_providers_count_or_a_marked_estimate() {
        let reported = json!({"prompt_tokens": 3, "completion_tokens": 5});
        let usage = TokenUsage::from_usage(&reported).unwrap();
        assert_eq!((usage.input, usage.output, usage.estimated), (3, 5, false));
        for invalid in [json!({}), json!(null), json!({"prompt_tokens": -1})] {
            assert_eq!(TokenUsage::from_usage(&invalid), None);
        }
        let estimate = TokenUsage::estimate(6, 9);
        assert_eq!(
            (estimate.input, estimate.output, estimate.estimated),
            (2, 3, true)
        );
    }
}
