//! What clients of OpenAI read: completions, their chunks, and the member `hermes` about the session.

use actix_web::web::Bytes;
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::domain::conversation::message_extra::Extra;
use crate::domain::conversation::session::ConversationHandle;
use crate::domain::people::access::Access;
use crate::domain::turn::ResetInfo;
use crate::domain::turn::completion::TokenUsage;
use crate::error::Error;
use crate::http::response::{problem, sse};
use crate::ids::TurnId;
use crate::turns::{TurnOutcome, TurnResult};

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

    /// A chunk that is not the last.
    fn chunk(&self, delta: impl Serialize, logprobs: &Value) -> Bytes {
        let mut line = self.line(delta);
        if !logprobs.is_null() {
            line.extend_from_slice(b",\"logprobs\":");
            write_json(&mut line, logprobs);
        }
        line.extend_from_slice(b",\"finish_reason\":null}]}\n\n");
        Bytes::from(line)
    }

    /// A chunk up to the end of its delta.
    fn line(&self, delta: impl Serialize) -> Vec<u8> {
        let mut line = Vec::with_capacity(self.up_to_delta.len() + USUAL_DELTA);
        line.extend_from_slice(self.up_to_delta.as_bytes());
        write_json(&mut line, &delta);
        line
    }

    /// The chunk with `finish_reason`.
    fn finish(&self, answered: &AnswerParts<'_>, hermes: &Value) -> Bytes {
        let mut line = self.line(json!({}));
        line.extend_from_slice(b",\"finish_reason\":");
        write_json(&mut line, &answered.finish_reason);
        line.extend_from_slice(b"}]");
        for (name, value) in answered.of_provider() {
            line.extend_from_slice(format!(",\"{name}\":").as_bytes());
            write_json(&mut line, &value);
        }
        line.extend_from_slice(b",\"hermes\":");
        write_json(&mut line, hermes);
        line.extend_from_slice(b"}\n\n");
        Bytes::from(line)
    }

    /// The first: the role.
    pub fn role(&self) -> Bytes {
        let delta = json!({"role": "assistant", "content": ""});
        self.chunk(delta, &Value::Null)
    }

    pub fn text(&self, text: &str) -> Bytes {
        self.chunk(Text { content: text }, &Value::Null)
    }

    /// What a chunk of the model's server adds, in our frame; `None` if it says nothing to the client. The
    /// tools that are called, and the end, come when it is known what they come to.
    pub fn pass(&self, mut delta: Map<String, Value>, logprobs: &Value) -> Option<Bytes> {
        delta.remove("role");
        delta.remove("tool_calls");
        let says = |value: &Value| !value.is_null() && value != "";
        (delta.values().any(says) || !logprobs.is_null()).then(|| self.chunk(delta, logprobs))
    }

    /// The tools that the client is to call, then the end.
    pub fn end(
        &self,
        answered: &AnswerParts<'_>,
        hermes: &Value,
        usage: Option<TokenUsage>,
    ) -> Vec<Bytes> {
        let mut last = Vec::new();
        if let Some(calls) = answered.tool_calls.as_array() {
            let numbered: Vec<Value> = calls
                .iter()
                .enumerate()
                .map(|(place, call)| {
                    let mut call = call.clone();
                    call["index"] = place.into();
                    call
                })
                .collect();
            last.push(self.chunk(json!({ "tool_calls": numbered }), &Value::Null));
        }
        last.push(self.finish(answered, hermes));
        if let Some(usage) = usage {
            let mut chunk = self.envelope("chat.completion.chunk");
            chunk["choices"] = json!([]);
            chunk["usage"] = answered.usage_body(&usage);
            for (name, value) in answered.of_provider() {
                chunk[name] = value.into();
            }
            last.push(sse::data(&chunk.to_string()));
        }
        last.push(Bytes::from_static(b"data: [DONE]\n\n"));
        last
    }

    /// The whole answer.
    pub fn whole(&self, answered: &AnswerParts<'_>, hermes: Value, usage: TokenUsage) -> Value {
        let (content, refusal) = split_refusal(answered.content);
        let mut message = json!({"role": "assistant", "content": content, "refusal": refusal});
        if answered.tool_calls.is_array() {
            message["tool_calls"] = answered.tool_calls.clone();
        }
        let reasoning = answered.extra.and_then(|it| it.reasoning_content.as_ref());
        if let Some(reasoning) = reasoning {
            message["reasoning_content"] = reasoning.as_str().into();
        }
        let mut whole = self.envelope("chat.completion");
        let finish = answered.finish_reason;
        let logprobs = answered.extra.and_then(|extra| extra.logprobs.as_ref());
        let choice = json!({
            "index": 0, "message": message, "logprobs": logprobs, "finish_reason": finish,
        });
        whole["choices"] = json!([choice]);
        whole["usage"] = answered.usage_body(&usage);
        for (name, value) in answered.of_provider() {
            whole[name] = value.into();
        }
        whole["hermes"] = hermes;
        whole
    }

    /// Why the model does not answer, as far as the client has not seen it.
    pub fn refusal(&self, content: &Value, seen: usize) -> Option<Bytes> {
        let (_, refusal) = split_refusal(content);
        let rest = refusal.as_str()?.get(seen..)?;
        (!rest.is_empty()).then(|| self.chunk(json!({ "refusal": rest }), &Value::Null))
    }
}

/// An answer that there is.
pub struct AnswerParts<'a> {
    pub content: &'a Value,
    tool_calls: &'a Value,
    finish_reason: &'a str,
    extra: Option<&'a Extra>,
}

impl AnswerParts<'_> {
    /// What the provider says of itself.
    fn of_provider(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let named = self.extra.map(|extra| {
            [
                ("system_fingerprint", extra.system_fingerprint.as_deref()),
                ("service_tier", extra.service_tier.as_deref()),
            ]
        });
        let named = named.into_iter().flatten();
        named.filter_map(|(name, value)| Some((name, value?)))
    }

    fn usage_body(&self, usage: &TokenUsage) -> Value {
        let mut body = json!({
            "prompt_tokens": usage.input, "completion_tokens": usage.output,
            "total_tokens": usage.input.saturating_add(usage.output),
        });
        if let Some(extra) = self.extra {
            extra.usage_details.write(&mut body);
        }
        body
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

fn write_json(line: &mut Vec<u8>, value: &impl Serialize) {
    // Fails for keys that are no text; there are none.
    if serde_json::to_writer(&mut *line, value).is_err() {
        line.extend_from_slice(b"null");
    }
}

/// An error in the middle of a stream, as the official clients raise it.
pub fn error(error: &Error) -> Bytes {
    sse::data(&problem::openai_body(error).to_string())
}

/// The effective session, with the ids that the caller knows.
pub fn hermes(outcome: &TurnOutcome, name: &ConversationHandle, access: &Access) -> Value {
    let info = &outcome.session_info;
    let reset = info.reset.as_ref().map(|reset: &ResetInfo| json!(reset));
    json!({
        "session_id": name.public_session_id(outcome.session_id, access),
        "session_key": info.session_key,
        "conversation_id": name.public_id(access),
        "requested_session_id": info.requested_session_id,
        "compressed": outcome.compressed,
        "reset": reset,
        "turn_id": outcome.turn_id,
        "memory_key": info.memory_key,
    })
}

/// The answer of an outcome, or the error of one that has none.
pub fn answer_of(outcome: &TurnOutcome) -> Result<AnswerParts<'_>, Error> {
    match &outcome.result {
        TurnResult::Answer {
            content,
            tool_calls,
            finish_reason,
            extra,
        } => Ok(AnswerParts {
            content,
            tool_calls,
            finish_reason,
            extra: extra.as_deref(),
        }),
        TurnResult::Failure(turn) => Err(turn.failure()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_servers_chunk_is_passed_on_without_what_is_ours_to_tell() {
        let frame = Frame::new(TurnId::generate(), "main", 7);
        let pass = |delta: Value| frame.pass(delta.as_object().unwrap().clone(), &Value::Null);
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
