//! A response of a model's server, whole or a chunk: an object in OpenAI's form, kept unchanged. Only the
//! members that the service counts, stores or forwards are parsed. Nothing in it is trusted.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use serde::Deserialize;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::domain::conversation::message_extra::UsageDetails;
use crate::domain::turn::completion::TokenUsage;
use crate::domain::values::json_text;
use crate::domain::values::outside_text::normalise_json;

/// The limit of a provider's own names.
const MAX_NAME_BYTES: usize = 256;

/// The memory limit of one member: more than a whole message may have.
const MAX_PART_COST: usize = 16 * 1024 * 1024;

/// Why a text is no completion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InvalidCompletion {
    Malformed,
    /// An error response: the text of its member `error`.
    Error(String),
}

#[derive(Debug, Clone, PartialEq)]
pub struct CompletionObject {
    text: String,
    /// The range of the model's name in the text.
    model: Option<Range<usize>>,
    /// The number of its choices.
    pub choices: usize,
    /// The size of its output in bytes, for an estimate.
    pub output_bytes: usize,
    /// The delta of the first choice of a chunk.
    pub delta: Map<String, Value>,
    pub finish_reason: Option<String>,
    /// The log probabilities of the first choice of a chunk, or null.
    pub logprobs: Value,
    pub usage: Option<TokenUsage>,
    pub usage_details: UsageDetails,
    pub system_fingerprint: Option<String>,
    pub service_tier: Option<String>,
}

impl CompletionObject {
    pub fn read(text: Vec<u8>) -> Result<Self, InvalidCompletion> {
        let text = match normalise_json(&text) {
            Cow::Borrowed(_) => text,
            Cow::Owned(normal) => normal,
        };
        let text = String::from_utf8(text).map_err(|_| InvalidCompletion::Malformed)?;
        let members: Members =
            serde_json::from_str(&text).map_err(|_| InvalidCompletion::Malformed)?;
        if let Some(error) = members.error {
            return Err(InvalidCompletion::Error(error.get().to_owned()));
        }
        let choices = members.choices.ok_or(InvalidCompletion::Malformed)?;
        let range_of = |part: &RawValue| {
            let start = part.get().as_ptr() as usize - text.as_ptr() as usize;
            start..start + part.get().len()
        };
        let usage = members.usage.map(read_part).unwrap_or_default();
        let logprobs = choices.first.read_logprobs();
        Ok(Self {
            model: members.model.map(range_of),
            choices: choices.count,
            output_bytes: choices.output_bytes,
            delta: choices.first.delta,
            finish_reason: choices.first.finish_reason,
            logprobs,
            usage: TokenUsage::from_usage(&usage),
            usage_details: UsageDetails::from_usage(&usage),
            system_fingerprint: name_of(members.system_fingerprint),
            service_tier: name_of(members.service_tier),
            text,
        })
    }

    /// The text of a chunk.
    pub fn content(&self) -> &str {
        let content = self.delta.get("content").and_then(Value::as_str);
        content.unwrap_or_default()
    }

    /// The unchanged object in one line, with another name of its model.
    pub fn with_model(&self, model: &str) -> String {
        let name = Value::from(model);
        let text = match &self.model {
            Some(range) => {
                let before = &self.text[..range.start];
                let after = &self.text[range.end..];
                format!("{before}{name}{after}")
            }
            // The object has at least one member, so a comma is correct.
            None => self.text.replacen('{', &format!("{{\"model\":{name},"), 1),
        };
        // Line ends occur between members only: within a text they are escaped.
        if text.contains(['\n', '\r']) {
            text.replace(['\n', '\r'], " ")
        } else {
            text
        }
    }
}

/// The members of a whole object or a chunk.
#[derive(Deserialize)]
struct Members<'a> {
    #[serde(borrow)]
    choices: Option<Choices<'a>>,
    #[serde(borrow, default, deserialize_with = "read_model")]
    model: Option<&'a RawValue>,
    #[serde(borrow)]
    usage: Option<&'a RawValue>,
    #[serde(borrow)]
    system_fingerprint: Option<&'a RawValue>,
    #[serde(borrow)]
    service_tier: Option<&'a RawValue>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

fn name_of(value: Option<&RawValue>) -> Option<String> {
    let name: String = serde_json::from_str(value?.get()).ok()?;
    (name.len() <= MAX_NAME_BYTES).then_some(name)
}

/// A member's value; null if it is too large for memory.
fn read_part(part: &RawValue) -> Value {
    json_text::read_value(part.get(), MAX_PART_COST).unwrap_or_default()
}

/// Keeps the range of a null, too: it is replaced, and no second member is added.
fn read_model<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<&'de RawValue>, D::Error> {
    Deserialize::deserialize(deserializer).map(Some)
}

struct Choices<'a> {
    count: usize,
    /// The bytes of all choices.
    output_bytes: usize,
    first: Choice<'a>,
}

impl<'de: 'a, 'a> Deserialize<'de> for Choices<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(ReadChoices)
    }
}

struct ReadChoices;

impl<'de> Visitor<'de> for ReadChoices {
    type Value = Choices<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of choices")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        let mut count = 0;
        let mut output_bytes = 0;
        let mut first = None;
        while let Some(choice) = items.next_element::<Choice>()? {
            count += 1;
            output_bytes += choice.output_bytes();
            first.get_or_insert(choice);
        }
        let first = first.unwrap_or_default();
        Ok(Choices {
            count,
            output_bytes,
            first,
        })
    }
}

/// A choice; empty if the value is no object.
#[derive(Default)]
struct Choice<'a> {
    delta: Map<String, Value>,
    message: Option<&'a RawValue>,
    finish_reason: Option<String>,
    logprobs: Option<&'a RawValue>,
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum Member {
    Delta,
    Message,
    FinishReason,
    Logprobs,
    #[serde(other)]
    Other,
}

impl<'de: 'a, 'a> Deserialize<'de> for Choice<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ReadChoice)
    }
}

struct ReadChoice;

impl<'de> Visitor<'de> for ReadChoice {
    type Value = Choice<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a choice")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Self::Value, A::Error> {
        let mut choice = Choice::default();
        while let Some(member) = members.next_key()? {
            match member {
                Member::Delta => {
                    if let Value::Object(delta) = read_part(members.next_value()?) {
                        choice.delta = delta;
                    }
                }
                Member::Message => choice.message = Some(members.next_value()?),
                Member::FinishReason => {
                    let reason: &RawValue = members.next_value()?;
                    choice.finish_reason = serde_json::from_str(reason.get()).ok();
                }
                Member::Logprobs => choice.logprobs = Some(members.next_value()?),
                Member::Other => drop(members.next_value::<IgnoredAny>()?),
            }
        }
        Ok(choice)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Choice::default())
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(Choice::default())
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<Self::Value, E> {
        Ok(Choice::default())
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<Self::Value, E> {
        Ok(Choice::default())
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<Self::Value, E> {
        Ok(Choice::default())
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<Self::Value, E> {
        Ok(Choice::default())
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<Self::Value, E> {
        Ok(Choice::default())
    }
}

impl Choice<'_> {
    /// Parses the log probabilities of a chunk. Those of a whole answer are forwarded unchanged.
    fn read_logprobs(&self) -> Value {
        let of_chunk = self.logprobs.filter(|_| self.message.is_none());
        of_chunk.map(read_part).unwrap_or_default()
    }

    fn output_bytes(&self) -> usize {
        let bytes = |(name, value): (&String, &Value)| match (name.as_str(), value) {
            ("role", _) | (_, Value::Null) => 0,
            (_, Value::String(text)) => text.len(),
            (_, value) => value.to_string().len(),
        };
        match self.message {
            Some(message) => message.get().len(),
            None => self.delta.iter().map(bytes).sum(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(text: &str) -> Result<CompletionObject, InvalidCompletion> {
        CompletionObject::read(text.as_bytes().to_vec())
    }

    #[test]
    fn the_used_members_of_a_chunk_are_parsed() {
        let chunk = read(
            r#"{"id": "x", "choices": [{"index": 0, "delta": {"content": "h\u00e9", "more": [1]},
                "finish_reason": "stop"}, {"delta": 7}], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}"#,
        )
        .unwrap();
        assert_eq!(chunk.choices, 2);
        assert_eq!((chunk.content(), chunk.output_bytes), ("hé", 6));
        assert_eq!(chunk.delta["more"], json!([1]));
        assert_eq!(chunk.finish_reason.as_deref(), Some("stop"));
        let usage = chunk.usage.unwrap();
        assert_eq!((usage.input, usage.output), (3, 5));
    }

    #[test]
    fn malformed_members_are_ignored() {
        for odd in [
            r#"{"choices": []}"#,
            r#"{"choices": [5]}"#,
            r#"{"choices": [-5]}"#,
            r#"{"choices": [1.5]}"#,
            r#"{"choices": ["x"]}"#,
            r#"{"choices": [true]}"#,
            r#"{"choices": [null]}"#,
            r#"{"choices": [[{"delta": {"content": "x"}}]]}"#,
            r#"{"choices": [{"delta": 5, "finish_reason": 7}], "usage": {"prompt_tokens": -1}}"#,
            r#"{"choices": [{"delta": null}], "usage": "much", "error": null}"#,
        ] {
            let chunk = read(odd).unwrap();
            assert_eq!((chunk.content(), chunk.usage), ("", None), "{odd}");
            assert_eq!((chunk.delta.len(), chunk.finish_reason), (0, None), "{odd}");
        }
    }

    #[test]
    fn the_output_of_all_choices_is_counted() {
        let chunk =
            read(r#"{"choices": [{"delta": {"content": "ab"}}, {"delta": {"content": "c"}}]}"#);
        assert_eq!(chunk.unwrap().output_bytes, 3);
        let whole = read(r#"{"choices": [{"message": {}}, {"message": {}}]}"#);
        assert_eq!(whole.unwrap().output_bytes, 4);
    }

    #[test]
    fn an_invalid_completion_is_refused() {
        for bad in [
            "",
            "no json",
            "[]",
            "{}",
            r#"{"choices": {}}"#,
            r#"{"choices": null}"#,
            r#"{"choices": []"#,
            r#"{"choices": []} {}"#,
            r#"{"choices": [], "choices": [1]}"#,
        ] {
            assert_eq!(
                read(bad).unwrap_err(),
                InvalidCompletion::Malformed,
                "{bad}"
            );
        }
        assert_eq!(
            CompletionObject::read(b"{\"choices\": [\"\xff\"]}".to_vec()).unwrap_err(),
            InvalidCompletion::Malformed
        );
        let error = r#"{"error": {"message": "no"}, "choices": []}"#;
        let expected = InvalidCompletion::Error(r#"{"message": "no"}"#.to_owned());
        assert_eq!(read(error).unwrap_err(), expected);
    }

    #[test]
    fn it_is_forwarded_in_one_line_with_another_model_name() {
        let text =
            "{\"model\": \"gpt\",\r\n \"a\\u0062\": 1e2,\n\"choices\": [ {\"x\": \"a\\nb\"} ]}";
        let forwarded = read(text).unwrap().with_model("ma\"in");
        assert_eq!(
            forwarded,
            r#"{"model": "ma\"in",   "a\u0062": 1e2, "choices": [ {"x": "a\nb"} ]}"#
        );
        let unnamed = read(r#"{"choices": [], "model": null}"#).unwrap();
        assert_eq!(unnamed.with_model("m"), r#"{"choices": [], "model": "m"}"#);
        let inside = read("{\"choices\": [\n1\r]}").unwrap().with_model("m");
        assert_eq!(inside, r#"{"model":"m","choices": [ 1 ]}"#);
    }
}
