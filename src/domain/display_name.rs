//! Names that the service shows to people: one line, at most 100 characters, no control characters.

use std::str::FromStr;

use serde::Serialize;

pub const MAX_CHARS: usize = 100;

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DisplayName(String);

wire_text!(
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
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for DisplayName {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_printable_line_of_at_most_a_hundred_characters() {
        for good in ["Acme", "日本語 ✓", &"é".repeat(100)] {
            assert!(good.parse::<DisplayName>().is_ok(), "{good}");
        }
        assert_eq!(" ".parse::<DisplayName>(), Err(InvalidName::Empty));
        assert_eq!(
            "é".repeat(101).parse::<DisplayName>(),
            Err(InvalidName::TooLong)
        );
        for bad in ["a\nb", "a\0b", "a\u{7f}", "a\u{85}b", "a\u{2028}b"] {
            assert_eq!(
                bad.parse::<DisplayName>(),
                Err(InvalidName::ControlCharacter),
                "{bad:?}"
            );
        }
    }
}
