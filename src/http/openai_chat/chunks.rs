//! What clients of OpenAI read: completions, their chunks, and the member `hermes` about the session.

use actix_web::web::Bytes;
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::domain::completion::TokenUsage;
use crate::domain::session::ChainName;
use crate::domain::turn::ToldReset;
use crate::domain::viewer::Viewer;
use crate::error::Error;
use crate::http::problem;
use crate::ids::TurnId;
use crate::turns::{Outcome, Said};

/// Bytes of what most chunks add, and of what follows it.
const USUAL_DELTA: usize = 96;

/// What all chunks of an answer have in common.
#[derive(Debug, Clone)]
pub struct Frame {
    id: String,
    model: String,
    /// Seconds since 1970.
    created: i64,
    /// A chunk up to its delta: most chunks differ in nothing else.
    up_to_delta: String,
}

#[derive(Serialize)]
struct Text<'a> {
    content: &'a str,
}

impl Frame {
    pub fn new(turn_id: TurnId, model: &str, created: i64) -> Self {
        let id = format!("chatcmpl-{turn_id}");
        let up_to_delta = format!(
            "data: {{\"id\":{},\"object\":\"chat.completion.chunk\",\"created\":{created},\"model\":{},\
             \"choices\":[{{\"index\":0,\"delta\":",
            Value::from(id.as_str()),
            Value::from(model),
        );
        Self {
            id,
            model: model.to_owned(),
            created,
            up_to_delta,
        }
    }

    fn envelope(&self, object: &str) -> Value {
        json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model,
        })
    }

    fn chunk(
        &self,
        delta: impl Serialize,
        finish_reason: Option<&str>,
        hermes: Option<Value>,
    ) -> Bytes {
        let mut line = Vec::with_capacity(self.up_to_delta.len() + USUAL_DELTA);
        line.extend_from_slice(self.up_to_delta.as_bytes());
        write_json(&mut line, &delta);
        line.extend_from_slice(b",\"finish_reason\":");
        write_json(&mut line, &finish_reason);
        line.extend_from_slice(b"}]");
        if let Some(hermes) = hermes {
            line.extend_from_slice(b",\"hermes\":");
            write_json(&mut line, &hermes);
        }
        line.extend_from_slice(b"}\n\n");
        Bytes::from(line)
    }

    /// The first: who speaks.
    pub fn role(&self) -> Bytes {
        self.chunk(json!({"role": "assistant", "content": ""}), None, None)
    }

    pub fn text(&self, text: &str) -> Bytes {
        self.chunk(Text { content: text }, None, None)
    }

    /// What a chunk of the model's server adds, in our frame; `None` if it says nothing to the client. The
    /// tools that are called, and the end, are told when it is known what they come to.
    pub fn pass(&self, mut delta: Map<String, Value>) -> Option<Bytes> {
        delta.remove("role");
        delta.remove("tool_calls");
        let says = |value: &Value| !value.is_null() && value != "";
        delta
            .values()
            .any(says)
            .then(|| self.chunk(delta, None, None))
    }

    /// The tools that the client is to call, then the end.
    pub fn end(
        &self,
        tool_calls: &Value,
        finish_reason: &str,
        hermes: Value,
        usage: Option<TokenUsage>,
    ) -> Vec<Bytes> {
        let mut last = Vec::new();
        if let Some(calls) = tool_calls.as_array() {
            let numbered: Vec<Value> = calls
                .iter()
                .enumerate()
                .map(|(place, call)| {
                    let mut call = call.clone();
                    call["index"] = place.into();
                    call
                })
                .collect();
            last.push(self.chunk(json!({ "tool_calls": numbered }), None, None));
        }
        last.push(self.chunk(json!({}), Some(finish_reason), Some(hermes)));
        if let Some(usage) = usage {
            let mut chunk = self.envelope("chat.completion.chunk");
            chunk["choices"] = json!([]);
            chunk["usage"] = usage_body(&usage);
            last.push(data(&chunk));
        }
        last.push(Bytes::from_static(b"data: [DONE]\n\n"));
        last
    }

    /// The whole answer.
    pub fn whole(
        &self,
        content: &Value,
        tool_calls: &Value,
        finish_reason: &str,
        hermes: Value,
        usage: TokenUsage,
    ) -> Value {
        let (content, refusal) = split_refusal(content);
        let mut message = json!({"role": "assistant", "content": content, "refusal": refusal});
        if tool_calls.is_array() {
            message["tool_calls"] = tool_calls.clone();
        }
        let mut whole = self.envelope("chat.completion");
        let choice = json!({"index": 0, "message": message, "finish_reason": finish_reason});
        whole["choices"] = json!([choice]);
        whole["usage"] = usage_body(&usage);
        whole["hermes"] = hermes;
        whole
    }
}

/// An answer that was refused is stored as OpenAI's content parts, and answered in members of their own.
fn split_refusal(content: &Value) -> (Value, Value) {
    let Some(parts) = content.as_array() else {
        return (content.clone(), Value::Null);
    };
    let find = |member: &str| parts.iter().find_map(|part| part.get(member)).cloned();
    match find("refusal") {
        Some(refusal) => (find("text").unwrap_or(Value::Null), refusal),
        None => (content.clone(), Value::Null),
    }
}

fn usage_body(usage: &TokenUsage) -> Value {
    json!({
        "prompt_tokens": usage.input, "completion_tokens": usage.output,
        "total_tokens": usage.input.saturating_add(usage.output),
    })
}

fn data(value: &Value) -> Bytes {
    Bytes::from(format!("data: {value}\n\n"))
}

fn write_json(line: &mut Vec<u8>, value: &impl Serialize) {
    // Fails for keys that are no text; there are none.
    if serde_json::to_writer(&mut *line, value).is_err() {
        line.extend_from_slice(b"null");
    }
}

/// An error in the middle of a stream, as the official clients raise it.
pub fn error(error: &Error) -> Bytes {
    Bytes::from(format!("data: {}\n\n", problem::openai_body(error)))
}

/// The effective session, in the names of whoever asked.
pub fn hermes(outcome: &Outcome, name: &ChainName, viewer: &Viewer) -> Value {
    let told = &outcome.told;
    let reset = told.reset.as_ref().map(|reset: &ToldReset| json!(reset));
    json!({
        "session_id": name.shown_link(outcome.session_id, viewer),
        "session_key": told.session_key,
        "conversation_id": name.shown(viewer),
        "requested_session_id": told.requested_session_id,
        "compressed": outcome.compressed,
        "reset": reset,
        "turn_id": outcome.turn_id,
        "memory_key": told.memory_key,
    })
}

/// What an outcome says, or the error of one that says nothing.
pub fn said(outcome: &Outcome) -> Result<(&Value, &Value, &str), Error> {
    match &outcome.said {
        Said::Answer {
            content,
            tool_calls,
            finish_reason,
        } => Ok((content, tool_calls, finish_reason)),
        Said::Nothing(turn) => Err(turn.failure()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_servers_chunk_is_passed_on_without_what_is_ours_to_tell() {
        let frame = Frame::new(TurnId::generate(), "main", 7);
        let pass = |delta: Value| frame.pass(delta.as_object().unwrap().clone());
        for silent in [
            json!({"role": "assistant", "content": ""}),
            json!({"tool_calls": [{"index": 0}]}),
            json!({}),
        ] {
            assert_eq!(pass(silent), None);
        }
        let said = json!({"role": "assistant", "content": "hi", "reasoning_content": "hm"});
        let passed = pass(said).unwrap();
        let passed = std::str::from_utf8(&passed).unwrap();
        let passed: Value = serde_json::from_str(passed.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(passed["model"], "main");
        assert_eq!(passed["choices"][0]["finish_reason"], Value::Null);
        let delta = &passed["choices"][0]["delta"];
        assert_eq!(delta, &json!({"content": "hi", "reasoning_content": "hm"}));
    }
}
