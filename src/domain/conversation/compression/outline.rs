//! What a plan knows of a message.

use crate::domain::conversation::message::{MessageKind, Role};

/// What a plan depends on, of one message. A transcript has thousands: each is 16 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outline {
    pub seq: i64,
    pub tokens: i32,
    pub role: Role,
    pub kind: MessageKind,
    /// How many tools it calls. Exact up to 255 from the model's last message before the newest turn of a user on;
    /// before that 0, or more than 0.
    pub calls: u8,
    /// Whether it has an image. Always false before the newest turn of a user, where no plan asks.
    pub has_image: bool,
}

const _: () = assert!(size_of::<Outline>() == 16);

impl Outline {
    /// Whether a user wrote it.
    pub fn is_users(&self) -> bool {
        self.role == Role::User && self.kind == MessageKind::Normal
    }

    /// Whether the model wrote it: a notice can have the role too.
    pub fn is_models(&self) -> bool {
        self.role == Role::Assistant && self.kind == MessageKind::Normal
    }
}
