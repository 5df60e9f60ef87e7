//! The canonical person inside a tenant, and the accounts they speak from.

use chrono::{DateTime, Utc};

use crate::domain::identity::IdentityName;
use crate::ids::{IdentityId, UserId};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    pub id: UserId,
    pub external_id: Option<String>,
    pub display_name: Option<String>,
    pub created_at: DateTime<Utc>,
}

/// An account on a platform, as whoever vouches for it names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
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
