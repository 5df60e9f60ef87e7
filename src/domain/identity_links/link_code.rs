//! Link codes: short secrets that a user copies from one chat to another, and the limits of wrong guesses.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use chrono::TimeDelta;

use crate::crypto;
use crate::error::{Code as ErrorCode, Error, Result};

/// 32 unambiguous characters: no 0 and O, no 1 and I.
const ALPHABET: &[u8; 32] = b"ABCDEFGHJKLMNPQRSTUVWXYZ23456789";
const LINK_CHARS: usize = 8;

/// The lifetime of a link code.
pub const LINK_CODE_TTL: TimeDelta = TimeDelta::minutes(10);
/// The most pending codes of one user.
pub const MAX_PENDING: i16 = 3;

/// Wrong codes of one identity, and the time it is locked then.
pub const IDENTITY_ATTEMPTS: AttemptLimit = AttemptLimit {
    most: 5,
    window: TimeDelta::hours(1),
};
pub const KEY_ATTEMPTS: AttemptLimit = AttemptLimit {
    most: 50,
    window: TimeDelta::minutes(10),
};
pub const TENANT_ATTEMPTS: AttemptLimit = AttemptLimit {
    most: 200,
    window: TimeDelta::minutes(10),
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttemptLimit {
    pub most: i32,
    pub window: TimeDelta,
}

/// A link code. Never printed but in the answer to its user.
#[derive(Clone, PartialEq, Eq)]
pub struct LinkCode(String);

wire_text!(
    LinkCode,
    r"^\s*[A-Za-z2-9](?:[ -]?[A-Za-z2-9]){7}\s*$",
    LINK_CHARS,
    32
);

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a link code has {LINK_CHARS} letters and digits, without 0, O, 1 and I")]
pub struct InvalidCode;

impl LinkCode {
    pub fn generate() -> Result<Self> {
        let random: [u8; LINK_CHARS] = crypto::random().map_err(Error::internal)?;
        // 256 is a multiple of 32, so every character is equally likely.
        let character = |byte: &u8| char::from(ALPHABET[usize::from(*byte) % ALPHABET.len()]);
        Ok(Self(random.iter().map(character).collect()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Every part of a text that could be a code: eight characters of the alphabet in a row, with any other
    /// text around them and any separators but letters and digits between them.
    pub fn find_all(text: &str) -> BTreeSet<String> {
        let characters: Vec<char> = text
            .chars()
            .filter(|c| c.is_alphanumeric())
            .map(|c| c.to_ascii_uppercase())
            .collect();
        let is_allowed =
            |c: &char| u8::try_from(*c).is_ok_and(|character| ALPHABET.contains(&character));
        characters
            .windows(LINK_CHARS)
            .filter(|window| window.iter().all(is_allowed))
            .map(|window| window.iter().collect())
            .collect()
    }
}

impl fmt::Debug for LinkCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LinkCode(…)")
    }
}

impl FromStr for LinkCode {
    type Err = InvalidCode;

    /// Accepts lower case, spaces and hyphens.
    fn from_str(text: &str) -> Result<Self, InvalidCode> {
        let characters: String = text
            .chars()
            .filter(|c| !c.is_whitespace() && *c != '-')
            .map(|c| c.to_ascii_uppercase())
            .collect();
        let is_valid = characters
            .bytes()
            .all(|character| ALPHABET.contains(&character));
        if is_valid && characters.len() == LINK_CHARS {
            Ok(Self(characters))
        } else {
            Err(InvalidCode)
        }
    }
}

/// The error for a code that is wrong, expired, used, or of another user: the same for all.
pub fn code_not_found() -> Error {
    let detail = "the code is invalid, used or expired; ask for a new one";
    Error::new(ErrorCode::CodeNotFound, detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_found_anywhere_in_a_text() {
        for text in [
            "ABCD2345",
            "take abcd-2345, please",
            "/link yes ABCD 2345",
            "xABCD2345x",
            "**AB**CD\n23.45",
            "https://example.com/?c=ABCD2345&a=0",
        ] {
            assert!(LinkCode::find_all(text).contains("ABCD2345"), "{text}");
        }
        for text in ["", "ABCD234", "ABCD0 2345", "ABCD 1 2345", "ABCDÄ2345"] {
            assert!(!LinkCode::find_all(text).contains("ABCD2345"), "{text}");
        }
    }

    #[test]
    fn codes_are_parsed_as_users_type_them() {
        let code: LinkCode = "ABCD2345".parse().unwrap();
        for typed in ["abcd2345", " ABCD-2345 ", "AB CD 23 45"] {
            assert!(typed.parse() == Ok(code.clone()), "{typed}");
        }
        for wrong in [
            "",
            "ABCD234",
            "ABCD23456",
            "ABCD2340",
            "ABCD234I",
            "ABCD234Ä",
        ] {
            assert!(wrong.parse::<LinkCode>() == Err(InvalidCode), "{wrong}");
        }
    }

    #[test]
    fn generated_codes_can_be_parsed_and_differ() {
        let codes: Vec<LinkCode> = (0..50).map(|_| LinkCode::generate().unwrap()).collect();
        for code in &codes {
            assert!(code.as_str().parse() == Ok(code.clone()));
            assert_eq!(codes.iter().filter(|other| *other == code).count(), 1);
        }
        assert!(!format!("{:?}", codes[0]).contains(codes[0].as_str()));
    }
}
