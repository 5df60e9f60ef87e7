//! Grants: the right of another user to read and write in one conversation, for a limited time.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use crate::domain::conversation::session::words;
use crate::error::{Error, Result};
use crate::ids::UserId;

words!(
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
