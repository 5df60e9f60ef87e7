//! The access of a call: the conversations it sees, and the namespace of those it creates. Decided once
//! for each call, from the rights of its credential and the user it names.

use uuid::Uuid;

use crate::domain::people::platform::PlatformScope;
use crate::domain::people::user::Identity;
use crate::domain::tenant::api_key::Scope;
use crate::ids::UserId;

/// The access of a call to conversations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Access {
    pub visibility: Visibility,
    pub namespace: Namespace,
    /// The user it acts for.
    pub user_id: Option<UserId>,
    /// The identity of that user that sends the message, if the call determines one.
    pub sender: Option<Identity>,
    /// Whether it may also write messages of other roles: assistant, system and tool.
    pub may_write_any_role: bool,
}

/// The conversations that a call can see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Visibility {
    /// Everything of the tenant.
    Tenant,
    /// Conversations without a user and outside of platform chats.
    Service,
    User(UserId),
}

/// The namespace of the names that a caller gives to keys and sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Namespace {
    Service,
    User(UserId),
}

impl Namespace {
    /// The column's value; nil is the service's.
    pub const fn as_uuid(&self) -> Uuid {
        match self {
            Self::Service => Uuid::nil(),
            Self::User(id) => id.as_uuid(),
        }
    }

    pub const fn from_uuid(uuid: Uuid) -> Self {
        if uuid.is_nil() {
            Self::Service
        } else {
            Self::User(UserId::from_uuid(uuid))
        }
    }
}

impl Access {
    /// A key with the scope `admin`, which may name a user and the sending identity.
    pub fn of_admin_key(user_id: Option<UserId>, sender: Option<Identity>) -> Self {
        Self {
            visibility: Visibility::Tenant,
            namespace: Namespace::Service,
            user_id,
            sender,
            may_write_any_role: true,
        }
    }

    /// The service itself, which finds the session of a message from `sender`.
    pub fn of_service(user_id: UserId, sender: Identity) -> Self {
        Self {
            visibility: Visibility::Tenant,
            namespace: Namespace::Service,
            user_id: Some(user_id),
            sender: Some(sender),
            may_write_any_role: false,
        }
    }

    /// The same access after its user was merged into another.
    pub fn merged_into(&self, survivor: UserId) -> Self {
        let namespace = match self.namespace {
            Namespace::Service => Namespace::Service,
            Namespace::User(_) => Namespace::User(survivor),
        };
        Self {
            visibility: Visibility::User(survivor),
            namespace,
            user_id: Some(survivor),
            ..self.clone()
        }
    }

    /// A key with the scope `bridge` for the user it names.
    pub fn of_bridge_key(user_id: UserId, sender: Option<Identity>, has_chat_scope: bool) -> Self {
        Self {
            visibility: Visibility::User(user_id),
            namespace: Namespace::Service,
            user_id: Some(user_id),
            sender,
            may_write_any_role: has_chat_scope,
        }
    }

    pub fn of_chat_key() -> Self {
        Self {
            visibility: Visibility::Service,
            namespace: Namespace::Service,
            user_id: None,
            sender: None,
            may_write_any_role: true,
        }
    }

    pub fn of_read_key() -> Self {
        Self {
            visibility: Visibility::Tenant,
            namespace: Namespace::Service,
            user_id: None,
            sender: None,
            may_write_any_role: false,
        }
    }

    /// A user with a token.
    pub fn of_user(user_id: UserId, sender: Identity) -> Self {
        Self {
            visibility: Visibility::User(user_id),
            namespace: Namespace::User(user_id),
            user_id: Some(user_id),
            sender: Some(sender),
            may_write_any_role: false,
        }
    }
}

/// The scope by which a key accesses conversations, out of those that the endpoint accepts. A bridge
/// key with a scope of its own uses that scope while it names no user.
pub fn scope_in_use(scopes: &[Scope], accepted: &[Scope], names_a_user: bool) -> Option<Scope> {
    let has = |scope: Scope| accepted.contains(&scope) && scopes.contains(&scope);
    let bridges = has(Scope::Bridge) && (names_a_user || !(has(Scope::Chat) || has(Scope::Read)));
    if has(Scope::Admin) {
        Some(Scope::Admin)
    } else if bridges {
        Some(Scope::Bridge)
    } else {
        [Scope::Read, Scope::Chat]
            .into_iter()
            .find(|scope| has(*scope))
    }
}

/// The sending identity of a user behind a bridge with these platforms. `None`: the bridge covers no
/// identity of the user. `Some(None)`: it covers several, and the call names none of them.
pub fn sender_through(
    platforms: &[PlatformScope],
    identities: &[Identity],
) -> Option<Option<Identity>> {
    let mut covered = identities
        .iter()
        .filter(|identity| identity.name.is_covered_by(platforms));
    let first = covered.next()?;
    let only = covered.next().is_none();
    Some(only.then(|| first.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::IdentityId;
    use Scope::{Admin, Bridge, Chat, Read};

    const CONVERSATION_SCOPES: &[Scope] = &[Admin, Bridge, Chat];
    const READ_SCOPES: &[Scope] = &Scope::ALL;

    #[test]
    fn a_namespace_survives_its_column() {
        let user = UserId::generate();
        for (namespace, uuid) in [
            (Namespace::Service, Uuid::nil()),
            (Namespace::User(user), user.as_uuid()),
        ] {
            assert_eq!(namespace.as_uuid(), uuid);
            assert_eq!(Namespace::from_uuid(uuid), namespace);
        }
    }

    #[test]
    fn a_key_uses_the_scope_that_fits_the_call() {
        /// The key's scopes, the endpoint's scopes; the scope in use without a named user, and with one.
        type Row = (
            &'static [Scope],
            &'static [Scope],
            Option<Scope>,
            Option<Scope>,
        );
        let rows: [Row; 13] = [
            (&[Admin], CONVERSATION_SCOPES, Some(Admin), Some(Admin)),
            (&Scope::ALL, READ_SCOPES, Some(Admin), Some(Admin)),
            (&[Bridge], CONVERSATION_SCOPES, Some(Bridge), Some(Bridge)),
            (&[Bridge], READ_SCOPES, Some(Bridge), Some(Bridge)),
            (
                &[Bridge, Chat],
                CONVERSATION_SCOPES,
                Some(Chat),
                Some(Bridge),
            ),
            (&[Bridge, Chat], READ_SCOPES, Some(Chat), Some(Bridge)),
            // The scope `read` gives no way to write without naming the user.
            (
                &[Bridge, Read],
                CONVERSATION_SCOPES,
                Some(Bridge),
                Some(Bridge),
            ),
            (&[Bridge, Read], READ_SCOPES, Some(Read), Some(Bridge)),
            (&[Chat], CONVERSATION_SCOPES, Some(Chat), Some(Chat)),
            (&[Chat, Read], READ_SCOPES, Some(Read), Some(Read)),
            (&[Read], READ_SCOPES, Some(Read), Some(Read)),
            (&[Read], CONVERSATION_SCOPES, None, None),
            (&[], READ_SCOPES, None, None),
        ];
        for (scopes, accepted, alone, naming) in rows {
            assert_eq!(scope_in_use(scopes, accepted, false), alone, "{scopes:?}");
            assert_eq!(scope_in_use(scopes, accepted, true), naming, "{scopes:?}");
        }
    }

    #[test]
    fn a_bridge_acts_for_a_user_through_the_one_identity_it_covers() {
        let identity = |text: &str| Identity {
            id: IdentityId::generate(),
            name: text.parse().unwrap(),
        };
        let identities = ["telegram:1", "slack@T1:2", "slack@T2:3"].map(identity);
        let through = |platform: &str| sender_through(&[platform.parse().unwrap()], &identities);
        assert_eq!(through("telegram"), Some(Some(identities[0].clone())));
        assert_eq!(through("slack@T2"), Some(Some(identities[2].clone())));
        assert_eq!(through("slack"), Some(None), "two identities are ambiguous");
        assert_eq!(through("discord"), None);
        assert_eq!(sender_through(&[], &identities), None);
    }

    #[test]
    fn no_key_but_admin_and_read_sees_the_whole_tenant() {
        let id = UserId::generate();
        let sender = Identity {
            id: IdentityId::generate(),
            name: "web:ada".parse().unwrap(),
        };
        for (access, visibility, namespace, may_write_any_role) in [
            (
                Access::of_admin_key(Some(id), None),
                Visibility::Tenant,
                Namespace::Service,
                true,
            ),
            (
                Access::of_read_key(),
                Visibility::Tenant,
                Namespace::Service,
                false,
            ),
            (
                Access::of_chat_key(),
                Visibility::Service,
                Namespace::Service,
                true,
            ),
            (
                Access::of_bridge_key(id, None, false),
                Visibility::User(id),
                Namespace::Service,
                false,
            ),
            (
                Access::of_bridge_key(id, None, true),
                Visibility::User(id),
                Namespace::Service,
                true,
            ),
            (
                Access::of_user(id, sender),
                Visibility::User(id),
                Namespace::User(id),
                false,
            ),
        ] {
            assert_eq!(access.visibility, visibility);
            assert_eq!(access.namespace, namespace);
            assert_eq!(access.may_write_any_role, may_write_any_role);
        }
    }
}
