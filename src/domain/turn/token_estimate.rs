//! How many tokens a text has, where nobody counted: the one estimate of the service. It depends on no model.

use serde_json::Value;

const BYTES_PER_TOKEN: u64 = 4;

/// The tokens of text that weighs so many bytes.
pub fn tokens(bytes: u64) -> u64 {
    bytes.div_ceil(BYTES_PER_TOKEN)
}

/// What a text weighs: four ASCII characters are about a token; a character of another script is about one.
pub fn weight_of_text(text: &str) -> u64 {
    let weight_of_char = |c: char| if c.is_ascii() { 1 } else { BYTES_PER_TOKEN };
    text.chars().map(weight_of_char).sum()
}

/// What every text in a value weighs.
pub fn weight_of_value(value: &Value) -> u64 {
    match value {
        Value::String(text) => weight_of_text(text),
        Value::Array(items) => items.iter().map(weight_of_value).sum(),
        Value::Object(members) => members.values().map(weight_of_value).sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn four_bytes_or_one_foreign_character_are_a_token() {
        for (text, expected) in [("", 0), ("a", 1), ("abcd", 1), ("abcde", 2), ("日本", 2)] {
            assert_eq!(tokens(weight_of_text(text)), expected, "{text}");
        }
        let value = json!({"a": ["abcd", 17, null], "b": {"c": "日"}});
        assert_eq!(tokens(weight_of_value(&value)), 2);
        assert!(tokens(u64::MAX) > 0);
    }
}
