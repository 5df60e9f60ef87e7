//! A model's answer, assembled from chunks. Chunks are not trusted: malformed members are ignored.

use serde_json::{Map, Value};

use crate::domain::conversation::message::{
    Content, MAX_CONTENT_CHARS, MessageKind, NewMessage, Role, ToolCall, ToolFunction,
};
use crate::domain::conversation::message_extra::{Extra, Logprobs, UsageDetails};
use crate::domain::turn::completion::TokenUsage;
use crate::domain::turn::completion_object::CompletionObject;

const MAX_CALLS: usize = 128;
const MAX_NAME_CHARS: usize = 256;

#[derive(Debug, Clone, Default, PartialEq)]
pub struct Answer {
    pub text: String,
    /// The model's refusal text, if any.
    pub refusal: String,
    /// Characters of both, limited like a message.
    chars: usize,
    calls: Vec<PartialCall>,
    /// Characters of the arguments of all calls, limited like a message.
    arguments_chars: usize,
    pub finish_reason: Option<String>,
    pub usage: Option<TokenUsage>,
    pub usage_details: UsageDetails,
    reasoning: String,
    logprobs: Logprobs,
    system_fingerprint: Option<String>,
    service_tier: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq)]
struct PartialCall {
    id: String,
    name: String,
    arguments: String,
}

/// The answer exceeds the size limit of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooLarge;

impl Answer {
    /// Adds a chunk and returns the text in it.
    pub fn add<'a>(&mut self, chunk: &'a CompletionObject) -> Result<&'a str, TooLarge> {
        if chunk.usage.is_some() {
            self.usage = chunk.usage;
            self.usage_details = chunk.usage_details.clone();
        }
        for (member, update) in [
            (&mut self.system_fingerprint, &chunk.system_fingerprint),
            (&mut self.service_tier, &chunk.service_tier),
        ] {
            if update.is_some() && member != update {
                member.clone_from(update);
            }
        }
        self.add_reasoning(&chunk.delta);
        self.logprobs.add(&chunk.logprobs);
        if let Some(reason) = &chunk.finish_reason {
            self.finish_reason = Some(reason.chars().take(MAX_NAME_CHARS).collect());
        }
        let text = chunk.content();
        let refusal = chunk.delta.get("refusal").and_then(Value::as_str);
        let refusal = refusal.unwrap_or_default();
        self.chars += text.chars().count() + refusal.chars().count();
        if self.chars > MAX_CONTENT_CHARS {
            return Err(TooLarge);
        }
        self.text.push_str(text);
        self.refusal.push_str(refusal);
        let calls = chunk.delta.get("tool_calls").and_then(Value::as_array);
        for part in calls.into_iter().flatten() {
            self.add_call(part)?;
        }
        Ok(text)
    }

    /// Providers have two names for it. Text over the size limit of a message is dropped.
    fn add_reasoning(&mut self, delta: &Map<String, Value>) {
        let members = ["reasoning_content", "reasoning"];
        let mut texts = members.iter().filter_map(|member| delta.get(*member));
        let text = texts.find_map(Value::as_str).unwrap_or_default();
        if self.reasoning.len() + text.len() <= MAX_CONTENT_CHARS {
            self.reasoning.push_str(text);
        }
    }

    fn add_call(&mut self, part: &Value) -> Result<(), TooLarge> {
        let index = match part["index"].as_u64() {
            Some(index) => usize::try_from(index).unwrap_or(usize::MAX),
            None => self.calls.len(),
        };
        if index >= MAX_CALLS {
            return Err(TooLarge);
        }
        if self.calls.len() <= index {
            self.calls.resize(index + 1, PartialCall::default());
        }
        let call = &mut self.calls[index];
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        call.id.push_str(&text(&part["id"]));
        call.name.push_str(&text(&part["function"]["name"]));
        let arguments = part["function"]["arguments"].as_str().unwrap_or_default();
        call.arguments.push_str(arguments);
        self.arguments_chars += arguments.chars().count();
        let is_long = |text: &str| text.chars().count() > MAX_NAME_CHARS;
        if self.arguments_chars > MAX_CONTENT_CHARS || is_long(&call.id) || is_long(&call.name) {
            return Err(TooLarge);
        }
        Ok(())
    }

    /// The tool calls. A missing or duplicate id of a provider is replaced by a unique one.
    pub fn tool_calls(&self) -> Vec<ToolCall> {
        let mut calls: Vec<ToolCall> = Vec::new();
        for (index, call) in self.calls.iter().enumerate() {
            if call.name.is_empty() {
                continue;
            }
            let is_duplicate = calls.iter().any(|other| other.id == call.id);
            let id = if call.id.is_empty() || is_duplicate {
                format!("call_{index}")
            } else {
                call.id.clone()
            };
            let arguments = if call.arguments.is_empty() {
                "{}".to_owned()
            } else {
                call.arguments.clone()
            };
            calls.push(ToolCall {
                id,
                kind: "function".to_owned(),
                function: ToolFunction {
                    name: call.name.clone(),
                    arguments,
                    rest: Map::new(),
                },
                rest: Map::new(),
            });
        }
        calls
    }

    /// The size of the model's output in bytes, for an estimate.
    pub fn output_bytes(&self) -> usize {
        let calls = self
            .calls
            .iter()
            .map(|call| call.name.len() + call.arguments.len());
        self.text.len() + self.refusal.len() + calls.sum::<usize>()
    }

    pub fn content(&self) -> Option<Content> {
        if !self.refusal.is_empty() {
            return Some(Content::refusal(&self.text, &self.refusal));
        }
        (!self.text.is_empty()).then(|| Content::text(&self.text))
    }

    /// The metadata that the model reported with the answer.
    pub fn extra(&self, usage_details: UsageDetails) -> Option<Box<Extra>> {
        let extra = Extra {
            name: None,
            reasoning_content: Some(self.reasoning.clone()).filter(|text| !text.is_empty()),
            logprobs: self.logprobs.whole(),
            system_fingerprint: self.system_fingerprint.clone(),
            service_tier: self.service_tier.clone(),
            usage_details,
        };
        extra.non_empty()
    }

    /// The message for the transcript; `None` if the answer is empty.
    pub fn message(&self, calls: Vec<ToolCall>) -> Option<NewMessage> {
        let content = self.content();
        if content.is_none() && calls.is_empty() {
            return None;
        }
        Some(NewMessage {
            role: Role::Assistant,
            kind: MessageKind::Normal,
            content,
            tool_calls: (!calls.is_empty()).then_some(calls),
            tool_call_id: None,
            token_count: None,
            extra: self.extra(self.usage_details.clone()),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(chunk: Value) -> CompletionObject {
        CompletionObject::read(chunk.to_string().into_bytes()).unwrap()
    }

    fn chunk(delta: Value, finish: Value) -> CompletionObject {
        parse(json!({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}))
    }

    #[test]
    fn text_and_calls_are_assembled_from_chunks() {
        let mut answer = Answer::default();
        for part_chunk in [
            chunk(json!({"role": "assistant", "content": "It "}), Value::Null),
            chunk(json!({"content": "is"}), Value::Null),
            chunk(
                json!({"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "clock", "arguments": "{\"z\""}}]}),
                Value::Null,
            ),
            chunk(
                json!({"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}},
                                      {"index": 1, "function": {"name": "other"}}]}),
                json!("tool_calls"),
            ),
            parse(json!({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}})),
        ] {
            answer.add(&part_chunk).unwrap();
        }
        assert_eq!(answer.text, "It is");
        assert_eq!(answer.finish_reason.as_deref(), Some("tool_calls"));
        assert_eq!(answer.usage.unwrap().output, 2);
        let calls = answer.tool_calls();
        assert_eq!(
            (&*calls[0].id, &*calls[0].function.arguments),
            ("c1", "{\"z\":1}")
        );
        assert_eq!(
            (&*calls[1].id, &*calls[1].function.arguments),
            ("call_1", "{}")
        );
    }

    #[test]
    fn malformed_members_are_ignored_and_large_answers_are_refused() {
        let mut answer = Answer::default();
        for odd in [
            parse(json!({"choices": []})),
            parse(json!({"choices": [5]})),
            chunk(json!({"content": 5, "tool_calls": {}}), json!(7)),
            chunk(json!({"tool_calls": [7, {"index": "x"}]}), Value::Null),
        ] {
            assert_eq!(answer.add(&odd), Ok(""));
        }
        assert_eq!(answer.tool_calls(), []);
        assert_eq!(answer.message(Vec::new()), None);
        let far = chunk(
            json!({"tool_calls": [{"index": 4_000_000_000_u64}]}),
            Value::Null,
        );
        assert_eq!(answer.add(&far), Err(TooLarge));
        let large = chunk(json!({"content": "x".repeat(700_000)}), Value::Null);
        assert!(answer.add(&large).is_ok());
        assert_eq!(answer.add(&large), Err(TooLarge));
        assert_eq!(answer.text.len(), 700_000);
    }
}
