//! Deliveries to platforms: their address, their lease, their retries and the dead letter.

use chrono::{DateTime, TimeDelta, Utc};
use serde::{Deserialize, Serialize};

use crate::domain::bridge::chat::Chat;
use crate::domain::conversation::session_key::encode;
use crate::domain::people::identity::IdentityName;
use crate::domain::tenant::agent::ChatType;
use crate::domain::values::text_enum::text_enum;
use crate::ids::{DeliveryId, IdentityId, SessionId, TurnId};

/// How long a bridge's lease of a delivery lasts.
pub const LEASE_TTL: TimeDelta = TimeDelta::seconds(60);
/// After this many attempts a delivery is a dead letter.
pub const MAX_ATTEMPTS: i32 = 10;

text_enum!(
    DeliveryKind { Reply = "reply", Handoff = "handoff", Notice = "notice", Security = "security" }
);

/// The address of a delivery: a chat on a platform.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    pub platform: String,
    /// Empty where the platform has none.
    pub scope: String,
    pub chat_ref: String,
    pub chat: Chat,
}

impl Address {
    /// The address of a chat of `sender`. A DM is addressed by its user, whatever id the platform gives it.
    pub fn of(chat: &Chat, sender: &IdentityName) -> Self {
        let platform = chat.platform_of(sender);
        let id = encode(chat.id.as_deref().unwrap_or_default());
        let chat_ref = match chat.kind {
            ChatType::Dm => format!("dm:{}", sender.external_id()),
            ChatType::Group => format!("group:{id}"),
            ChatType::Channel => format!("channel:{id}"),
            ChatType::Thread => {
                let thread = encode(chat.thread_id.as_deref().unwrap_or_default());
                format!("thread:{id}:{thread}")
            }
        };
        Self {
            platform: platform.platform().to_owned(),
            scope: platform.scope().unwrap_or_default().to_owned(),
            chat_ref,
            chat: chat.clone(),
        }
    }
}

/// The target of a turn's answer when it becomes a delivery.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplyTo {
    pub address: Address,
    pub identity_id: IdentityId,
    /// The platform's id of the message.
    pub message_id: Option<String>,
}

text_enum!(
    /// How the answer of a turn reaches the sender. `Failed`: it could not become a delivery.
    ReplyVia { Waiting = "waiting", Returned = "returned", Delivery = "delivery", Failed = "failed" }
);

/// A delivery to insert.
#[derive(Debug, Clone)]
pub struct NewDelivery<'a> {
    pub kind: DeliveryKind,
    pub address: &'a Address,
    pub identity_id: Option<IdentityId>,
    pub text: &'a str,
    pub turn_id: Option<TurnId>,
    pub session_id: Option<SessionId>,
    pub conversation_id: Option<SessionId>,
    pub in_reply_to: Option<&'a str>,
}

/// A stored delivery.
#[derive(Debug, Clone)]
pub struct Delivery {
    pub id: DeliveryId,
    pub kind: DeliveryKind,
    pub platform: String,
    pub scope: String,
    pub chat_ref: String,
    pub chat: Option<Chat>,
    pub identity: Option<String>,
    pub text: String,
    pub session_id: Option<SessionId>,
    pub conversation_id: Option<SessionId>,
    pub turn_id: Option<TurnId>,
    pub in_reply_to: Option<String>,
    pub seq: i64,
    pub attempt: i32,
    pub lease: Option<uuid::Uuid>,
    pub error: Option<String>,
    pub created_at: DateTime<Utc>,
}

/// What follows an attempt that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterFailure {
    RetryAfter(TimeDelta),
    DeadLetter,
}

/// Retries with exponential backoff, as often as a delivery is tried at all.
pub fn after_failure(attempt: i32) -> AfterFailure {
    if attempt < MAX_ATTEMPTS {
        AfterFailure::RetryAfter(TimeDelta::seconds(1i64 << attempt.clamp(0, 9)))
    } else {
        AfterFailure::DeadLetter
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chats_have_distinct_addresses_whatever_their_ids_contain() {
        let sender: IdentityName = "telegram:5".parse().unwrap();
        let chat = |kind, id: &str, thread: Option<&str>| Chat {
            kind,
            id: Some(id.to_owned()),
            thread_id: thread.map(str::to_owned),
            scope: None,
        };
        let refs: Vec<String> = [
            chat(ChatType::Dm, "9", None),
            chat(ChatType::Group, "9", None),
            chat(ChatType::Channel, "9", None),
            chat(ChatType::Thread, "9", Some("a:b")),
            chat(ChatType::Thread, "9:a", Some("b")),
        ]
        .iter()
        .map(|chat| Address::of(chat, &sender).chat_ref)
        .collect();
        assert_eq!(refs[0], "dm:5");
        for (index, one) in refs.iter().enumerate() {
            assert!(!refs[..index].contains(one), "{one}");
        }
    }

    #[test]
    fn the_backoff_grows_and_the_last_attempt_is_followed_by_none() {
        let retry = |seconds| AfterFailure::RetryAfter(TimeDelta::seconds(seconds));
        assert_eq!(after_failure(1), retry(2));
        assert_eq!(after_failure(9), retry(512));
        assert_eq!(after_failure(10), AfterFailure::DeadLetter);
    }
}
