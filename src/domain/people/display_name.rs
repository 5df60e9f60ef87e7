//! Display names: one line, at most 100 characters, no control characters, and no character that changes
//! how the name reads.

use std::str::FromStr;

use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize};

pub const MAX_CHARS: usize = 100;

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DisplayName(String);

wire_text!(
    DisplayName,
    r"^(?=.*[^\s\u00ad\u200b-\u200f\u2060-\u2064])[^\u0000-\u001f\u007f-\u009f\u2028-\u202e\u2066-\u2069\ufdd0-\ufdef\ufeff\ufffe\uffff]+$",
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
    #[error("must not have characters that change how the others read")]
    Misleading,
}

impl DisplayName {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for DisplayName {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        let breaks_line = |c: char| c.is_control() || matches!(c, '\u{2028}' | '\u{2029}');
        if text.chars().all(is_blank) {
            Err(InvalidName::Empty)
        } else if text.chars().count() > MAX_CHARS {
            Err(InvalidName::TooLong)
        } else if text.chars().any(breaks_line) {
            Err(InvalidName::ControlCharacter)
        } else if text.chars().any(is_misleading) {
            Err(InvalidName::Misleading)
        } else {
            Ok(Self(text.to_owned()))
        }
    }
}

/// Whether the character is invisible.
fn is_blank(c: char) -> bool {
    let zero_width = matches!(
        c,
        '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{2060}'..='\u{2064}' | '\u{feff}'
    );
    c.is_whitespace() || zero_width
}

/// Whether the character changes the reading direction of others, or is a noncharacter.
fn is_misleading(c: char) -> bool {
    let changes_direction =
        matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}');
    let is_noncharacter = matches!(c, '\u{fdd0}'..='\u{fdef}') || (c as u32 & 0xfffe) == 0xfffe;
    changes_direction || is_noncharacter
}

/// Deserializes a name from a platform with other rules: without misleading characters, and `None` if no
/// character is left. A message is never refused for its sender's name.
pub fn without_misleading<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<DisplayName>, D::Error> {
    let Some(text) = Option::<String>::deserialize(deserializer)? else {
        return Ok(None);
    };
    if text.chars().count() > MAX_CHARS {
        return Err(D::Error::custom(InvalidName::TooLong));
    }
    let kept: String = text.chars().filter(|c| !is_misleading(*c)).collect();
    if kept.chars().all(is_blank) && !text.chars().all(char::is_whitespace) {
        return Ok(None);
    }
    kept.parse().map(Some).map_err(D::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_misleading_characters_is_refused() {
        for good in [
            "דני",
            "محمد علی",
            "A\u{200d}B",
            "👩\u{200d}🚀",
            "a\u{200f}b",
            "e\u{301}",
        ] {
            assert!(good.parse::<DisplayName>().is_ok(), "{good}");
        }
        for bad in [
            "a\u{202e}b",
            "\u{202a}a",
            "a\u{2066}b\u{2069}",
            "a\u{feff}",
            "a\u{ffff}",
            "a\u{fffe}",
            "a\u{fdd0}",
            "a\u{1fffe}",
            "a\u{10ffff}",
        ] {
            let expected = Err(InvalidName::Misleading);
            assert_eq!(bad.parse::<DisplayName>(), expected, "{bad:?}");
        }
        for invisible in [
            "\u{200b}",
            "\u{200d}\u{2060}",
            " \u{ad} ",
            "\u{200f}\u{200e}",
        ] {
            let expected = Err(InvalidName::Empty);
            assert_eq!(invisible.parse::<DisplayName>(), expected, "{invisible:?}");
        }
    }

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
