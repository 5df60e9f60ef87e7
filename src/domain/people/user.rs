//! The canonical person inside a tenant, and the accounts they speak from.

use chrono::{DateTime, Utc};

use crate::domain::people::identity::IdentityName;
use crate::ids::{IdentityId, UserId};

/// How many accounts one person can have.
pub const MAX_IDENTITIES: usize = 100;

/// What a tenant calls a person, where it is documented.
pub struct ExternalId;

text_schema!(ExternalId, r"^[^\u0000-\u001f\u007f-\u009f]+$", 1, 256);

/// Whether a tenant may call a person so.
pub fn is_external_id(text: &str) -> bool {
    (1..=256).contains(&text.chars().count()) && !text.chars().any(char::is_control)
}

pub const EXTERNAL_ID_RULE: &str = "must be 1 to 256 characters, none of them control characters";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    pub id: UserId,
    pub external_id: Option<String>,
    pub display_name: Option<String>,
    /// A name of the IANA database.
    pub time_zone: Option<String>,
    /// Since when all platforms share one slot.
    pub shared_since: Option<DateTime<Utc>>,
    pub created_at: DateTime<Utc>,
}

/// An account on a platform, as whoever vouches for it names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewIdentity {
    pub name: IdentityName,
    /// The issuer whose token proves it; `None` where a bridge vouches.
    pub issuer: Option<String>,
}

/// An account that has spoken before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    pub id: IdentityId,
    pub name: IdentityName,
}

/// The person an account belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KnownIdentity {
    pub id: IdentityId,
    pub user_id: UserId,
}

/// An account with everything that is known of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdentityRecord {
    pub id: IdentityId,
    pub user_id: UserId,
    pub name: IdentityName,
    /// The id as whoever vouched for it wrote it.
    pub raw: String,
    pub issuer: Option<String>,
    pub imported: bool,
    /// Since when it belongs to its user.
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
