//! How callers name users: by an identity on a platform, by the user's id, or as `me`.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use crate::domain::people::normalise::normalise;
use crate::domain::people::platform::{InvalidPlatform, PlatformScope, covers};
use crate::ids::UserId;

const MAX_EXTERNAL_ID: usize = 256;
const MIN_CHARS: usize = 3;
const MAX_CHARS: usize = 32 + 1 + 128 + 1 + MAX_EXTERNAL_ID;

/// An identity: `platform:external_id` or `platform@scope:external_id`, split at the first colon. Names
/// are equal if the platform treats them as equal.
#[derive(Debug, Clone)]
pub struct IdentityName {
    platform: PlatformScope,
    external_id: String,
    raw: String,
}

impl PartialEq for IdentityName {
    fn eq(&self, other: &Self) -> bool {
        (&self.platform, &self.external_id) == (&other.platform, &other.external_id)
    }
}

impl Eq for IdentityName {}

impl std::hash::Hash for IdentityName {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        (&self.platform, &self.external_id).hash(state);
    }
}

wire_text!(
    IdentityName,
    r"^(?!(dm|group|channel|thread|user|main)[@:])[a-z][a-z0-9_-]{0,31}(@[!-9;-~]{1,128})?:[^\u0000-\u001f\u007f-\u009f]{1,256}$",
    MIN_CHARS,
    MAX_CHARS
);

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidIdentityName {
    #[error("an identity is platform:external_id or platform@scope:external_id")]
    Shape,
    #[error(transparent)]
    Platform(#[from] InvalidPlatform),
    #[error("the scope of an identity has no colon")]
    Scope,
    #[error("an external id is 1 to {MAX_EXTERNAL_ID} characters without control characters")]
    ExternalId,
}

impl IdentityName {
    /// `raw` is the id as the caller writes it.
    pub fn new(platform: PlatformScope, raw: String) -> Result<Self, InvalidIdentityName> {
        // With a colon in the scope, the text would name another identity.
        if platform.scope().is_some_and(|scope| scope.contains(':')) {
            return Err(InvalidIdentityName::Scope);
        }
        let length = raw.chars().count();
        if !(1..=MAX_EXTERNAL_ID).contains(&length) || raw.chars().any(char::is_control) {
            return Err(InvalidIdentityName::ExternalId);
        }
        Ok(Self {
            external_id: normalise(platform.platform(), &raw),
            platform,
            raw,
        })
    }

    pub fn platform(&self) -> &PlatformScope {
        &self.platform
    }

    /// The id in the form in which the platform compares it.
    pub fn external_id(&self) -> &str {
        &self.external_id
    }

    /// The id as the caller wrote it.
    pub fn raw(&self) -> &str {
        &self.raw
    }

    /// Whether a key with these platforms may vouch for the identity.
    pub fn is_covered_by(&self, platforms: &[PlatformScope]) -> bool {
        covers(platforms, &self.platform)
    }
}

impl FromStr for IdentityName {
    type Err = InvalidIdentityName;

    fn from_str(text: &str) -> Result<Self, InvalidIdentityName> {
        let (platform, external_id) = text.split_once(':').ok_or(InvalidIdentityName::Shape)?;
        Self::new(platform.parse()?, external_id.to_owned())
    }
}

impl fmt::Display for IdentityName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.platform, self.external_id)
    }
}

impl Serialize for IdentityName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A user, as a request body names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UserName {
    /// `me`: the user of the caller's token.
    Me,
    User(UserId),
    Identity(IdentityName),
}

wire_text!(
    UserName as "PersonName",
    r"^(me|usr_[0-9a-f]{32}|(?!usr_|(dm|group|channel|thread|user|main)[@:])[a-z][a-z0-9_-]{0,31}(@[!-9;-~]{1,128})?:[^\u0000-\u001f\u007f-\u009f]{1,256})$",
    2,
    MAX_CHARS
);

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidUserName {
    #[error("what begins with usr_ must be the whole id of a user")]
    User,
    #[error("a user is me, the id of a user, or an identity; {0}")]
    Identity(#[from] InvalidIdentityName),
}

impl fmt::Display for UserName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Me => f.write_str("me"),
            Self::User(id) => id.fmt(f),
            Self::Identity(name) => name.fmt(f),
        }
    }
}

impl FromStr for UserName {
    type Err = InvalidUserName;

    fn from_str(text: &str) -> Result<Self, InvalidUserName> {
        let is_id = text
            .strip_prefix(UserId::PREFIX)
            .is_some_and(|rest| rest.starts_with('_'));
        if text == "me" {
            Ok(Self::Me)
        } else if is_id {
            let id = text.parse().map_err(|_| InvalidUserName::User)?;
            Ok(Self::User(id))
        } else {
            Ok(Self::Identity(text.parse()?))
        }
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    #[test]
    fn an_identity_is_split_at_the_first_colon() {
        for (text, platform, external_id) in [
            ("telegram:42", "telegram", "42"),
            ("slack@T1:U:2", "slack@T1", "U:2"),
            ("matrix:@ann:example.org", "matrix", "@ann:example.org"),
            ("irc::", "irc", ":"),
            ("web:Ünï 🙂", "web", "Ünï 🙂"),
            ("usr_x:1", "usr_x", "1"),
        ] {
            let name: IdentityName = text.parse().unwrap();
            assert_eq!(name.platform().to_string(), platform);
            assert_eq!(name.external_id(), external_id);
            assert_eq!(name.to_string(), text);
        }
        let longest = format!("web:{}", "ü".repeat(256));
        assert!(longest.parse::<IdentityName>().is_ok());
    }

    #[test]
    fn identities_are_equal_where_their_platform_says_so() {
        let parse = |text: &str| text.parse::<IdentityName>().unwrap();
        let bob = parse("irc@a:Bob");
        assert_eq!((bob.external_id(), bob.raw()), ("bob", "Bob"));
        assert_eq!(bob, parse("irc@a:bob"));
        assert_ne!(bob, parse("irc@b:bob"));
        assert_ne!(parse("matrix:@Ann:x"), parse("matrix:@ann:x"));
    }

    #[test]
    fn an_invalid_identity_is_refused() {
        let too_long = format!("web:{}", "x".repeat(257));
        for (text, why) in [
            ("", InvalidIdentityName::Shape),
            ("me", InvalidIdentityName::Shape),
            ("telegram", InvalidIdentityName::Shape),
            (":42", InvalidPlatform::Name.into()),
            ("Telegram:42", InvalidPlatform::Name.into()),
            ("dm:42", InvalidPlatform::Reserved.into()),
            ("user@x:42", InvalidPlatform::Reserved.into()),
            ("slack@:42", InvalidPlatform::Scope.into()),
            ("slack@a b:42", InvalidPlatform::Scope.into()),
            ("telegram:", InvalidIdentityName::ExternalId),
            ("telegram:a\nb", InvalidIdentityName::ExternalId),
            ("telegram:a\u{85}", InvalidIdentityName::ExternalId),
            (&too_long, InvalidIdentityName::ExternalId),
        ] {
            assert_eq!(text.parse::<IdentityName>(), Err(why), "{text}");
        }
    }

    #[test]
    fn a_scope_with_a_colon_cannot_name_another_identity() {
        let platform: PlatformScope = "irc@a:b".parse().unwrap();
        let named = IdentityName::new(platform, "c".to_owned());
        assert_eq!(named, Err(InvalidIdentityName::Scope));
    }

    #[test]
    fn a_key_vouches_for_the_identities_of_its_platforms_only() {
        let platforms: Vec<PlatformScope> = ["telegram", "slack@T1"]
            .map(|text| text.parse().unwrap())
            .to_vec();
        for (text, covered) in [
            ("telegram:1", true),
            ("telegram@bot2:1", true),
            ("slack@T1:1", true),
            ("slack@T2:1", false),
            ("slack:1", false),
            ("discord:1", false),
        ] {
            let name: IdentityName = text.parse().unwrap();
            assert_eq!(name.is_covered_by(&platforms), covered, "{text}");
            assert!(!name.is_covered_by(&[]));
        }
    }

    #[test]
    fn a_user_is_named_by_me_an_id_or_an_identity() {
        let id = UserId::from_uuid(Uuid::from_u128(7));
        let identity: IdentityName = "telegram:42".parse().unwrap();
        let shape = InvalidUserName::Identity(InvalidIdentityName::Shape);
        for (text, user) in [
            ("me", Ok(UserName::Me)),
            (&id.to_string(), Ok(UserName::User(id))),
            ("telegram:42", Ok(UserName::Identity(identity))),
            ("usr_7", Err(InvalidUserName::User)),
            ("usr_x:1", Err(InvalidUserName::User)),
            ("usr", Err(shape)),
            ("Me", Err(shape)),
            ("", Err(shape)),
        ] {
            assert_eq!(text.parse::<UserName>(), user, "{text}");
        }
    }
}
