//! Additional members of a message: the author's name from a client, and the metadata of a model's answer.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// The most members of an object.
const MAX_MEMBERS: usize = 64;
/// The most bytes of log probabilities of one answer. An answer with more gets none.
const MAX_LOGPROBS_BYTES: usize = 1024 * 1024;

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Extra {
    /// The name of the author of a user's message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The model's reasoning before the answer, if it reports any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system_fingerprint: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service_tier: Option<String>,
    #[serde(skip_serializing_if = "UsageDetails::is_empty")]
    pub usage_details: UsageDetails,
}

impl Extra {
    /// `None` if every member is empty.
    pub fn non_empty(self) -> Option<Box<Self>> {
        (self != Self::default()).then(|| Box::new(self))
    }
}

/// The counts of `prompt_tokens_details` and similar members, by the provider's names.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct UsageDetails(BTreeMap<String, BTreeMap<String, i64>>);

impl UsageDetails {
    /// Reads the details from a provider's member `usage`.
    pub fn from_usage(usage: &Value) -> Self {
        let members = usage.as_object().into_iter().flatten();
        let details = members.filter(|(name, _)| name.ends_with("_details"));
        let details = details.take(MAX_MEMBERS).filter_map(|(name, value)| {
            let counts = value.as_object()?.iter().take(MAX_MEMBERS);
            let counts = counts.filter_map(|(name, count)| {
                let count = count.as_i64().filter(|count| *count >= 0)?;
                Some((name.clone(), count))
            });
            Some((name.clone(), counts.collect()))
        });
        Self(details.collect())
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn add(&mut self, more: Self) {
        for (name, counts) in more.0 {
            let sums = self.0.entry(name).or_default();
            for (name, count) in counts {
                let sum = sums.entry(name).or_default();
                *sum = sum.saturating_add(count);
            }
        }
    }

    /// Writes the details next to the sums.
    pub fn write(&self, usage: &mut Value) {
        for (name, counts) in &self.0 {
            usage[name] = json!(counts);
        }
    }
}

/// Log probabilities, collected from chunks.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Logprobs {
    lists: Map<String, Value>,
    bytes: usize,
}

impl Logprobs {
    pub fn add(&mut self, chunk: &Value) {
        for (name, value) in chunk.as_object().into_iter().flatten().take(MAX_MEMBERS) {
            let Some(more) = value.as_array() else {
                continue;
            };
            self.bytes += value.to_string().len();
            if self.bytes > MAX_LOGPROBS_BYTES {
                self.lists.clear();
                return;
            }
            let list = self.lists.entry(name.clone()).or_insert_with(|| json!([]));
            if let Some(list) = list.as_array_mut() {
                list.extend_from_slice(more);
            }
        }
    }

    /// The form of an answer that is not streamed; `None` if the model reported none.
    pub fn whole(&self) -> Option<Value> {
        if self.lists.is_empty() {
            return None;
        }
        let mut whole = json!({"content": null, "refusal": null});
        for (name, list) in &self.lists {
            whole[name] = list.clone();
        }
        Some(whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn details_are_summed_by_name_and_malformed_ones_are_ignored() {
        let reported = json!({
            "prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2, "odd": "x", "less": -1},
            "completion_tokens_details": null, "cost_details": 5,
        });
        let mut details = UsageDetails::from_usage(&reported);
        details.add(UsageDetails::from_usage(&json!({
            "prompt_tokens_details": {"cached_tokens": 5}, "completion_tokens_details": {"reasoning_tokens": 7},
        })));
        let mut usage = json!({"prompt_tokens": 8});
        details.write(&mut usage);
        let expected = json!({
            "prompt_tokens": 8, "prompt_tokens_details": {"cached_tokens": 7},
            "completion_tokens_details": {"reasoning_tokens": 7},
        });
        assert_eq!(usage, expected);
        assert!(UsageDetails::from_usage(&Value::Null).is_empty());
    }

    #[test]
    fn log_probabilities_are_joined_and_dropped_when_there_are_too_many() {
        let mut logprobs = Logprobs::default();
        for odd in [json!(null), json!(5), json!({"content": null})] {
            logprobs.add(&odd);
        }
        assert_eq!(logprobs.whole(), None);
        logprobs.add(&json!({"content": [{"token": "a"}], "refusal": null}));
        logprobs.add(&json!({"content": [{"token": "b"}]}));
        let whole = json!({"content": [{"token": "a"}, {"token": "b"}], "refusal": null});
        assert_eq!(logprobs.whole(), Some(whole));
        logprobs.add(&json!({"content": ["x".repeat(MAX_LOGPROBS_BYTES)]}));
        logprobs.add(&json!({"content": [1]}));
        assert_eq!(logprobs.whole(), None);
    }
}
