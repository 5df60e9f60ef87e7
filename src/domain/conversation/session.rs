//! Sessions and the chains they form: their properties, the rights to them, and their public ids.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use crate::domain::conversation::reset::ResetReason;
use crate::domain::conversation::session_name::is_built_key;
use crate::domain::people::access::{Access, Namespace, Visibility};
use crate::domain::values::text_enum::text_enum;
use crate::error::{Code, Error, Result};
use crate::ids::{SessionId, SlotId, UserId};

text_enum!(
    /// The origin of a session in another one.
    Edge { Compression = "compression", Reset = "reset", Branch = "branch" }
);
text_enum!(SessionState { Open = "open", Ended = "ended" });
text_enum!(
    /// Why a session ended. All but the first and the last can be resumed.
    EndReason {
        Compression = "compression",
        Reset = "reset",
        Idle = "idle",
        Daily = "daily",
        Switch = "switch",
        Uncompressed = "uncompressed",
    }
);

impl From<ResetReason> for EndReason {
    fn from(reason: ResetReason) -> Self {
        match reason {
            ResetReason::Idle => Self::Idle,
            ResetReason::Daily => Self::Daily,
        }
    }
}

/// The names of a chain: its id, which is the id of its first session, and the client's name for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConversationHandle {
    pub conversation_id: SessionId,
    pub namespace: Namespace,
    pub client_id: Option<String>,
    pub user_id: Option<UserId>,
    /// Whether the caller has a conversation of the same name in its own namespace, which the name then
    /// resolves to.
    pub hidden: bool,
}

impl ConversationHandle {
    /// The conversation's public id for `access`. The client's name is used only if it resolves to this
    /// conversation for that caller.
    pub fn public_id(&self, access: &Access) -> String {
        let is_own = self.namespace == access.namespace;
        let is_users_service_name =
            self.namespace == Namespace::Service && self.user_id == access.user_id;
        let resolves = is_own || (is_users_service_name && !self.hidden);
        match &self.client_id {
            Some(name) if resolves => name.clone(),
            Some(_) | None => self.conversation_id.to_string(),
        }
    }

    /// The public id of a session of this chain for `access`. Only the first has the client's name.
    pub fn public_session_id(&self, session_id: SessionId, access: &Access) -> String {
        if session_id == self.conversation_id {
            self.public_id(access)
        } else {
            session_id.to_string()
        }
    }
}

/// The properties of a conversation that decide the rights to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ownership {
    pub user_id: Option<UserId>,
    pub session_key: Option<String>,
    /// Whether the caller has a valid grant.
    pub granted: bool,
}

/// The permission that a call needs for a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Permission {
    /// Read and write messages. A guest has it, too.
    Participate,
    Manage,
}

impl Ownership {
    /// A conversation of others is reported as not found, whether it exists or not.
    pub fn check(&self, access: &Access, need: Permission) -> Result<()> {
        self.check_visibility(access.visibility, need)
    }

    pub fn check_visibility(&self, visibility: Visibility, need: Permission) -> Result<()> {
        let own = match visibility {
            Visibility::Tenant => true,
            Visibility::Service => {
                let is_of_a_chat = self.session_key.as_deref().is_some_and(is_built_key);
                self.user_id.is_none() && !is_of_a_chat
            }
            Visibility::User(user_id) => self.user_id == Some(user_id),
        };
        match (own, self.granted, need) {
            (true, _, _) | (false, true, Permission::Participate) => Ok(()),
            (false, true, Permission::Manage) => Err(Error::new(
                Code::GuestNotAllowed,
                "a guest may only read and write messages here",
            )),
            (false, false, _) => Err(super::session_name::session_not_found()),
        }
    }
}

/// The newest session of a chain, to which a name or an old id resolves.
#[derive(Debug, Clone)]
pub struct Tip {
    pub requested_id: SessionId,
    pub requested_depth: i32,
    pub requested_undone: bool,
    pub session_id: SessionId,
    pub depth: i32,
    pub parent_id: Option<SessionId>,
    pub state: SessionState,
    pub end_reason: Option<EndReason>,
    pub next_seq: i64,
    pub born_seq: i64,
    pub token_count: i64,
    pub last_user_at: DateTime<Utc>,
    pub name: ConversationHandle,
    pub owner: Ownership,
    pub agent: String,
    pub slot_id: Option<SlotId>,
}

impl Tip {
    pub fn last_seq(&self) -> i64 {
        self.next_seq - 1
    }

    /// Whether the session has no message since the compression that created it.
    pub fn is_fresh_child(&self) -> bool {
        self.depth > 0 && self.last_seq() == self.born_seq
    }

    /// The number of links between the requested session and the tip.
    pub fn hops(&self) -> i32 {
        if self.requested_undone {
            (self.depth - self.requested_depth).abs().max(1)
        } else {
            self.depth - self.requested_depth
        }
    }
}

/// A session with all its members.
#[derive(Debug, Clone)]
pub struct Session {
    pub id: SessionId,
    pub name: ConversationHandle,
    pub owner: Ownership,
    pub agent: String,
    /// Its origin: a session of its own chain, or of another.
    pub parent: Option<SessionHandle>,
    pub edge: Option<Edge>,
    pub state: SessionState,
    pub end_reason: Option<EndReason>,
    pub title: Option<String>,
    pub depth: i32,
    pub current: bool,
    pub last_seq: i64,
    pub message_count: i64,
    pub token_count: i64,
    pub created_at: DateTime<Utc>,
    pub last_active_at: DateTime<Utc>,
    pub ended_at: Option<DateTime<Utc>>,
    pub archived: bool,
    pub pinned: bool,
    pub compression: Option<CompressionRecord>,
}

/// A reference to another session, with the names of its chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionHandle {
    pub id: SessionId,
    pub name: ConversationHandle,
}

impl SessionHandle {
    pub fn public_id(&self, access: &Access) -> String {
        self.name.public_session_id(self.id, access)
    }
}

/// The result of the compression that created a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct CompressionRecord {
    /// Messages of the parent that the summary replaces.
    pub summarised: i64,
    /// Messages that were copied unchanged.
    pub kept: i64,
    pub tokens_before: i64,
    pub tokens_after: i64,
    /// The model that wrote the summary; null if the caller sent it.
    pub model: Option<String>,
    pub duration_ms: i64,
}

/// A conversation to insert.
#[derive(Debug, Clone)]
pub struct NewConversation {
    pub id: SessionId,
    pub slot_id: Option<SlotId>,
    pub namespace: Namespace,
    pub client_id: Option<String>,
    pub user_id: Option<UserId>,
    pub agent: String,
    pub title: Option<String>,
    /// The session it originates from, and how. Never a compression, which creates no conversation.
    pub origin: Option<(SessionId, Edge)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(visibility: Visibility, namespace: Namespace) -> Access {
        Access {
            visibility,
            namespace,
            user_id: None,
            sender: None,
            may_write_any_role: false,
        }
    }

    #[test]
    fn rights_follow_ownership_and_grants() {
        let ada = UserId::generate();
        let bob = UserId::generate();
        let allowed = None;
        let guest = Some(Code::GuestNotAllowed);
        let not_found = Some(Code::SessionNotFound);
        let of_user = |user| Visibility::User(user);
        for (visibility, owner, key, granted, read, own) in [
            (Visibility::Tenant, Some(ada), None, false, allowed, allowed),
            (
                Visibility::Service,
                None,
                Some("mine"),
                false,
                allowed,
                allowed,
            ),
            (Visibility::Service, None, None, false, allowed, allowed),
            (
                Visibility::Service,
                None,
                Some("agent:main:irc:group:1"),
                false,
                not_found,
                not_found,
            ),
            (
                Visibility::Service,
                Some(ada),
                None,
                false,
                not_found,
                not_found,
            ),
            (of_user(ada), Some(ada), None, false, allowed, allowed),
            (of_user(bob), Some(ada), None, false, not_found, not_found),
            (of_user(bob), Some(ada), None, true, allowed, guest),
            (of_user(bob), None, None, false, not_found, not_found),
        ] {
            let owner = Ownership {
                user_id: owner,
                session_key: key.map(str::to_owned),
                granted,
            };
            let access = access(visibility, Namespace::Service);
            let code = |need| owner.check(&access, need).err().map(|error| error.code);
            assert_eq!(
                code(Permission::Participate),
                read,
                "{visibility:?} {owner:?}"
            );
            assert_eq!(code(Permission::Manage), own, "{visibility:?} {owner:?}");
        }
    }

    #[test]
    fn a_name_is_public_where_it_resolves_to_the_session() {
        let ada = UserId::generate();
        let bob = UserId::generate();
        let id = SessionId::generate();
        let child = SessionId::generate();
        let of_key = access(Visibility::Tenant, Namespace::Service);
        let of = |user| Access {
            user_id: Some(user),
            ..access(Visibility::User(user), Namespace::User(user))
        };
        let by_name = "chat-1".to_owned();
        let by_id = id.to_string();
        for (namespace, hidden, access, expected) in [
            (Namespace::Service, false, &of_key, &by_name),
            (Namespace::Service, false, &of(ada), &by_name),
            (Namespace::Service, true, &of(ada), &by_id),
            (Namespace::Service, false, &of(bob), &by_id),
            (Namespace::User(ada), false, &of(ada), &by_name),
            (Namespace::User(ada), false, &of_key, &by_id),
        ] {
            let name = ConversationHandle {
                conversation_id: id,
                namespace,
                client_id: Some(by_name.clone()),
                user_id: Some(ada),
                hidden,
            };
            assert_eq!(&name.public_id(access), expected);
            assert_eq!(&name.public_session_id(id, access), expected);
            assert_eq!(name.public_session_id(child, access), child.to_string());
        }
    }
}
