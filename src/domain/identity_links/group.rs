//! How the accounts of a person came together, as far as an import must know. They fall into groups: one
//! for each time an import joined someone to the person, and the rest, which is the base. An import may
//! part groups from each other, and never the accounts within one.

use std::collections::{BTreeSet, HashMap};

use chrono::{DateTime, Utc};

use crate::domain::identity_links::document::ListedIdentity;
use crate::domain::people::identity::IdentityName;
use crate::ids::{IdentityId, UserId};

/// A person whom the document concerns.
#[derive(Debug, Clone)]
pub struct LinkedUser {
    pub id: UserId,
    pub external_id: Option<String>,
    pub named_by_import: bool,
    /// In the order they came to the person.
    pub accounts: Vec<LinkedIdentity>,
}

#[derive(Debug, Clone)]
pub struct LinkedIdentity {
    pub id: IdentityId,
    pub name: IdentityName,
    /// Whether the document before listed it.
    pub imported: bool,
    pub linked_at: DateTime<Utc>,
    pub origin: Option<Origin>,
}

/// How imports brought an account to its person, since it was last parted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    /// The people it was joined from, one after the other.
    pub path: Vec<UserId>,
    /// Whether an import made the account itself.
    pub made: bool,
    /// When the first of them did.
    pub at: DateTime<Utc>,
}

/// Accounts of one person that were together before an import joined them to the others.
#[derive(Debug)]
pub struct Group<'a> {
    pub is_base: bool,
    pub members: Vec<&'a LinkedIdentity>,
    /// Whether the document before listed any of it.
    pub imported: bool,
    /// The entries that list a member; more than one contradict what is not an import's to undo.
    pub wanted: BTreeSet<usize>,
}

impl<'a> Group<'a> {
    /// The one entry that lists it, if any does.
    pub fn entry(&self) -> Option<usize> {
        self.wanted.first().copied()
    }

    /// The base first, then the others as they came. A group of which the document before listed nothing is
    /// no longer an import's: it belongs to the base.
    pub fn all_of(
        person: &'a LinkedUser,
        places: &HashMap<&IdentityName, (usize, &ListedIdentity)>,
    ) -> Vec<Self> {
        let mut arrived: Vec<Vec<&LinkedIdentity>> = Vec::new();
        let mut base = Vec::new();
        for account in &person.accounts {
            let Some(origin) = &account.origin else {
                base.push(account);
                continue;
            };
            let with = |group: &&mut Vec<&LinkedIdentity>| {
                let first = group.first().and_then(|first| first.origin.as_ref());
                first.is_some_and(|first| !origin.made && !first.made && first.path == origin.path)
            };
            match arrived.iter_mut().find(with) {
                Some(group) => group.push(account),
                None => arrived.push(vec![account]),
            }
        }
        let is_imported =
            |group: &Vec<&LinkedIdentity>| group.iter().any(|account| account.imported);
        let (arrived, others): (Vec<_>, Vec<_>) = arrived.into_iter().partition(is_imported);
        base.extend(others.into_iter().flatten());
        let group = |is_base: bool, members: Vec<&'a LinkedIdentity>| Self {
            is_base,
            imported: is_imported(&members),
            wanted: members
                .iter()
                .filter_map(|account| places.get(&account.name).map(|(entry, _)| *entry))
                .collect(),
            members,
        };
        let base = Some(base).filter(|base| !base.is_empty());
        let base = base.map(|members| group(true, members));
        let arrived = arrived.into_iter().map(|members| group(false, members));
        base.into_iter().chain(arrived).collect()
    }

    /// When an import brought it.
    pub fn arrived_at(&self) -> Option<DateTime<Utc>> {
        let origins = self.members.iter().filter_map(|one| one.origin.as_ref());
        origins.map(|origin| origin.at).min()
    }
}
