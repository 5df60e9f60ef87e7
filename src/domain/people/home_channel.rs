//! A user's home channel on a platform, for messages that the service starts.

use chrono::{DateTime, Utc};

use crate::domain::bridge::chat::Chat;
use crate::domain::people::platform::PlatformScope;
use crate::domain::people::user::Identity;

#[derive(Debug, Clone)]
pub struct HomeChannel {
    pub platform: PlatformScope,
    pub identity: Identity,
    pub chat: Chat,
    pub updated_at: DateTime<Utc>,
}
