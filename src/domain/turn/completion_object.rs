//! What a model's server says, whole or in chunks: an object in OpenAI's words, kept as it came. It is read
//! just far enough for what we count, store and pass on. Nothing in it is trusted.

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

/// Of what a provider calls itself.
const MAX_NAME_BYTES: usize = 256;

/// What one part of it may come to in memory: more than a message may have in all.
const MAX_PART_COST: usize = 16 * 1024 * 1024;

/// Why a text is none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoCompletion {
    Malformed,
    /// It tells of an error: the text of its member `error`.
    Error(String),
}

#[derive(Debug, Clone, PartialEq)]
pub struct CompletionObject {
    text: String,
    /// Where in the text its model is named.
    model: Option<Range<usize>>,
    /// How many choices it has.
    pub choices: usize,
    /// Bytes that it says, for an estimate.
    pub said: usize,
    /// What its first choice adds, if it is a chunk.
    pub delta: Map<String, Value>,
    pub finish_reason: Option<String>,
    /// Of its first choice, if it is a chunk; null where there are none.
    pub logprobs: Value,
    pub usage: Option<TokenUsage>,
    pub usage_details: UsageDetails,
    pub system_fingerprint: Option<String>,
    pub service_tier: Option<String>,
}

impl CompletionObject {
    pub fn read(text: Vec<u8>) -> Result<Self, NoCompletion> {
        let text = match normalise_json(&text) {
            Cow::Borrowed(_) => text,
            Cow::Owned(normal) => normal,
        };
        let text = String::from_utf8(text).map_err(|_| NoCompletion::Malformed)?;
        let members: Members = serde_json::from_str(&text).map_err(|_| NoCompletion::Malformed)?;
        if let Some(error) = members.error {
            return Err(NoCompletion::Error(error.get().to_owned()));
        }
        let choices = members.choices.ok_or(NoCompletion::Malformed)?;
        let place = |part: &RawValue| {
            let start = part.get().as_ptr() as usize - text.as_ptr() as usize;
            start..start + part.get().len()
        };
        let usage = members.usage.map(read_part).unwrap_or_default();
        let logprobs = choices.first.read_logprobs();
        Ok(Self {
            model: members.model.map(place),
            choices: choices.count,
            said: choices.said,
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

    /// What a chunk adds to the text.
    pub fn content(&self) -> &str {
        let content = self.delta.get("content").and_then(Value::as_str);
        content.unwrap_or_default()
    }

    /// As it came, in one line, with another name for its model.
    pub fn renamed(&self, model: &str) -> String {
        let name = Value::from(model);
        let renamed = match &self.model {
            Some(place) => {
                let before = &self.text[..place.start];
                let after = &self.text[place.end..];
                format!("{before}{name}{after}")
            }
            // It has a member, so that a comma can follow.
            None => self.text.replacen('{', &format!("{{\"model\":{name},"), 1),
        };
        // Between members only: within a text they are escaped.
        if renamed.contains(['\n', '\r']) {
            renamed.replace(['\n', '\r'], " ")
        } else {
            renamed
        }
    }
}

/// Of an object, whole or a chunk.
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

/// A part of what the server says; null if it comes to too much.
fn read_part(part: &RawValue) -> Value {
    json_text::read_value(part.get(), MAX_PART_COST).unwrap_or_default()
}

/// Where it is null, too: it is replaced, and not named twice.
fn read_model<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<&'de RawValue>, D::Error> {
    Deserialize::deserialize(deserializer).map(Some)
}

struct Choices<'a> {
    count: usize,
    /// Bytes, of all of them.
    said: usize,
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
        let mut said = 0;
        let mut first = None;
        while let Some(choice) = items.next_element::<Choice>()? {
            count += 1;
            said += choice.said();
            first.get_or_insert(choice);
        }
        let first = first.unwrap_or_default();
        Ok(Choices { count, said, first })
    }
}

/// Empty where it is no object.
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
    /// Of a whole answer they are passed on as they came.
    fn read_logprobs(&self) -> Value {
        let of_chunk = self.logprobs.filter(|_| self.message.is_none());
        of_chunk.map(read_part).unwrap_or_default()
    }

    fn said(&self) -> usize {
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

    fn read(text: &str) -> Result<CompletionObject, NoCompletion> {
        CompletionObject::read(text.as_bytes().to_vec())
    }

    #[test]
    fn a_chunk_is_read_as_far_as_it_concerns_us() {
        let chunk = read(
            r#"{"id": "x", "choices": [{"index": 0, "delta": {"content": "h\u00e9", "more": [1]},
                "finish_reason": "stop"}, {"delta": 7}], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}"#,
        )
        .unwrap();
        assert_eq!(chunk.choices, 2);
        assert_eq!((chunk.content(), chunk.said), ("hé", 6));
        assert_eq!(chunk.delta["more"], json!([1]));
        assert_eq!(chunk.finish_reason.as_deref(), Some("stop"));
        let usage = chunk.usage.unwrap();
        assert_eq!((usage.input, usage.output), (3, 5));
    }

    #[test]
    fn what_has_no_shape_is_left_out() {
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
    fn what_all_choices_say_is_counted() {
        let chunk =
            read(r#"{"choices": [{"delta": {"content": "ab"}}, {"delta": {"content": "c"}}]}"#);
        assert_eq!(chunk.unwrap().said, 3);
        let whole = read(r#"{"choices": [{"message": {}}, {"message": {}}]}"#);
        assert_eq!(whole.unwrap().said, 4);
    }

    #[test]
    fn what_is_no_completion_is_refused() {
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
            assert_eq!(read(bad).unwrap_err(), NoCompletion::Malformed, "{bad}");
        }
        assert_eq!(
            CompletionObject::read(b"{\"choices\": [\"\xff\"]}".to_vec()).unwrap_err(),
            NoCompletion::Malformed
        );
        let error = r#"{"error": {"message": "no"}, "choices": []}"#;
        let told = NoCompletion::Error(r#"{"message": "no"}"#.to_owned());
        assert_eq!(read(error).unwrap_err(), told);
    }

    #[test]
    fn it_is_passed_on_in_one_line_under_another_name() {
        let text =
            "{\"model\": \"gpt\",\r\n \"a\\u0062\": 1e2,\n\"choices\": [ {\"x\": \"a\\nb\"} ]}";
        let passed = read(text).unwrap().renamed("ma\"in");
        assert_eq!(
            passed,
            r#"{"model": "ma\"in",   "a\u0062": 1e2, "choices": [ {"x": "a\nb"} ]}"#
        );
        let unnamed = read(r#"{"choices": [], "model": null}"#).unwrap();
        assert_eq!(unnamed.renamed("m"), r#"{"choices": [], "model": "m"}"#);
        let inside = read("{\"choices\": [\n1\r]}").unwrap().renamed("m");
        assert_eq!(inside, r#"{"model":"m","choices": [ 1 ]}"#);
    }
}
