//! What is to be said on a platform: where, by which rules it is given out, and when it is given up.

use chrono::{DateTime, TimeDelta, Utc};
use serde::{Deserialize, Serialize};

use crate::domain::bridge::chat::Chat;
use crate::domain::conversation::session_key::encode;
use crate::domain::people::identity::IdentityName;
use crate::domain::tenant::agent::ChatType;
use crate::domain::values::text_enum::text_enum;
use crate::ids::{DeliveryId, IdentityId, SessionId, TurnId};

/// How long a bridge has for one delivery.
pub const VISIBILITY: TimeDelta = TimeDelta::seconds(60);
/// Then it is dead.
pub const MAX_ATTEMPTS: i32 = 10;

text_enum!(
    DeliveryKind { Reply = "reply", Handoff = "handoff", Notice = "notice", Security = "security" }
);

/// A chat on a platform, as deliveries name it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    pub platform: String,
    /// Empty where the platform has none.
    pub scope: String,
    pub chat_ref: String,
    pub chat: Chat,
}

impl Address {
    /// Of a chat in which `speaker` speaks. Their own chat is theirs, whatever id the platform gives it.
    pub fn of(chat: &Chat, speaker: &IdentityName) -> Self {
        let platform = chat.platform_of(speaker);
        let id = encode(chat.id.as_deref().unwrap_or_default());
        let chat_ref = match chat.kind {
            ChatType::Dm => format!("dm:{}", speaker.external_id()),
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

/// Where the answer of a turn goes when it becomes a delivery.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplyTo {
    pub address: Address,
    pub identity_id: IdentityId,
    /// The platform's id of the message.
    pub message_id: Option<String>,
}

text_enum!(
    /// How the answer of a turn gets to who asked. `Failed`: it could not become a delivery.
    ReplyVia { Waiting = "waiting", Returned = "returned", Delivery = "delivery", Failed = "failed" }
);

/// A delivery that is to be written.
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

/// A delivery as it stands.
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

/// How long after the attempt that failed the next is made.
pub fn backoff(attempt: i32) -> TimeDelta {
    TimeDelta::seconds(1i64 << attempt.clamp(0, 9))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chats_are_told_apart_whatever_their_ids_hold() {
        let speaker: IdentityName = "telegram:5".parse().unwrap();
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
        .map(|chat| Address::of(chat, &speaker).chat_ref)
        .collect();
        assert_eq!(refs[0], "dm:5");
        for (place, one) in refs.iter().enumerate() {
            assert!(!refs[..place].contains(one), "{one}");
        }
    }

    #[test]
    fn waiting_grows_and_has_an_end() {
        assert_eq!(backoff(1), TimeDelta::seconds(2));
        assert_eq!(backoff(100), TimeDelta::seconds(512));
    }
}
