//! The origin of a user's identities, as far as imports depend on it. Identities form groups: one for each
//! user that an import merged into this one, and the base, which is the rest. An import may separate
//! groups from each other, and never the identities within one.

use std::collections::{BTreeSet, HashMap};

use chrono::{DateTime, Utc};

use crate::domain::identity_links::document::ListedIdentity;
use crate::domain::people::identity::IdentityName;
use crate::ids::{IdentityId, UserId};

/// A user that the document affects.
#[derive(Debug, Clone)]
pub struct LinkedUser {
    pub id: UserId,
    pub external_id: Option<String>,
    pub named_by_import: bool,
    /// In the order in which they were linked to the user.
    pub identities: Vec<LinkedIdentity>,
}

#[derive(Debug, Clone)]
pub struct LinkedIdentity {
    pub id: IdentityId,
    pub name: IdentityName,
    /// Whether the previous document listed it.
    pub imported: bool,
    pub linked_at: DateTime<Utc>,
    pub origin: Option<Origin>,
}

/// How imports linked an identity to its user, since its last unlink.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    /// The users it was merged from, one after the other.
    pub path: Vec<UserId>,
    /// Whether an import created the identity itself.
    pub created: bool,
    /// The time of the first import.
    pub at: DateTime<Utc>,
}

/// Identities of one user that were linked to each other before an import merged them with the rest.
#[derive(Debug)]
pub struct Group<'a> {
    pub is_base: bool,
    pub members: Vec<&'a LinkedIdentity>,
    /// Whether the previous document listed any of them.
    pub imported: bool,
    /// The entries that list a member. More than one is a conflict: no import linked the members, so an
    /// import cannot unlink them.
    pub entries: BTreeSet<usize>,
}

impl<'a> Group<'a> {
    /// The entry that lists the group, if any.
    pub fn entry(&self) -> Option<usize> {
        self.entries.first().copied()
    }

    /// The base first, then the others in the order of their links. A group without an identity in the
    /// previous document is no longer controlled by imports: it belongs to the base.
    pub fn all_of(
        user: &'a LinkedUser,
        positions: &HashMap<&IdentityName, (usize, &ListedIdentity)>,
    ) -> Vec<Self> {
        let mut arrived: Vec<Vec<&LinkedIdentity>> = Vec::new();
        let mut base = Vec::new();
        for identity in &user.identities {
            let Some(origin) = &identity.origin else {
                base.push(identity);
                continue;
            };
            let is_same_group = |group: &&mut Vec<&LinkedIdentity>| {
                let first = group.first().and_then(|first| first.origin.as_ref());
                first.is_some_and(|first| {
                    !origin.created && !first.created && first.path == origin.path
                })
            };
            match arrived.iter_mut().find(is_same_group) {
                Some(group) => group.push(identity),
                None => arrived.push(vec![identity]),
            }
        }
        let is_imported =
            |group: &Vec<&LinkedIdentity>| group.iter().any(|identity| identity.imported);
        let (arrived, others): (Vec<_>, Vec<_>) = arrived.into_iter().partition(is_imported);
        base.extend(others.into_iter().flatten());
        let group = |is_base: bool, members: Vec<&'a LinkedIdentity>| Self {
            is_base,
            imported: is_imported(&members),
            entries: members
                .iter()
                .filter_map(|identity| positions.get(&identity.name).map(|(entry, _)| *entry))
                .collect(),
            members,
        };
        let base = Some(base).filter(|base| !base.is_empty());
        let base = base.map(|members| group(true, members));
        let arrived = arrived.into_iter().map(|members| group(false, members));
        base.into_iter().chain(arrived).collect()
    }

    /// The time at which an import linked the group.
    pub fn arrived_at(&self) -> Option<DateTime<Utc>> {
        let origins = self.members.iter().filter_map(|one| one.origin.as_ref());
        origins.map(|origin| origin.at).min()
    }
}
