//! What a client asks of a model, in OpenAI's words: read just far enough to know what it is about. What
//! the service has no part in is passed on as it came.

use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value, json};

use crate::domain::agent::{AgentSpec, UpstreamKind};
use crate::domain::extra::Extra;
use crate::domain::message::{MessageKind, NewMessage, Role};
use crate::domain::turn::TurnInput;
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

#[derive(Debug, Clone)]
pub struct CompletionRequest {
    /// The agent's name.
    pub model: String,
    pub stream: bool,
    /// Whether a stream ends with a chunk about its usage.
    pub include_usage: bool,
    /// Whether it also has events that are not OpenAI's.
    pub include_hermes_events: bool,
    /// Who speaks, or a label that means nothing to us.
    pub user: Option<String>,
    /// Whether it may be stored in a session.
    pub stores: bool,
    body: Map<String, Value>,
}

impl CompletionRequest {
    pub fn read(body: Map<String, Value>) -> Result<Self> {
        let mut errors = Vec::new();
        let mut wrong = |pointer: &str, detail: &str| errors.push(FieldError::new(pointer, detail));
        if !body.get("model").is_some_and(Value::is_string) {
            wrong("/model", "must be the name of an agent");
        }
        match body.get("messages").and_then(Value::as_array) {
            None => wrong("/messages", "must be a list"),
            Some(messages) if !(1..=MAX_MESSAGES).contains(&messages.len()) => {
                wrong("/messages", "must have 1 to 10000 entries");
            }
            Some(messages) => {
                for (place, message) in messages.iter().enumerate() {
                    let role = message["role"].as_str();
                    if !role.is_some_and(|role| ROLES.contains(&role)) {
                        wrong(&format!("/messages/{place}/role"), "must be a role");
                    }
                    let name = &message["name"];
                    let length = name.as_str().map_or(0, |name| name.chars().count());
                    if !name.is_null() && !(1..=MAX_NAME_CHARS).contains(&length) {
                        let pointer = format!("/messages/{place}/name");
                        wrong(&pointer, "must have 1 to 256 characters");
                    }
                }
            }
        }
        for (member, is_right) in [
            ("stream", Value::is_boolean as fn(&Value) -> bool),
            ("stream_options", Value::is_object),
            ("user", Value::is_string),
            ("tools", Value::is_array),
        ] {
            let given = body.get(member).filter(|value| !value.is_null());
            if given.is_some_and(|value| !is_right(value)) {
                wrong(&format!("/{member}"), "has the wrong type");
            }
        }
        if !errors.is_empty() {
            return Err(Error::fields(Code::InvalidRequest, errors));
        }
        let text = |member: &str| body.get(member).and_then(Value::as_str).map(str::to_owned);
        let options = body.get("stream_options");
        Ok(Self {
            model: text("model").unwrap_or_default(),
            stream: body.get("stream") == Some(&Value::Bool(true)),
            include_usage: options.is_some_and(|options| options["include_usage"] == true),
            include_hermes_events: options
                .is_some_and(|options| options["include_hermes_events"] == true),
            user: text("user"),
            stores: body.get("store") != Some(&Value::Bool(false)),
            body,
        })
    }

    pub fn messages(&self) -> &[Value] {
        let messages = self.body.get("messages").and_then(Value::as_array);
        messages.map_or(&[], Vec::as_slice)
    }

    /// What is new in a request about a session: what follows the last message of an assistant, the
    /// instructions for this turn, and how the model is to answer.
    pub fn turn_input(&self) -> Result<TurnInput> {
        let all = self.messages();
        let is_assistant = |message: &Value| message["role"] == "assistant";
        let first = all
            .iter()
            .rposition(is_assistant)
            .map_or(0, |last| last + 1);
        let mut errors = Vec::new();
        let mut messages = Vec::new();
        for (place, message) in all.iter().enumerate().skip(first) {
            let at = format!("/messages/{place}");
            match message["role"].as_str() {
                Some("system" | "developer") => {}
                Some("user" | "tool") => match read_message(message) {
                    Ok(read) => {
                        read.check(&at, &mut errors);
                        messages.push(read);
                    }
                    Err(error) => errors.push(FieldError::new(at, error.to_string())),
                },
                Some(_) | None => {
                    let pointer = format!("{at}/role");
                    errors.push(FieldError::new(pointer, "is not taken in a session"));
                }
            }
        }
        if messages.is_empty() && errors.is_empty() {
            let detail = "nothing is said after the last message of the assistant";
            errors.push(FieldError::new("/messages", detail));
        }
        if self.body.get("n").is_some_and(|n| !n.is_null() && *n != 1) {
            errors.push(FieldError::new("/n", "a session has one answer"));
        }
        if !errors.is_empty() {
            return Err(Error::fields(Code::InvalidRequest, errors));
        }
        let is_instruction =
            |message: &&Value| message["role"] == "system" || message["role"] == "developer";
        let instructions = all.iter().filter(is_instruction).map(text_of);
        let instruction = instructions.collect::<Vec<_>>().join("\n\n");
        let ours = ["model", "messages", "stream", "stream_options", "user"];
        let options = self
            .body
            .iter()
            .filter(|(name, _)| !ours.contains(&name.as_str()));
        Ok(TurnInput {
            messages,
            instruction: (!instruction.is_empty()).then_some(instruction),
            options: options.map(|(k, v)| (k.clone(), v.clone())).collect(),
        })
    }

    /// What the agent's model is asked: its own name, the agent's instructions first, and in a stream
    /// always the usage, which we count.
    pub fn for_model(&self, agent: &AgentSpec) -> Result<Vec<u8>> {
        let ours = ["model", "messages", "stream_options"];
        let options = self.stream.then(|| {
            let given = self.body.get("stream_options").and_then(Value::as_object);
            let mut options = given.cloned().unwrap_or_default();
            options.remove("include_hermes_events");
            options.insert("include_usage".to_owned(), true.into());
            options
        });
        let prompt = (!agent.system_prompt.is_empty())
            .then(|| json!({"role": "system", "content": agent.system_prompt}));
        let asked = ForModel {
            passed: Passed(&self.body, &ours),
            model: match agent.upstream.kind {
                UpstreamKind::Openai => agent.upstream.model.as_deref().unwrap_or_default(),
                UpstreamKind::Demo => "demo",
            },
            messages: prompt.iter().chain(self.messages()).collect(),
            stream_options: options.as_ref(),
        };
        serde_json::to_vec(&asked).map_err(Error::internal)
    }
}

/// What a model is asked, without a copy of what is passed on.
#[derive(Serialize)]
struct ForModel<'a> {
    #[serde(flatten)]
    passed: Passed<'a>,
    model: &'a str,
    messages: Vec<&'a Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream_options: Option<&'a Map<String, Value>>,
}

/// Members of a request, but for those that are named.
struct Passed<'a>(&'a Map<String, Value>, &'a [&'a str]);

impl Serialize for Passed<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let Self(members, left_out) = self;
        let passed = members.iter();
        serializer.collect_map(passed.filter(|(name, _)| !left_out.contains(&name.as_str())))
    }
}

fn read_message(message: &Value) -> serde_json::Result<NewMessage> {
    let role = match message["role"] == "tool" {
        true => Role::Tool,
        false => Role::User,
    };
    let text = |member: &str| message[member].as_str().map(str::to_owned);
    let extra = Extra {
        name: text("name").filter(|_| role == Role::User),
        ..Extra::default()
    };
    Ok(NewMessage {
        role,
        kind: MessageKind::Normal,
        content: Deserialize::deserialize(&message["content"])?,
        tool_calls: None,
        tool_call_id: text("tool_call_id").filter(|_| role == Role::Tool),
        token_count: None,
        extra: extra.kept(),
    })
}

/// The text of a message, whichever way its content is written.
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
    /// Whether nobody counted them but us, by their length.
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

    /// As a provider tells it, in the member `usage` of an answer or of a chunk.
    pub fn told(usage: &Value) -> Option<Self> {
        let count = |member: &str| usage[member].as_i64().filter(|count| *count >= 0);
        Some(Self {
            input: count("prompt_tokens")?,
            output: count("completion_tokens")?,
            estimated: false,
        })
    }

    /// By length: some four bytes are a token.
    pub fn estimate(asked_bytes: usize, answered_bytes: usize) -> Self {
        let tokens = |bytes: usize| i64::try_from(bytes.div_ceil(4)).unwrap_or(i64::MAX);
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
    use crate::domain::agent::AgentSpec;

    fn read(body: Value) -> Result<CompletionRequest> {
        CompletionRequest::read(body.as_object().unwrap().clone())
    }

    #[test]
    fn what_is_wrong_is_pointed_at_and_what_is_unknown_passes() {
        let said = json!([{"role": "user", "content": "hi"}]);
        for (body, pointer) in [
            (json!({"messages": said}), "/model"),
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
                json!({"model": "main", "messages": said, "stream": "yes"}),
                "/stream",
            ),
            (
                json!({"model": "main", "messages": said, "user": 5}),
                "/user",
            ),
        ] {
            let error = read(body).unwrap_err();
            assert_eq!(error.code, Code::InvalidRequest);
            assert_eq!(error.errors[0].pointer, pointer);
        }
        let asked =
            json!({"model": "main", "messages": said, "temperature": 0.5, "user": null, "x": [1]});
        let request = read(asked).unwrap();
        let body = request.for_model(&AgentSpec::demo()).unwrap();
        let body: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(
            (&body["temperature"], &body["x"]),
            (&json!(0.5), &json!([1]))
        );
    }

    #[test]
    fn the_model_gets_the_agents_name_and_prompt_and_is_asked_for_usage() {
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
    fn usage_is_what_the_provider_says_or_a_marked_estimate() {
        let told = json!({"prompt_tokens": 3, "completion_tokens": 5});
        let usage = TokenUsage::told(&told).unwrap();
        assert_eq!((usage.input, usage.output, usage.estimated), (3, 5, false));
        for untold in [json!({}), json!(null), json!({"prompt_tokens": -1})] {
            assert_eq!(TokenUsage::told(&untold), None);
        }
        let estimate = TokenUsage::estimate(6, 9);
        assert_eq!(
            (estimate.input, estimate.output, estimate.estimated),
            (2, 3, true)
        );
    }
}
