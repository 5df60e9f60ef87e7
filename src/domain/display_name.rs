//! Names that the service shows to people: one line, at most 100 characters, no control characters.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

pub const MAX_CHARS: usize = 100;

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DisplayName(String);

text_schema!(
    DisplayName,
    r"^(?=.*\S)[^\u0000-\u001f\u007f-\u009f\u2028\u2029]+$",
    1,
    MAX_CHARS
);

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidName {
    #[error("must not be empty")]
    Empty,
    #[error("must have at most {MAX_CHARS} characters")]
    TooLong,
    #[error("must be one line without control characters")]
    ControlCharacter,
}

impl DisplayName {
    pub fn parse(text: &str) -> Result<Self, InvalidName> {
        let breaks = |c: char| c.is_control() || matches!(c, '\u{2028}' | '\u{2029}');
        if text.trim().is_empty() {
            Err(InvalidName::Empty)
        } else if text.chars().count() > MAX_CHARS {
            Err(InvalidName::TooLong)
        } else if text.chars().any(breaks) {
            Err(InvalidName::ControlCharacter)
        } else {
            Ok(Self(text.to_owned()))
        }
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The rule is part of the type, so a body that breaks it is refused with a pointer to the member.
impl<'de> Deserialize<'de> for DisplayName {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Cow::<'de, str>::deserialize(deserializer)?;
        Self::parse(&text).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_printable_line_of_at_most_a_hundred_characters() {
        for good in ["Acme", "日本語 ✓", &"é".repeat(100)] {
            assert!(DisplayName::parse(good).is_ok(), "{good}");
        }
        assert_eq!(DisplayName::parse(" "), Err(InvalidName::Empty));
        assert_eq!(
            DisplayName::parse(&"é".repeat(101)),
            Err(InvalidName::TooLong)
        );
        for bad in ["a\nb", "a\0b", "a\u{7f}", "a\u{85}b", "a\u{2028}b"] {
            assert_eq!(
                DisplayName::parse(bad),
                Err(InvalidName::ControlCharacter),
                "{bad:?}"
            );
        }
    }
}
