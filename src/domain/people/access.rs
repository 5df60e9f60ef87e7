//! Whose conversations a call sees, and in whose name it makes them. Decided once for each call, from
//! what its credential may and from the person it names.

use uuid::Uuid;

use crate::domain::people::platform::PlatformScope;
use crate::domain::people::user::Identity;
use crate::domain::tenant::api_key::Scope;
use crate::ids::UserId;

/// With whose eyes a call looks at conversations, and in whose name it makes them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Access {
    pub reach: Visibility,
    pub namespace: Namespace,
    /// The person it acts for.
    pub person: Option<UserId>,
    /// The account that person speaks from, where it is known.
    pub speaker: Option<Identity>,
    /// Whether it may also write what it did not say itself: an assistant's or a system's message.
    pub may_write_any_role: bool,
}

/// What can be seen at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Visibility {
    /// Everything of the tenant.
    Tenant,
    /// What belongs to no person and to no platform's chat.
    Service,
    Person(UserId),
}

/// Where the names live that a caller gives to keys and sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Namespace {
    Service,
    User(UserId),
}

impl Namespace {
    /// As columns hold it: nil is the service's.
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
    /// A key with the scope `admin`, which may name a person, and the account they speak from.
    pub fn of_admin_key(person: Option<UserId>, speaker: Option<Identity>) -> Self {
        Self {
            reach: Visibility::Tenant,
            namespace: Namespace::Service,
            person,
            speaker,
            may_write_any_role: true,
        }
    }

    /// The service itself, which finds the place of what `speaker` says.
    pub fn of_service(person: UserId, speaker: Identity) -> Self {
        Self {
            reach: Visibility::Tenant,
            namespace: Namespace::Service,
            person: Some(person),
            speaker: Some(speaker),
            may_write_any_role: false,
        }
    }

    /// The same viewer after its person was merged into another.
    pub fn merged_into(&self, survivor: UserId) -> Self {
        let namespace = match self.namespace {
            Namespace::Service => Namespace::Service,
            Namespace::User(_) => Namespace::User(survivor),
        };
        Self {
            reach: Visibility::Person(survivor),
            namespace,
            person: Some(survivor),
            ..self.clone()
        }
    }

    /// A key with the scope `bridge` for the person it named.
    pub fn of_bridge_key(person: UserId, speaker: Option<Identity>, chats_too: bool) -> Self {
        Self {
            reach: Visibility::Person(person),
            namespace: Namespace::Service,
            person: Some(person),
            speaker,
            may_write_any_role: chats_too,
        }
    }

    pub fn of_chat_key() -> Self {
        Self {
            reach: Visibility::Service,
            namespace: Namespace::Service,
            person: None,
            speaker: None,
            may_write_any_role: true,
        }
    }

    pub fn of_read_key() -> Self {
        Self {
            reach: Visibility::Tenant,
            namespace: Namespace::Service,
            person: None,
            speaker: None,
            may_write_any_role: false,
        }
    }

    /// A person with a token.
    pub fn of_user(user_id: UserId, speaker: Identity) -> Self {
        Self {
            reach: Visibility::Person(user_id),
            namespace: Namespace::User(user_id),
            person: Some(user_id),
            speaker: Some(speaker),
            may_write_any_role: false,
        }
    }
}

/// By which of its scopes a key touches conversations, of those that the endpoint takes. A bridge
/// that also has a right of its own uses that one while it names nobody.
pub fn scope_in_use(scopes: &[Scope], taken: &[Scope], names_a_person: bool) -> Option<Scope> {
    let has = |scope: Scope| taken.contains(&scope) && scopes.contains(&scope);
    let bridges = has(Scope::Bridge) && (names_a_person || !(has(Scope::Chat) || has(Scope::Read)));
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

/// The account a person speaks from through a bridge with these platforms. `None`: the bridge has
/// nothing to do with the person. `Some(None)`: there are several, and it does not say which.
pub fn speaker_through(
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

    const CONVERSES: &[Scope] = &[Admin, Bridge, Chat];
    const READS: &[Scope] = &Scope::ALL;

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
        /// Its scopes, those that the endpoint takes; used while it names nobody, and while it names someone.
        type Row = (
            &'static [Scope],
            &'static [Scope],
            Option<Scope>,
            Option<Scope>,
        );
        let rows: [Row; 13] = [
            (&[Admin], CONVERSES, Some(Admin), Some(Admin)),
            (&Scope::ALL, READS, Some(Admin), Some(Admin)),
            (&[Bridge], CONVERSES, Some(Bridge), Some(Bridge)),
            (&[Bridge], READS, Some(Bridge), Some(Bridge)),
            (&[Bridge, Chat], CONVERSES, Some(Chat), Some(Bridge)),
            (&[Bridge, Chat], READS, Some(Chat), Some(Bridge)),
            // What it may only read is no way to write without naming the person.
            (&[Bridge, Read], CONVERSES, Some(Bridge), Some(Bridge)),
            (&[Bridge, Read], READS, Some(Read), Some(Bridge)),
            (&[Chat], CONVERSES, Some(Chat), Some(Chat)),
            (&[Chat, Read], READS, Some(Read), Some(Read)),
            (&[Read], READS, Some(Read), Some(Read)),
            (&[Read], CONVERSES, None, None),
            (&[], READS, None, None),
        ];
        for (scopes, taken, alone, naming) in rows {
            assert_eq!(scope_in_use(scopes, taken, false), alone, "{scopes:?}");
            assert_eq!(scope_in_use(scopes, taken, true), naming, "{scopes:?}");
        }
    }

    #[test]
    fn a_bridge_speaks_for_a_person_through_the_one_account_it_covers() {
        let identity = |text: &str| Identity {
            id: IdentityId::generate(),
            name: text.parse().unwrap(),
        };
        let accounts = ["telegram:1", "slack@T1:2", "slack@T2:3"].map(identity);
        let through = |platform: &str| speaker_through(&[platform.parse().unwrap()], &accounts);
        assert_eq!(through("telegram"), Some(Some(accounts[0].clone())));
        assert_eq!(through("slack@T2"), Some(Some(accounts[2].clone())));
        assert_eq!(through("slack"), Some(None), "two, and no way to tell");
        assert_eq!(through("discord"), None);
        assert_eq!(speaker_through(&[], &accounts), None);
    }

    #[test]
    fn no_key_but_admin_and_read_sees_the_whole_tenant() {
        let id = UserId::generate();
        let speaker = Identity {
            id: IdentityId::generate(),
            name: "web:ada".parse().unwrap(),
        };
        for (access, reach, namespace, may_write_any_role) in [
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
                Visibility::Person(id),
                Namespace::Service,
                false,
            ),
            (
                Access::of_bridge_key(id, None, true),
                Visibility::Person(id),
                Namespace::Service,
                true,
            ),
            (
                Access::of_user(id, speaker),
                Visibility::Person(id),
                Namespace::User(id),
                false,
            ),
        ] {
            assert_eq!(access.reach, reach);
            assert_eq!(access.namespace, namespace);
            assert_eq!(access.may_write_any_role, may_write_any_role);
        }
    }
}
