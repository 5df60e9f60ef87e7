//! Where a person wants to be reached on a platform.

use chrono::{DateTime, Utc};

use crate::domain::chat::Chat;
use crate::domain::platform::PlatformScope;
use crate::domain::user::Identity;

#[derive(Debug, Clone)]
pub struct HomeChannel {
    pub platform: PlatformScope,
    pub identity: Identity,
    pub chat: Chat,
    pub updated_at: DateTime<Utc>,
}
