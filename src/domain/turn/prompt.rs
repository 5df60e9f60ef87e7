//! The prompt of a session's turn: the agent's prompt, the request's instruction, the transcript and the options.
//! `prompt_messages.rs` renders the messages.

use bytes::Bytes;
use serde::Serialize;

use crate::domain::conversation::message::{MessageKind, NewMessage, Role};
use crate::domain::tenant::agent::{AgentSpec, UpstreamKind};
use crate::domain::turn::TurnInput;
use crate::domain::turn::prompt_messages::{SystemTexts, write_messages};
use crate::domain::values::raw_members::RawMembers;
use crate::error::{Error, Result};

/// The share of the context window that a transcript may fill. The rest is for the answer.
const TRANSCRIPT_SHARE: f64 = 0.9;

/// The usual bytes of a message in a prompt, without its texts.
const LINE_OVERHEAD: usize = 48;

/// A message of the transcript for a prompt. Its members are stored JSON: a prompt can have thousands, and
/// they are forwarded without being parsed or copied.
#[derive(Debug)]
pub struct HistoryMessage {
    pub role: Role,
    pub kind: MessageKind,
    pub content: Option<Bytes>,
    pub tool_calls: Option<Bytes>,
    pub tool_call_id: Option<Bytes>,
    pub name: Option<Bytes>,
}

impl HistoryMessage {
    pub fn of(message: &NewMessage) -> Result<Self> {
        Ok(Self {
            role: message.role,
            kind: message.kind,
            content: message.content.as_ref().map(json).transpose()?,
            tool_calls: message.tool_calls.as_ref().map(json).transpose()?,
            tool_call_id: message.tool_call_id.as_ref().map(json).transpose()?,
            name: message.name().map(json).transpose()?,
        })
    }

    /// The approximate bytes in a list.
    fn size_estimate(&self) -> usize {
        let texts = [
            &self.content,
            &self.tool_calls,
            &self.tool_call_id,
            &self.name,
        ];
        let bytes = texts.into_iter().flatten().map(Bytes::len);
        LINE_OVERHEAD + bytes.sum::<usize>()
    }
}

pub(super) fn json(value: &(impl Serialize + ?Sized)) -> Result<Bytes> {
    let text = serde_json::to_vec(value).map_err(Error::internal)?;
    Ok(text.into())
}

/// The most tokens of a transcript in a prompt.
pub fn token_budget(spec: &AgentSpec) -> i64 {
    (f64::from(spec.context_window) * TRANSCRIPT_SHARE) as i64
}

/// The members of the request without its messages.
#[derive(Serialize)]
struct RequestBody<'a> {
    #[serde(flatten)]
    options: &'a RawMembers,
    model: &'a str,
    stream: bool,
    stream_options: StreamOptions,
}

#[derive(Serialize)]
struct StreamOptions {
    include_usage: bool,
}

/// The body of the request to the model's server, always with a stream and with the usage.
pub fn request_body(
    spec: &AgentSpec,
    input: &TurnInput,
    history: &[HistoryMessage],
) -> Result<Vec<u8>> {
    let members = RequestBody {
        options: &input.options,
        model: match spec.upstream.kind {
            UpstreamKind::Openai => spec.upstream.model.as_deref().unwrap_or_default(),
            UpstreamKind::Demo => "demo",
        },
        stream: true,
        stream_options: StreamOptions {
            include_usage: true,
        },
    };
    let size_estimate = history.iter().map(HistoryMessage::size_estimate).sum();
    let mut body = Vec::with_capacity(size_estimate);
    body.extend_from_slice(b"{\"messages\":[");
    let system = SystemTexts {
        agent_prompt: &spec.system_prompt,
        instruction: input.instruction.as_deref(),
    };
    write_messages(&mut body, &system, history)?;
    body.extend_from_slice(b"],");
    let members = json(&members)?;
    body.extend_from_slice(members.strip_prefix(b"{").unwrap_or(&members));
    Ok(body)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::domain::conversation::message::Content;

    #[test]
    fn the_body_has_the_messages_and_the_options_of_the_request() {
        let mut spec = AgentSpec::demo();
        spec.system_prompt = "Be brief.".to_owned();
        let options = json!({"temperature": 0.5, "tools": [{"type": "function"}]});
        let input = TurnInput {
            messages: Vec::new(),
            instruction: Some("In French.".to_owned()),
            options: serde_json::from_str(&options.to_string()).unwrap(),
        };
        let transcript = TurnInput::from_contents([Content::text("hi")]).messages;
        let transcript = [HistoryMessage::of(&transcript[0]).unwrap()];
        let body = request_body(&spec, &input, &transcript).unwrap();
        let body: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(
            body["messages"],
            json!([
                {"role": "system", "content": "Be brief.\n\nIn French."},
                {"role": "user", "content": "hi"},
            ])
        );
        assert_eq!(body["stream_options"], json!({"include_usage": true}));
        assert_eq!(
            (&body["temperature"], &body["stream"]),
            (&json!(0.5), &json!(true))
        );
        assert_eq!(body["tools"], options["tools"]);
    }
}
