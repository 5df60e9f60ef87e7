//! The time and session of a user's last message on a platform.

use chrono::{DateTime, TimeDelta, Utc};

use crate::domain::bridge::chat::Chat;
use crate::domain::conversation::session::SessionHandle;
use crate::domain::people::user::Identity;

/// The minimum interval between two writes of an identity's presence.
pub const GRAIN: TimeDelta = TimeDelta::minutes(1);

#[derive(Debug, Clone)]
pub struct Presence {
    pub identity: Identity,
    pub last_seen_at: Option<DateTime<Utc>>,
    pub session_key: Option<String>,
    pub session: Option<SessionHandle>,
    pub home_channel: Option<Chat>,
}
