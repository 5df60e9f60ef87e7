//! Grants: the right of another user to read and write in one conversation, for a limited time.

use chrono::{DateTime, Utc};

use crate::domain::values::text_enum::text_enum;
use crate::ids::UserId;

text_enum!(
    /// The origin of a grant.
    GrantVia { Continuation = "continuation" }
);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    pub user_id: UserId,
    pub via: GrantVia,
    pub created_at: DateTime<Utc>,
    pub expires_at: DateTime<Utc>,
    pub revoked_at: Option<DateTime<Utc>>,
}
