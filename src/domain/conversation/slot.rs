//! A slot: the object that a session key names. It outlives each of its current sessions.

use chrono::{DateTime, Utc};

use crate::domain::conversation::session::{ConversationHandle, Ownership};
use crate::domain::conversation::session_name::{SessionKey, is_built_key, session_key_not_found};
use crate::domain::people::access::{Access, Visibility};
use crate::domain::values::text_enum::text_enum;
use crate::error::Result;
use crate::ids::{IdentityId, SessionId, SlotId, UserId};

text_enum!(
    /// The kind of a slot. The service creates all but the first, for a chat of a platform.
    SlotKind { Client = "client", Dm = "dm", Group = "group", Thread = "thread" }
);

/// A slot with its current conversation.
#[derive(Debug, Clone)]
pub struct Slot {
    pub id: SlotId,
    pub key: String,
    pub user_id: Option<UserId>,
    pub agent: String,
    pub generation: i64,
    pub last_user_at: DateTime<Utc>,
    pub created_at: DateTime<Utc>,
    pub current: Option<Current>,
}

/// The current conversation of a slot, and its tip.
#[derive(Debug, Clone)]
pub struct Current {
    pub session_id: SessionId,
    pub name: ConversationHandle,
    pub owner: Ownership,
    pub last_active_at: DateTime<Utc>,
}

impl Slot {
    /// A key of others is reported as not found, whether it exists or not.
    pub fn check(&self, access: &Access) -> Result<()> {
        let is_visible = match access.visibility {
            Visibility::Tenant => true,
            Visibility::Service => self.user_id.is_none() && !is_built_key(&self.key),
            Visibility::User(user_id) => self.user_id == Some(user_id),
        };
        if is_visible {
            Ok(())
        } else {
            Err(session_key_not_found())
        }
    }
}

/// A slot to insert.
#[derive(Debug, Clone)]
pub struct NewSlot {
    pub id: SlotId,
    pub kind: SlotKind,
    pub key: SessionKey,
    pub user_id: Option<UserId>,
    /// The identity whose message creates it.
    pub identity_id: Option<IdentityId>,
    pub agent: String,
}
