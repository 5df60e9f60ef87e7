//! Platforms and their scopes (`telegram`, `slack@T012`), which limit the identities a bridge key covers.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

/// Words that session keys contain. A platform of that name could forge a key.
const RESERVED: [&str; 6] = ["dm", "group", "channel", "thread", "user", "main"];
const MAX_NAME: usize = 32;
const MAX_SCOPE: usize = 128;

/// `platform`, or `platform@scope` where the platform has workspaces or several bot accounts.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PlatformScope {
    platform: String,
    scope: Option<String>,
}

wire_text!(
    PlatformScope,
    "^(?!(dm|group|channel|thread|user|main)(@|$))[a-z][a-z0-9_-]{0,31}(@[!-~]{1,128})?$",
    1,
    MAX_NAME + 1 + MAX_SCOPE
);

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidPlatform {
    #[error(
        "a platform is 1 to {MAX_NAME} of a-z, 0-9, _ and -, beginning with a letter, and may be followed by @scope"
    )]
    Name,
    #[error("a platform may not be named dm, group, channel, thread, user or main")]
    Reserved,
    #[error("a scope is 1 to {MAX_SCOPE} visible ASCII characters")]
    Scope,
}

impl PlatformScope {
    pub fn platform(&self) -> &str {
        &self.platform
    }

    pub fn scope(&self) -> Option<&str> {
        self.scope.as_deref()
    }

    /// The same platform in another scope.
    pub fn with_scope(&self, scope: &str) -> Self {
        Self {
            platform: self.platform.clone(),
            scope: Some(scope.to_owned()),
        }
    }

    /// Reads two columns.
    pub fn from_columns(platform: &str, scope: &str) -> Result<Self, InvalidPlatform> {
        match scope {
            "" => platform.parse(),
            scope => format!("{platform}@{scope}").parse(),
        }
    }

    /// Whether an entry of a key covers `platform` with `scope`. Without a scope it covers every scope.
    pub fn covers(&self, platform: &str, scope: Option<&str>) -> bool {
        self.platform == platform && (self.scope.is_none() || self.scope.as_deref() == scope)
    }
}

/// Whether one of a key's platforms covers `wanted`: the one rule, for identities, chats and deliveries.
pub fn covers(platforms: &[PlatformScope], wanted: &PlatformScope) -> bool {
    let scope = wanted.scope();
    platforms
        .iter()
        .any(|entry| entry.covers(&wanted.platform, scope))
}

/// What of `wanted` a key's platforms cover: all of it, or those workspaces of it that they name.
pub fn covered_part(platforms: &[PlatformScope], wanted: &PlatformScope) -> Vec<PlatformScope> {
    if covers(platforms, wanted) {
        return vec![wanted.clone()];
    }
    let within = |entry: &&PlatformScope| wanted.covers(&entry.platform, entry.scope());
    platforms.iter().filter(within).cloned().collect()
}

impl FromStr for PlatformScope {
    type Err = InvalidPlatform;

    fn from_str(text: &str) -> Result<Self, InvalidPlatform> {
        let (name, scope) = match text.split_once('@') {
            Some((name, scope)) => (name, Some(scope)),
            None => (text, None),
        };
        let is_allowed =
            |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_' || b == b'-';
        let well_formed = (1..=MAX_NAME).contains(&name.len())
            && name.starts_with(|c: char| c.is_ascii_lowercase())
            && name.bytes().all(is_allowed);
        if !well_formed {
            return Err(InvalidPlatform::Name);
        }
        if RESERVED.contains(&name) {
            return Err(InvalidPlatform::Reserved);
        }
        if let Some(scope) = scope {
            let visible = scope.bytes().all(|b| b.is_ascii_graphic());
            if !(1..=MAX_SCOPE).contains(&scope.len()) || !visible {
                return Err(InvalidPlatform::Scope);
            }
        }
        Ok(Self {
            platform: name.to_owned(),
            scope: scope.map(str::to_owned),
        })
    }
}

impl fmt::Display for PlatformScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.scope {
            Some(scope) => write!(f, "{}@{scope}", self.platform),
            None => f.write_str(&self.platform),
        }
    }
}

impl Serialize for PlatformScope {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_scopes_are_checked() {
        for good in ["telegram", "slack@T012", "irc@a:b", "my-app_2"] {
            let parsed: PlatformScope = good.parse().unwrap();
            assert_eq!(parsed.to_string(), good);
        }
        for (bad, why) in [
            ("", InvalidPlatform::Name),
            ("Slack", InvalidPlatform::Name),
            ("2fast", InvalidPlatform::Name),
            ("a:b", InvalidPlatform::Name),
            ("dm", InvalidPlatform::Reserved),
            ("main@x", InvalidPlatform::Reserved),
            ("slack@", InvalidPlatform::Scope),
            ("slack@a b", InvalidPlatform::Scope),
        ] {
            assert_eq!(bad.parse::<PlatformScope>(), Err(why), "{bad}");
        }
    }

    #[test]
    fn a_platform_is_narrowed_to_what_a_key_covers_of_it() {
        let read = |names: &[&str]| -> Vec<PlatformScope> {
            names.iter().map(|name| name.parse().unwrap()).collect()
        };
        for (own, wanted, expected) in [
            (&["slack"][..], "slack@T1", &["slack@T1"][..]),
            (&["slack"], "slack", &["slack"]),
            (&["slack@T1", "telegram"], "slack", &["slack@T1"]),
            (
                &["slack@T1", "slack@T2"],
                "slack",
                &["slack@T1", "slack@T2"],
            ),
            (&["slack@T1"], "slack@T2", &[]),
            (&["telegram"], "slack", &[]),
            (&[], "slack", &[]),
        ] {
            let own = read(own);
            let wanted = wanted.parse().unwrap();
            assert_eq!(
                covered_part(&own, &wanted),
                read(expected),
                "{own:?} {wanted}"
            );
            let whole = expected.len() == 1 && read(expected)[0] == wanted;
            assert_eq!(covers(&own, &wanted), whole, "{own:?} {wanted}");
        }
    }

    #[test]
    fn an_entry_without_scope_covers_every_scope() {
        let all: PlatformScope = "slack".parse().unwrap();
        let one: PlatformScope = "slack@T1".parse().unwrap();
        assert!(all.covers("slack", Some("T1")) && all.covers("slack", None));
        assert!(one.covers("slack", Some("T1")));
        assert!(!one.covers("slack", Some("T2")) && !one.covers("slack", None));
        assert!(!all.covers("telegram", None));
    }
}
