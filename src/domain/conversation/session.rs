//! Sessions, and the chains they form: what one is, who may do what with it, and how it is shown.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use crate::domain::conversation::reset::ResetReason;
use crate::domain::conversation::session_name::is_built_key;
use crate::domain::people::access::{Access, Namespace, Visibility};
use crate::domain::values::text_enum::text_enum;
use crate::error::{Code, Error, Result};
use crate::ids::{SessionId, SlotId, UserId};

text_enum!(
    /// How a session came out of another.
    Edge { Compression = "compression", Reset = "reset", Branch = "branch" }
);
text_enum!(SessionState { Open = "open", Ended = "ended" });
text_enum!(
    /// Why a session ended. All but the first and the last can be spoken to again.
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

/// The names of a chain: its id, which is that of its first session, and what its maker called it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConversationHandle {
    pub conversation_id: SessionId,
    pub namespace: Namespace,
    pub client_id: Option<String>,
    pub user_id: Option<UserId>,
    /// Whether the viewer has a name of their own that is equal, and finds that one by it.
    pub hidden: bool,
}

impl ConversationHandle {
    /// The conversation's id as `access` can use it: by a name that they find nothing or something else
    /// by, it is not shown.
    pub fn shown(&self, access: &Access) -> String {
        let own = self.namespace == access.namespace;
        let found_next = self.namespace == Namespace::Service && self.user_id == access.person;
        let usable = own || (found_next && !self.hidden);
        match &self.client_id {
            Some(name) if usable => name.clone(),
            Some(_) | None => self.conversation_id.to_string(),
        }
    }

    /// The id of a link of this chain as `access` can use it: only the first has the client's name.
    pub fn shown_link(&self, session_id: SessionId, access: &Access) -> String {
        if session_id == self.conversation_id {
            self.shown(access)
        } else {
            session_id.to_string()
        }
    }
}

/// What decides who may do what with a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ownership {
    pub user_id: Option<UserId>,
    pub session_key: Option<String>,
    /// Whether the viewer has a grant that still holds.
    pub granted: bool,
}

/// What a call wants to do with a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Permission {
    /// A guest may, too.
    Participate,
    Manage,
}

impl Ownership {
    /// Foreign things are not there, whether they exist or not.
    pub fn check(&self, access: &Access, need: Permission) -> Result<()> {
        self.check_reach(access.reach, need)
    }

    pub fn check_reach(&self, reach: Visibility, need: Permission) -> Result<()> {
        let own = match reach {
            Visibility::Tenant => true,
            Visibility::Service => {
                let of_a_chat = self.session_key.as_deref().is_some_and(is_built_key);
                self.user_id.is_none() && !of_a_chat
            }
            Visibility::Person(user_id) => self.user_id == Some(user_id),
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

/// Where a name or an old id leads: the newest link of its chain.
#[derive(Debug, Clone)]
pub struct Tip {
    pub asked_id: SessionId,
    pub asked_depth: i32,
    pub asked_undone: bool,
    pub session_id: SessionId,
    pub depth: i32,
    pub parent_id: Option<SessionId>,
    pub state: SessionState,
    pub end_reason: Option<EndReason>,
    pub next_seq: i64,
    pub born_seq: i64,
    pub token_count: i64,
    pub last_person_at: DateTime<Utc>,
    pub name: ConversationHandle,
    pub owner: Ownership,
    pub agent: String,
    pub slot_id: Option<SlotId>,
}

impl Tip {
    pub fn last_seq(&self) -> i64 {
        self.next_seq - 1
    }

    /// Whether nothing was said since a compression made this link.
    pub fn is_fresh_child(&self) -> bool {
        self.depth > 0 && self.last_seq() == self.born_seq
    }

    /// Links between what was asked for and the tip.
    pub fn hops(&self) -> i32 {
        if self.asked_undone {
            (self.depth - self.asked_depth).abs().max(1)
        } else {
            self.depth - self.asked_depth
        }
    }
}

/// A session, whole.
#[derive(Debug, Clone)]
pub struct Session {
    pub id: SessionId,
    pub name: ConversationHandle,
    pub owner: Ownership,
    pub agent: String,
    /// What it came out of: a link of its own chain, or a session of another.
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

/// Another session that is told of, with the names of its chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionHandle {
    pub id: SessionId,
    pub name: ConversationHandle,
}

impl SessionHandle {
    pub fn shown(&self, access: &Access) -> String {
        self.name.shown_link(self.id, access)
    }
}

/// What the compression that made a link did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct CompressionRecord {
    /// Messages of the parent that the summary stands for.
    pub summarised: i64,
    /// Messages that were taken over as they are.
    pub kept: i64,
    pub tokens_before: i64,
    pub tokens_after: i64,
    /// Who wrote the summary; null where the caller gave it.
    pub model: Option<String>,
    pub duration_ms: i64,
}

/// What a conversation is made with.
#[derive(Debug, Clone)]
pub struct NewConversation {
    pub id: SessionId,
    pub slot_id: Option<SlotId>,
    pub namespace: Namespace,
    pub client_id: Option<String>,
    pub user_id: Option<UserId>,
    pub agent: String,
    pub title: Option<String>,
    /// The session it came out of, and how; never by compression, which makes no conversation.
    pub origin: Option<(SessionId, Edge)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(reach: Visibility, namespace: Namespace) -> Access {
        Access {
            reach,
            namespace,
            person: None,
            speaker: None,
            may_write_any_role: false,
        }
    }

    #[test]
    fn rights_follow_ownership_and_grants() {
        let ada = UserId::generate();
        let bob = UserId::generate();
        let fine = None;
        let guest = Some(Code::GuestNotAllowed);
        let gone = Some(Code::SessionNotFound);
        let person = |user| Visibility::Person(user);
        for (reach, owner, key, granted, read, own) in [
            (Visibility::Tenant, Some(ada), None, false, fine, fine),
            (Visibility::Service, None, Some("mine"), false, fine, fine),
            (Visibility::Service, None, None, false, fine, fine),
            (
                Visibility::Service,
                None,
                Some("agent:main:irc:group:1"),
                false,
                gone,
                gone,
            ),
            (Visibility::Service, Some(ada), None, false, gone, gone),
            (person(ada), Some(ada), None, false, fine, fine),
            (person(bob), Some(ada), None, false, gone, gone),
            (person(bob), Some(ada), None, true, fine, guest),
            (person(bob), None, None, false, gone, gone),
        ] {
            let owner = Ownership {
                user_id: owner,
                session_key: key.map(str::to_owned),
                granted,
            };
            let access = access(reach, Namespace::Service);
            let code = |need| owner.check(&access, need).err().map(|error| error.code);
            assert_eq!(code(Permission::Participate), read, "{reach:?} {owner:?}");
            assert_eq!(code(Permission::Manage), own, "{reach:?} {owner:?}");
        }
    }

    #[test]
    fn a_name_is_shown_to_whoever_finds_the_session_by_it() {
        let ada = UserId::generate();
        let bob = UserId::generate();
        let id = SessionId::generate();
        let child = SessionId::generate();
        let of_key = access(Visibility::Tenant, Namespace::Service);
        let of = |user| Access {
            person: Some(user),
            ..access(Visibility::Person(user), Namespace::User(user))
        };
        let by_name = "chat-1".to_owned();
        let by_id = id.to_string();
        for (namespace, hidden, access, shown) in [
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
            assert_eq!(&name.shown(access), shown);
            assert_eq!(&name.shown_link(id, access), shown);
            assert_eq!(name.shown_link(child, access), child.to_string());
        }
    }
}
