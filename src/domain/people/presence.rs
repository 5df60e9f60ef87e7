//! When a person was last heard on a platform, and where.

use chrono::{DateTime, TimeDelta, Utc};

use crate::domain::bridge::chat::Chat;
use crate::domain::conversation::session::SessionHandle;
use crate::domain::people::user::Identity;

/// Presence is written at most this often.
pub const GRAIN: TimeDelta = TimeDelta::minutes(1);

#[derive(Debug, Clone)]
pub struct Presence {
    pub identity: Identity,
    pub last_seen_at: Option<DateTime<Utc>>,
    pub session_key: Option<String>,
    pub session: Option<SessionHandle>,
    pub home_channel: Option<Chat>,
}
