//! Names from clients: session keys and session ids. They are names in the client's namespace and
//! never rights. Names with a prefix of the service are reserved, and clients cannot create them.

use std::fmt;

use crate::error::{Code, Error, FieldError, Result};
use crate::ids::SessionId;

pub const MAX_NAME: usize = 256;

/// The prefix of keys that the service builds.
const BUILT_KEY: &str = "agent:";
/// The prefixes of the service's ids that can stand for a conversation. Ids of credentials and requests
/// never do, so clients may use their prefixes.
const OWN_PREFIXES: [&str; 7] = ["ten_", "usr_", "idn_", "ses_", "trn_", "hnd_", "dlv_"];

/// A session key: the stable name of a slot.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SessionKey(String);

text_schema!(SessionKey, "^[!-~]+$", 1, MAX_NAME);

impl SessionKey {
    /// Parses the key at `pointer` of a request.
    pub fn parse(text: &str, pointer: &str) -> Result<Self> {
        if is_visible(text) {
            Ok(Self(text.to_owned()))
        } else {
            let detail = format!("a key is 1 to {MAX_NAME} visible ASCII characters");
            Err(refuse(Code::InvalidSessionKey, pointer, detail))
        }
    }

    /// A key that the service built.
    pub fn built(text: String) -> Self {
        Self(text)
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether only the service creates such a key. A client can look it up, but not create it.
    pub fn is_reserved(&self) -> bool {
        is_built_key(&self.0) || has_own_prefix(&self.0)
    }
}

impl fmt::Display for SessionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Whether the service built `key` for a chat of a platform or for a user.
pub fn is_built_key(key: &str) -> bool {
    key.starts_with(BUILT_KEY)
}

/// A reference to a session in a request: by the service's id, or by the client's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SessionRef {
    Id(SessionId),
    Name(ClientSessionId),
}

text_schema!(SessionRef, "^[!-~]+$", 1, MAX_NAME);

impl SessionRef {
    /// Parses the id at `pointer` of a request. A reserved id that is not the id of a session is not found.
    pub fn parse(text: &str, pointer: &str) -> Result<Self> {
        if let Ok(id) = text.parse() {
            return Ok(Self::Id(id));
        }
        ClientSessionId::parse(text, pointer).map(Self::Name)
    }
}

impl fmt::Display for SessionRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Id(id) => id.fmt(f),
            Self::Name(name) => f.write_str(&name.0),
        }
    }
}

/// A client's own id of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientSessionId(String);

impl ClientSessionId {
    pub fn parse(text: &str, pointer: &str) -> Result<Self> {
        let unsafe_in_paths = text.contains("..") || text.contains(['/', '\\']);
        if !is_visible(text) || unsafe_in_paths {
            let detail = format!(
                "an id is 1 to {MAX_NAME} visible ASCII characters, without .. and / and \\"
            );
            return Err(refuse(Code::InvalidSessionId, pointer, detail));
        }
        if has_own_prefix(text) || is_built_key(text) {
            return Err(session_not_found());
        }
        Ok(Self(text.to_owned()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

pub fn session_not_found() -> Error {
    Error::new(Code::SessionNotFound, "no such session")
}

pub fn session_key_not_found() -> Error {
    Error::new(Code::SessionKeyNotFound, "no such session key")
}

fn is_visible(text: &str) -> bool {
    (1..=MAX_NAME).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic())
}

fn has_own_prefix(text: &str) -> bool {
    OWN_PREFIXES.iter().any(|prefix| text.starts_with(prefix))
}

fn refuse(code: Code, pointer: &str, detail: String) -> Error {
    Error::fields(code, vec![FieldError::new(pointer, detail)])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id_code(text: &str) -> Option<Code> {
        SessionRef::parse(text, "/id").err().map(|error| error.code)
    }

    #[test]
    fn ids_are_visible_ascii_that_is_safe_in_a_path() {
        for good in [
            "a",
            "chat-1",
            "key_1",
            "a.b",
            "x:y",
            "%41",
            "~",
            &"x".repeat(256),
        ] {
            assert_eq!(id_code(good), None, "{good}");
        }
        for bad in [
            "",
            " ",
            "a b",
            "a..b",
            "a/b",
            "a\\b",
            "é",
            "a\n",
            &"x".repeat(257),
        ] {
            assert_eq!(id_code(bad), Some(Code::InvalidSessionId), "{bad}");
        }
    }

    #[test]
    fn reserved_ids_are_looked_up_but_never_created() {
        let id = SessionId::generate();
        assert_eq!(
            SessionRef::parse(&id.to_string(), "/id").unwrap(),
            SessionRef::Id(id)
        );
        for reserved in ["ses_1", "usr_x", "trn_", "agent:main:x"] {
            assert_eq!(id_code(reserved), Some(Code::SessionNotFound), "{reserved}");
        }
    }

    #[test]
    fn keys_are_visible_ascii_and_some_are_reserved() {
        let parse = |text: &str| SessionKey::parse(text, "/session_key");
        for (good, reserved) in [
            ("my/key", false),
            ("a..b", false),
            ("agentx", false),
            ("agent:main:main", true),
            ("usr_1", true),
            ("hnd_1", true),
        ] {
            assert_eq!(parse(good).unwrap().is_reserved(), reserved, "{good}");
        }
        for bad in ["", "a b", "é", "\u{7f}", &"x".repeat(257)] {
            assert_eq!(
                parse(bad).unwrap_err().code,
                Code::InvalidSessionKey,
                "{bad}"
            );
        }
    }
}
