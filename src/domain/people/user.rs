//! A tenant's users, and their identities on platforms.

use chrono::{DateTime, Utc};

use crate::domain::people::identity::IdentityName;
use crate::ids::{IdentityId, UserId};

/// The most identities of one user.
pub const MAX_IDENTITIES: usize = 100;

/// The schema of a tenant's own id of a user.
pub struct ExternalId;

text_schema!(ExternalId, r"^[^\u0000-\u001f\u007f-\u009f]+$", 1, 256);

/// Whether the text is a valid external id of a user.
pub fn is_external_id(text: &str) -> bool {
    (1..=256).contains(&text.chars().count()) && !text.chars().any(char::is_control)
}

pub const EXTERNAL_ID_RULE: &str = "must be 1 to 256 characters, none of them control characters";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    pub id: UserId,
    pub external_id: Option<String>,
    pub display_name: Option<String>,
    /// A name of the IANA time zone database.
    pub time_zone: Option<String>,
    /// The time since which all platforms share one slot.
    pub shared_since: Option<DateTime<Utc>>,
    pub created_at: DateTime<Utc>,
}

/// An identity on a platform, as a token or a bridge presents it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewIdentity {
    pub name: IdentityName,
    /// The issuer whose token proves it; `None` where a bridge vouches.
    pub issuer: Option<String>,
}

/// A stored identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    pub id: IdentityId,
    pub name: IdentityName,
}

/// A stored identity and its user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdentityOwner {
    pub id: IdentityId,
    pub user_id: UserId,
}

/// The whole record of an identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdentityRecord {
    pub id: IdentityId,
    pub user_id: UserId,
    pub name: IdentityName,
    /// The id as the token or the bridge wrote it.
    pub raw: String,
    pub issuer: Option<String>,
    pub imported: bool,
    /// The time since which it belongs to its user.
    pub linked_at: DateTime<Utc>,
    pub created_at: DateTime<Utc>,
}

impl IdentityRecord {
    pub fn identity(&self) -> Identity {
        Identity {
            id: self.id,
            name: self.name.clone(),
        }
    }
}
