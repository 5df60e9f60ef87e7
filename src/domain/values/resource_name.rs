//! Names of agents and issuers. They are part of paths and session keys, so they contain no character
//! with a meaning there.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

const MAX: usize = 64;

#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct ResourceName(String);

wire_text!(ResourceName, "^[a-z0-9][a-z0-9_-]{0,63}$", 1, MAX);

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a name is 1 to {MAX} of a-z, 0-9, _ and -, beginning with a letter or digit")]
pub struct InvalidResourceName;

impl ResourceName {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for ResourceName {
    type Err = InvalidResourceName;

    fn from_str(text: &str) -> Result<Self, InvalidResourceName> {
        let is_alphanumeric = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        let well_formed = (1..=MAX).contains(&text.len())
            && text.bytes().next().is_some_and(is_alphanumeric)
            && text
                .bytes()
                .all(|b| is_alphanumeric(b) || b == b'_' || b == b'-');
        if well_formed {
            Ok(Self(text.to_owned()))
        } else {
            Err(InvalidResourceName)
        }
    }
}

impl fmt::Display for ResourceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_no_special_character_of_a_path_or_key() {
        for good in ["main", "a", "2nd", "my-agent_3", &"x".repeat(64)] {
            assert!(good.parse::<ResourceName>().is_ok(), "{good}");
        }
        for bad in [
            "",
            "-a",
            "A",
            "a:b",
            "a/b",
            "a b",
            "a%",
            "é",
            &"x".repeat(65),
        ] {
            assert!(bad.parse::<ResourceName>().is_err(), "{bad}");
        }
    }
}
