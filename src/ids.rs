//! Ids: a prefix that names the type, and a UUIDv7 that sorts by time. Columns hold the uuid, the wire holds `prefix_`
//! and 32 hex digits. This is the only place that creates or parses one.

use std::fmt;
use std::str::FromStr;

use uuid::Uuid;

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not an id of this kind")]
pub struct InvalidId;

/// A fresh, time-ordered id part.
#[allow(clippy::disallowed_methods, reason = "the home of id generation")]
fn fresh() -> Uuid {
    Uuid::now_v7()
}

/// Strict: the exact prefix, then exactly 32 lower-case hex digits, so one id has one spelling.
fn parse(text: &str, prefix: &str) -> Result<Uuid, InvalidId> {
    let rest = text
        .strip_prefix(prefix)
        .and_then(|rest| rest.strip_prefix('_'))
        .ok_or(InvalidId)?;
    let strict = rest.len() == 32
        && rest
            .bytes()
            .all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    if !strict {
        return Err(InvalidId);
    }
    Uuid::try_parse(rest).map_err(|_| InvalidId)
}

/// Any of the ids below, for values that must not contain text.
pub trait Id: fmt::Display {}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, sqlx::Type)]
        #[sqlx(transparent)]
        pub struct $name(Uuid);

        impl $name {
            pub const PREFIX: &'static str = $prefix;

            /// A new id, unlike any other.
            pub fn generate() -> Self {
                Self(fresh())
            }

            pub const fn from_uuid(uuid: Uuid) -> Self {
                Self(uuid)
            }

            pub const fn as_uuid(&self) -> Uuid {
                self.0
            }
        }

        impl Id for $name {}

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}_{}", $prefix, self.0.simple())
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl FromStr for $name {
            type Err = InvalidId;

            fn from_str(text: &str) -> Result<Self, InvalidId> {
                parse(text, $prefix).map(Self)
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        wire_text!(
            $name,
            concat!("^", $prefix, "_[0-9a-f]{32}$"),
            $prefix.len() + 33,
            $prefix.len() + 33
        );
    };
}

id!(
    /// One customer of the service.
    TenantId, "ten"
);
id!(
    /// One API key of a tenant. It is public: the key's text contains it.
    ApiKeyId, "key"
);
id!(
    /// A user: one human inside a tenant, on every platform.
    UserId, "usr"
);
id!(
    /// One identity of a user on one platform.
    IdentityId, "idn"
);
id!(
    /// One session. A conversation has the id of its first session.
    SessionId, "ses"
);
id!(
    /// One turn: a message and all work to answer it.
    TurnId, "trn"
);
id!(
    /// The slot that a session key names. Never in an answer.
    SlotId, "slt"
);
id!(
    /// The row of a link or continuation code. Never in an answer.
    CodeId, "cod"
);
id!(
    /// One move of an identity to another user. Never in an answer.
    MoveId, "mov"
);
id!(
    /// One message that a bridge must send on its platform.
    DeliveryId, "dlv"
);
id!(
    /// One start of a node. Operators see it.
    BootId, "boot"
);
id!(
    /// One row of the jobs table. Never in an answer.
    JobId, "job"
);
id!(
    /// One request, as logs and answers name it.
    RequestId, "req"
);

impl TenantId {
    /// The operator's own tenant: it scopes the actions of operators, and never has a key.
    pub const OPERATOR: Self = Self(Uuid::nil());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_survives_its_wire_form_and_sorts_by_time() {
        let first = TenantId::generate();
        let second = TenantId::generate();
        assert_eq!(first.to_string().parse(), Ok(first));
        assert!(first.to_string() < second.to_string());
    }

    #[test]
    fn an_id_has_one_spelling() {
        let id = TenantId::from_uuid(Uuid::from_u128(0xabc));
        let text = id.to_string();
        for wrong in [
            text.to_uppercase(),
            text.replace("ten_", "key_"),
            text.replace("ten_", "ten"),
            format!("{text} "),
            format!("ten_{}", id.as_uuid()),
            "ten_".to_owned(),
        ] {
            assert_eq!(wrong.parse::<TenantId>(), Err(InvalidId), "{wrong}");
        }
    }
}
