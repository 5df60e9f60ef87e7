//! The changes that a document of links makes. A pure function of the document and of the users it
//! affects. It undoes links of imports only: identities that a code, an admin or a first contact linked
//! stay linked.

use std::collections::{BTreeSet, HashMap, HashSet};

use serde::Serialize;

use crate::domain::identity_links::document::{LINKS, LinkEntry, ListedIdentity, pointer_of};
use crate::domain::identity_links::group::{Group, LinkedIdentity, LinkedUser};
use crate::domain::people::identity::IdentityName;
use crate::domain::people::user::MAX_IDENTITIES;
use crate::error::{Error, FieldError, Result};
use crate::ids::{IdentityId, UserId};

/// The user of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Target {
    Existing(UserId),
    /// A new user, for the entry with this index.
    New(usize),
}

/// Identities that are unlinked from their user together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupUnlink {
    pub from: UserId,
    pub identities: Vec<IdentityId>,
    /// The user they are linked to; `None` gives them a user of their own.
    pub into: Option<Target>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Addition {
    pub into: Target,
    pub name: IdentityName,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum LinkAction {
    /// A user is created for a name.
    CreateUser,
    /// A user gets the name as `external_id`.
    NameUser,
    /// A user loses the name, which an import gave and the document no longer lists.
    UnnameUser,
    /// An identity is linked to the user: a new one, or one that an import linked to `from_user_id`.
    Add,
    /// An identity is linked to the user because `from_user_id` is merged into the user.
    Merge,
    /// An identity that an import linked is unlinked from the user.
    Remove,
}

/// A change, as the report lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    pub action: LinkAction,
    pub name: Option<String>,
    pub user: Target,
    pub identity: Option<IdentityName>,
    pub from: Option<UserId>,
}

/// All changes, in the order in which they are applied.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    pub unnamed: Vec<UserId>,
    pub leaving: Vec<GroupUnlink>,
    /// Entries for which a user is created.
    pub created: Vec<usize>,
    /// Users that get the name of an entry.
    pub named: Vec<(UserId, usize)>,
    /// Users that are merged into another: from, into.
    pub merges: Vec<(UserId, UserId)>,
    pub additions: Vec<Addition>,
    /// Users that get an addition and then have several identities.
    pub linked: Vec<Target>,
    /// Existing identities that this document lists and the previous one did not.
    pub listed: Vec<IdentityId>,
    /// Identities that this document no longer lists.
    pub unlisted: Vec<IdentityId>,
    pub changes: Vec<Change>,
    pub warnings: Vec<FieldError>,
    touched: BTreeSet<UserId>,
}

impl Plan {
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty() && self.listed.is_empty() && self.unlisted.is_empty()
    }

    /// The ids of all users that change.
    pub fn touched(&self) -> Vec<UserId> {
        self.touched.iter().copied().collect()
    }
}

/// The changes that `entries` make, or every conflict.
pub fn plan(entries: &[LinkEntry], users: &[LinkedUser]) -> Result<Plan> {
    let mut planner = Planner::new(entries, users);
    planner.choose_targets();
    planner.assign_names();
    for (index, user) in users.iter().enumerate() {
        planner.plan_user(index, user);
    }
    planner.add();
    planner.check_sizes();
    Error::check(planner.errors)?;
    Ok(planner.plan)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GroupPlan {
    Stays,
    Leaves(Option<usize>),
}

struct Planner<'a> {
    entries: &'a [LinkEntry],
    users: &'a [LinkedUser],
    groups: Vec<Vec<Group<'a>>>,
    names: HashSet<&'a str>,
    /// The user that an identity belongs to, by the identity's name.
    owners: HashMap<&'a IdentityName, usize>,
    /// The entry that lists an identity, and the index there.
    positions: HashMap<&'a IdentityName, (usize, &'a ListedIdentity)>,
    /// For each entry its user; `claims` has for each user the entry.
    targets: Vec<Option<usize>>,
    claims: Vec<Option<usize>>,
    sizes: Vec<usize>,
    errors: Vec<FieldError>,
    plan: Plan,
}

impl<'a> Planner<'a> {
    fn new(entries: &'a [LinkEntry], users: &'a [LinkedUser]) -> Self {
        let listed = entries.iter().enumerate().flat_map(|(index, entry)| {
            let identities = entry.identities.iter();
            identities.map(move |listed| (&listed.name, (index, listed)))
        });
        let positions: HashMap<_, _> = listed.collect();
        let owned = users.iter().enumerate().flat_map(|(index, user)| {
            let identities = user.identities.iter();
            identities.map(move |identity| (&identity.name, index))
        });
        Self {
            entries,
            users,
            groups: users
                .iter()
                .map(|one| Group::all_of(one, &positions))
                .collect(),
            names: entries.iter().map(|entry| entry.name.as_str()).collect(),
            owners: owned.collect(),
            positions,
            targets: vec![None; entries.len()],
            claims: vec![None; users.len()],
            sizes: vec![0; entries.len()],
            errors: Vec::new(),
            plan: Plan::default(),
        }
    }

    /// Whether a user has no name, or one that only the previous document gave.
    fn is_free(&self, user: &LinkedUser) -> bool {
        match &user.external_id {
            Some(name) => user.named_by_import && !self.names.contains(name.as_str()),
            None => true,
        }
    }

    /// The entry that a user who is no target would be merged into: the entry of the user's first group.
    fn merge_entry(&self, index: usize) -> Option<usize> {
        self.groups[index].first().and_then(Group::entry)
    }

    /// The user with the name; else the first free user with a listed identity; else a new one.
    fn choose_targets(&mut self) {
        let named = self
            .users
            .iter()
            .enumerate()
            .filter_map(|(index, user)| Some((user.external_id.as_deref()?, index)));
        let named: HashMap<&str, usize> = named.collect();
        for (index, entry) in self.entries.iter().enumerate() {
            if let Some(user) = named.get(entry.name.as_str()) {
                self.targets[index] = Some(*user);
                self.claims[*user] = Some(index);
            }
        }
        for (index, entry) in self.entries.iter().enumerate() {
            if self.targets[index].is_some() {
                continue;
            }
            let owners = entry.identities.iter();
            let owners = owners.filter_map(|listed| self.owners.get(&listed.name).copied());
            let found = owners.into_iter().find(|owner| {
                self.claims[*owner].is_none()
                    && self.is_free(&self.users[*owner])
                    && self.merge_entry(*owner) == Some(index)
            });
            if let Some(user) = found {
                self.targets[index] = Some(user);
                self.claims[user] = Some(index);
            }
        }
    }

    fn target(&self, entry: usize) -> Target {
        match self.targets[entry] {
            Some(user) => Target::Existing(self.users[user].id),
            None => Target::New(entry),
        }
    }

    fn touch(&mut self, target: Target) {
        if let Target::Existing(id) = target {
            self.plan.touched.insert(id);
        }
    }

    fn record(&mut self, change: Change) {
        self.touch(change.user);
        self.plan.touched.extend(change.from);
        self.plan.changes.push(change);
    }

    /// Removes names before it assigns them: a name may move to another user.
    fn assign_names(&mut self) {
        for user in self.users {
            if user.named_by_import && user.external_id.is_some() && self.is_free(user) {
                self.plan.unnamed.push(user.id);
                self.record(Change {
                    action: LinkAction::UnnameUser,
                    name: user.external_id.clone(),
                    user: Target::Existing(user.id),
                    identity: None,
                    from: None,
                });
            }
        }
        for (index, entry) in self.entries.iter().enumerate() {
            let user = self.targets[index].map(|user| &self.users[user]);
            let action = match user {
                Some(user) if user.external_id.as_ref() == Some(&entry.name) => continue,
                Some(user) => {
                    self.plan.named.push((user.id, index));
                    LinkAction::NameUser
                }
                None => {
                    self.plan.created.push(index);
                    LinkAction::CreateUser
                }
            };
            self.record(Change {
                action,
                name: Some(entry.name.clone()),
                user: self.target(index),
                identity: None,
                from: None,
            });
        }
    }

    /// Decides which groups of a user stay, and whether the user is merged into another.
    fn plan_user(&mut self, index: usize, user: &'a LinkedUser) {
        let groups = std::mem::take(&mut self.groups[index]);
        let free = self.is_free(user);
        let claim = self.claims[index];
        let merge_entry = groups.first().and_then(Group::entry).filter(|_| free);
        let home = claim.or(merge_entry);
        let mut group_plans: Vec<GroupPlan> = groups
            .iter()
            .map(|group| self.group_plan(user, group, home))
            .collect();
        let gets_identities = home.is_some_and(|entry| !self.entries[entry].identities.is_empty());
        if !gets_identities && !group_plans.contains(&GroupPlan::Stays) {
            // A user keeps an identity if no other user needs it.
            let kept = group_plans
                .iter()
                .position(|group_plan| *group_plan == GroupPlan::Leaves(None));
            kept.into_iter()
                .for_each(|kept| group_plans[kept] = GroupPlan::Stays);
        }
        let arrivals = groups.iter().zip(&group_plans);
        let arrivals = arrivals
            .filter(|(group, group_plan)| !group.is_base && **group_plan == GroupPlan::Stays);
        let first_arrival = arrivals.filter_map(|(group, _)| group.arrived_at()).min();
        let mut staying = Vec::new();
        for (group, group_plan) in groups.iter().zip(group_plans) {
            let GroupPlan::Leaves(into) = group_plan else {
                staying.extend(group.members.iter().copied());
                continue;
            };
            // An identity that was linked after the first import was linked to the other groups, too.
            let (leaving, stays): (Vec<_>, Vec<_>) =
                group
                    .members
                    .iter()
                    .copied()
                    .partition(|identity: &&LinkedIdentity| {
                        identity.imported
                            || self.positions.contains_key(&identity.name)
                            || !group.is_base
                            || first_arrival.is_none_or(|first| identity.linked_at < first)
                    });
            staying.extend(stays);
            self.unlink(user, leaving, into);
        }
        self.keep(user, &staying, home, claim.is_none());
    }

    fn group_plan(
        &mut self,
        user: &LinkedUser,
        group: &Group<'a>,
        home: Option<usize>,
    ) -> GroupPlan {
        let is_named_by_tenant = user.external_id.is_some() && !user.named_by_import;
        let may_leave = group.imported && !(group.is_base && is_named_by_tenant);
        if group.entries.len() > 1 {
            let detail =
                "is linked with an identity listed under another name, and not by an import";
            self.refuse(group, detail);
            return GroupPlan::Stays;
        }
        match group.entry() {
            Some(entry) if home == Some(entry) => GroupPlan::Stays,
            Some(entry) if may_leave => GroupPlan::Leaves(Some(entry)),
            Some(_) => {
                let owner = match &user.external_id {
                    Some(name) => format!("the user with the external id {name:?}"),
                    None => user.id.to_string(),
                };
                self.refuse(group, &format!("belongs to {owner}, and not by an import"));
                GroupPlan::Stays
            }
            None if may_leave => GroupPlan::Leaves(None),
            None => GroupPlan::Stays,
        }
    }

    fn refuse(&mut self, group: &Group<'a>, detail: &str) {
        for identity in &group.members {
            if let Some((entry, listed)) = self.positions.get(&identity.name) {
                let pointer = self.entries[*entry].pointer_to(listed);
                self.errors.push(FieldError::new(pointer, detail));
            }
        }
    }

    fn unlink(&mut self, user: &LinkedUser, leaving: Vec<&LinkedIdentity>, into: Option<usize>) {
        let target = into.map(|entry| self.target(entry));
        for identity in &leaving {
            self.record(Change {
                action: LinkAction::Remove,
                name: user.external_id.clone(),
                user: Target::Existing(user.id),
                identity: Some(identity.name.clone()),
                from: None,
            });
            if let (Some(entry), Some(target)) = (into, target) {
                self.sizes[entry] += 1;
                self.record(Change {
                    action: LinkAction::Add,
                    name: Some(self.entries[entry].name.clone()),
                    user: target,
                    identity: Some(identity.name.clone()),
                    from: Some(user.id),
                });
            }
            if self.positions.contains_key(&identity.name) {
                // The unlink removes the mark from it.
                self.plan.listed.push(identity.id);
            } else if identity.imported {
                self.plan.unlisted.push(identity.id);
            }
        }
        self.plan.leaving.push(GroupUnlink {
            from: user.id,
            identities: leaving.iter().map(|identity| identity.id).collect(),
            into: target,
        });
    }

    fn keep(
        &mut self,
        user: &LinkedUser,
        staying: &[&LinkedIdentity],
        home: Option<usize>,
        is_no_target: bool,
    ) {
        for identity in staying {
            let is_listed = self.positions.contains_key(&identity.name);
            match (identity.imported, is_listed) {
                (false, true) => self.plan.listed.push(identity.id),
                (true, false) => {
                    self.plan.unlisted.push(identity.id);
                    if staying.len() > 1 {
                        self.warn_of_unlisted(user, identity);
                    }
                }
                (true, true) | (false, false) => continue,
            }
            self.plan.touched.insert(user.id);
        }
        let Some(entry) = home else {
            return;
        };
        self.sizes[entry] += staying.len();
        if let (true, Target::Existing(into)) = (is_no_target, self.target(entry)) {
            self.plan.merges.push((user.id, into));
            for identity in staying {
                self.record(Change {
                    action: LinkAction::Merge,
                    name: Some(self.entries[entry].name.clone()),
                    user: Target::Existing(into),
                    identity: Some(identity.name.clone()),
                    from: Some(user.id),
                });
            }
        }
    }

    fn warn_of_unlisted(&mut self, user: &LinkedUser, identity: &LinkedIdentity) {
        let name = user.external_id.as_deref();
        let name = name.filter(|name| self.names.contains(name));
        let pointer = name.map_or_else(|| LINKS.to_owned(), pointer_of);
        let detail = format!(
            "{} is no longer listed, and stays with {}: no import linked it",
            identity.name, user.id
        );
        self.plan.warnings.push(FieldError::new(pointer, detail));
    }

    /// Adds the listed identities that no user has.
    fn add(&mut self) {
        for (index, entry) in self.entries.iter().enumerate() {
            let target = self.target(index);
            let missing = entry.identities.iter();
            let missing = missing.filter(|listed| !self.owners.contains_key(&listed.name));
            let missing: Vec<&IdentityName> = missing.map(|listed| &listed.name).collect();
            for name in &missing {
                self.plan.additions.push(Addition {
                    into: target,
                    name: (*name).clone(),
                });
                self.record(Change {
                    action: LinkAction::Add,
                    name: Some(entry.name.clone()),
                    user: target,
                    identity: Some((*name).clone()),
                    from: None,
                });
            }
            self.sizes[index] += missing.len();
            if !missing.is_empty() && self.sizes[index] > 1 {
                self.plan.linked.push(target);
            }
        }
    }

    fn check_sizes(&mut self) {
        for (entry, size) in self.entries.iter().zip(&self.sizes) {
            if *size > MAX_IDENTITIES {
                let detail =
                    format!("the user would have {size} identities, of {MAX_IDENTITIES} at most");
                self.errors.push(FieldError::new(entry.pointer(), detail));
            }
        }
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
