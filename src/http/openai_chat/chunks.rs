//! What clients of OpenAI read: completions, their chunks, and the member `hermes` about the session.

use actix_web::web::Bytes;
use serde::Serialize;
use serde_json::{Value, json};

use crate::domain::completion::TokenUsage;
use crate::domain::session::ChainName;
use crate::domain::turn::ToldReset;
use crate::domain::viewer::Viewer;
use crate::error::Error;
use crate::http::problem;
use crate::ids::TurnId;
use crate::turns::{Outcome, Said};

/// What all chunks of an answer have in common.
#[derive(Debug, Clone)]
pub struct Frame {
    id: String,
    model: String,
    /// Seconds since 1970.
    created: i64,
}

/// A chunk with one choice. As it is written: an answer has many of them.
#[derive(Serialize)]
struct Chunk<'a, D> {
    id: &'a str,
    object: &'static str,
    created: i64,
    model: &'a str,
    choices: [Choice<'a, D>; 1],
    #[serde(skip_serializing_if = "Option::is_none")]
    hermes: Option<Value>,
}

#[derive(Serialize)]
struct Choice<'a, D> {
    index: u32,
    delta: D,
    finish_reason: Option<&'a str>,
}

#[derive(Serialize)]
struct Text<'a> {
    content: &'a str,
}

impl Frame {
    pub fn new(turn_id: TurnId, model: &str, created: i64) -> Self {
        Self {
            id: format!("chatcmpl-{turn_id}"),
            model: model.to_owned(),
            created,
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
        data(&Chunk {
            id: &self.id,
            object: "chat.completion.chunk",
            created: self.created,
            model: &self.model,
            choices: [Choice {
                index: 0,
                delta,
                finish_reason,
            }],
            hermes,
        })
    }

    /// The first: who speaks.
    pub fn role(&self) -> Bytes {
        self.chunk(json!({"role": "assistant", "content": ""}), None, None)
    }

    pub fn text(&self, text: &str) -> Bytes {
        self.chunk(Text { content: text }, None, None)
    }

    /// A chunk of the model's server in our frame; `None` if it says nothing to the client. The tools that
    /// are called, and the end, are told when it is known what they come to.
    pub fn pass(&self, mut chunk: Value) -> Option<Bytes> {
        let delta = chunk.pointer_mut("/choices/0/delta")?;
        let Value::Object(mut delta) = delta.take() else {
            return None;
        };
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
        let mut message = json!({"role": "assistant", "content": content});
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

fn usage_body(usage: &TokenUsage) -> Value {
    json!({
        "prompt_tokens": usage.input, "completion_tokens": usage.output,
        "total_tokens": usage.input.saturating_add(usage.output),
    })
}

fn data(value: &impl Serialize) -> Bytes {
    let mut line = b"data: ".to_vec();
    // Fails for keys that are no text; there are none.
    if serde_json::to_writer(&mut line, value).is_err() {
        line.extend_from_slice(b"null");
    }
    line.extend_from_slice(b"\n\n");
    Bytes::from(line)
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
        let chunk = |delta: Value| json!({"id": "x", "choices": [{"delta": delta, "finish_reason": "stop"}]});
        for silent in [
            json!({"role": "assistant", "content": ""}),
            json!({"tool_calls": [{"index": 0}]}),
            json!({}),
            json!(5),
        ] {
            assert_eq!(frame.pass(chunk(silent)), None);
        }
        for odd in [json!({"choices": []}), json!({"choices": {}}), json!(7)] {
            assert_eq!(frame.pass(odd), None);
        }
        let said = json!({"role": "assistant", "content": "hi", "reasoning_content": "hm"});
        let passed = frame.pass(chunk(said)).unwrap();
        let passed = std::str::from_utf8(&passed).unwrap();
        let passed: Value = serde_json::from_str(passed.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(passed["model"], "main");
        assert_eq!(passed["choices"][0]["finish_reason"], Value::Null);
        let delta = &passed["choices"][0]["delta"];
        assert_eq!(delta, &json!({"content": "hi", "reasoning_content": "hm"}));
    }
}
