//! Short secrets that people carry from one chat to another, and how often they may be guessed wrong.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use chrono::TimeDelta;

use crate::crypto;
use crate::error::{Code as ErrorCode, Error, Result};

/// 32 signs that nobody reads as another: no 0 and O, no 1 and I.
const ALPHABET: &[u8; 32] = b"ABCDEFGHJKLMNPQRSTUVWXYZ23456789";
const LINK_CHARS: usize = 8;

/// How long a link code is good.
pub const LINK_LIFE: TimeDelta = TimeDelta::minutes(10);
/// How many a person can have pending.
pub const MAX_PENDING: i16 = 3;

/// Wrong codes of one account, and how long it is locked then.
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

/// A link code. Never printed but where it is shown to its person.
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
        // 256 is a multiple of 32: every sign is as likely as any other.
        let sign = |byte: &u8| char::from(ALPHABET[usize::from(*byte) % ALPHABET.len()]);
        Ok(Self(random.iter().map(sign).collect()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Everything in a text that somebody could read as a code: eight signs in a row, whatever stands before, behind
    /// and, but for letters and digits, between them.
    pub fn find_all(text: &str) -> BTreeSet<String> {
        let signs: Vec<char> = text
            .chars()
            .filter(|c| c.is_alphanumeric())
            .map(|c| c.to_ascii_uppercase())
            .collect();
        let known = |c: &char| u8::try_from(*c).is_ok_and(|sign| ALPHABET.contains(&sign));
        signs
            .windows(LINK_CHARS)
            .filter(|window| window.iter().all(known))
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

    /// People type in lower case and part long words.
    fn from_str(text: &str) -> Result<Self, InvalidCode> {
        let signs: String = text
            .chars()
            .filter(|c| !c.is_whitespace() && *c != '-')
            .map(|c| c.to_ascii_uppercase())
            .collect();
        let known = signs.bytes().all(|sign| ALPHABET.contains(&sign));
        if known && signs.len() == LINK_CHARS {
            Ok(Self(signs))
        } else {
            Err(InvalidCode)
        }
    }
}

/// The one answer to a code that is wrong, has run out, was used, or is someone else's.
pub fn code_not_found() -> Error {
    let detail = "the code is invalid, used or expired; ask for a new one";
    Error::new(ErrorCode::CodeNotFound, detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_found_wherever_they_stand() {
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
    fn codes_are_read_as_people_type_them() {
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
    fn generated_codes_can_be_read_back_and_differ() {
        let codes: Vec<LinkCode> = (0..50).map(|_| LinkCode::generate().unwrap()).collect();
        for code in &codes {
            assert!(code.as_str().parse() == Ok(code.clone()));
            assert_eq!(codes.iter().filter(|other| *other == code).count(), 1);
        }
        assert!(!format!("{:?}", codes[0]).contains(codes[0].as_str()));
    }
}
