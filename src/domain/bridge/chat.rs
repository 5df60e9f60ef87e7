//! A chat on a platform, as a bridge describes it: the origin or the target of a message.

use serde::{Deserialize, Serialize};

use crate::domain::people::identity::IdentityName;
use crate::domain::people::platform::PlatformScope;
use crate::domain::tenant::agent::ChatType;
use crate::error::{Code, Error, FieldError, Result};

const MAX_ID: usize = 256;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Chat {
    #[serde(rename = "type")]
    pub kind: ChatType,
    /// The platform's id of the chat; required for every type but a DM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 256)]
    pub id: Option<String>,
    /// The platform's id of the thread or topic; required for a thread.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 256)]
    pub thread_id: Option<String>,
    /// The workspace or bot account that the chat belongs to, where the identity has no scope.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 128, pattern = "^[!-~]+$")]
    pub scope: Option<String>,
}

impl Chat {
    pub const DM: Self = Self {
        kind: ChatType::Dm,
        id: None,
        thread_id: None,
        scope: None,
    };

    /// Validates the chat. Each error has a pointer below `pointer`.
    pub fn check(&self, pointer: &str) -> Vec<FieldError> {
        let mut errors = Vec::new();
        let mut refuse = |member: &str, detail: &str| {
            errors.push(FieldError::new(format!("{pointer}/{member}"), detail));
        };
        for (member, value) in [("id", &self.id), ("thread_id", &self.thread_id)] {
            if let Some(value) = value {
                let length = value.chars().count();
                if !(1..=MAX_ID).contains(&length) || value.chars().any(char::is_control) {
                    refuse(
                        member,
                        "must be 1 to 256 characters, none of them control characters",
                    );
                }
            }
        }
        if let Some(scope) = &self.scope {
            let visible = scope.bytes().all(|byte| byte.is_ascii_graphic());
            if !(1..=128).contains(&scope.len()) || !visible {
                refuse("scope", "must be 1 to 128 visible ASCII characters");
            }
        }
        if self.kind != ChatType::Dm && self.id.is_none() {
            refuse("id", "is needed for a group, a channel and a thread");
        }
        if self.kind == ChatType::Thread && self.thread_id.is_none() {
            refuse("thread_id", "is needed for a thread");
        }
        errors
    }

    /// The platform with the chat's scope: its own, or that of the sending identity.
    pub fn platform_of(&self, sender: &IdentityName) -> PlatformScope {
        match &self.scope {
            Some(scope) => sender.platform().with_scope(scope),
            None => sender.platform().clone(),
        }
    }

    /// Refuses chats with other readers. Secrets are exchanged in direct chats only.
    pub fn require_private(&self) -> Result<()> {
        match self.kind {
            ChatType::Dm => Ok(()),
            ChatType::Group | ChatType::Channel | ChatType::Thread => Err(Error::new(
                Code::PrivateChatRequired,
                "only available in a direct chat",
            )),
        }
    }
}
