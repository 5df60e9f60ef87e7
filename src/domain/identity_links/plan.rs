//! What a document of links changes in who is who. A pure function of the document and of the people it
//! concerns. It undoes what imports did and nothing else: accounts that a code, an admin or a first
//! contact put together stay together.

use std::collections::{BTreeSet, HashMap, HashSet};

use serde::Serialize;

use crate::domain::identity_links::document::{LINKS, LinkEntry, Listed, pointer_of};
use crate::domain::identity_links::group::{Group, LinkedAccount, LinkedUser};
use crate::domain::people::identity::IdentityName;
use crate::domain::people::user::MAX_IDENTITIES;
use crate::error::{Error, FieldError, Result};
use crate::ids::{IdentityId, UserId};

/// The person of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Target {
    Known(UserId),
    /// One who is made for the entry in this place.
    New(usize),
}

/// Accounts that leave their person together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leaving {
    pub from: UserId,
    pub accounts: Vec<IdentityId>,
    /// Whom they join; else they have a person of their own.
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
    /// A person is made for a name.
    CreateUser,
    /// A person gets the name as `external_id`.
    NameUser,
    /// A name that an import gave is no longer listed.
    UnnameUser,
    /// An identity comes to the person: a new one, or one that `from_user_id` had through an import.
    Add,
    /// An identity comes to the person with all of `from_user_id`, who joins them.
    Merge,
    /// An identity that an import linked is parted from the person.
    Remove,
}

/// One thing that changes, as it is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    pub action: LinkAction,
    pub name: Option<String>,
    pub user: Target,
    pub identity: Option<IdentityName>,
    pub from: Option<UserId>,
}

/// Everything that changes, in the order it is done.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    pub unnamed: Vec<UserId>,
    pub leaving: Vec<Leaving>,
    /// Entries for whom a person is made.
    pub created: Vec<usize>,
    /// People who get the name of an entry.
    pub named: Vec<(UserId, usize)>,
    /// People who join another, whole.
    pub merges: Vec<(UserId, UserId)>,
    pub additions: Vec<Addition>,
    /// Whoever gets an addition and then has several accounts.
    pub linked: Vec<Target>,
    /// Accounts that are there and that the document lists as the one before did not.
    pub listed: Vec<IdentityId>,
    /// Accounts that it no longer lists.
    pub unlisted: Vec<IdentityId>,
    pub changes: Vec<Change>,
    pub warnings: Vec<FieldError>,
    touched: BTreeSet<UserId>,
}

impl Plan {
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty() && self.listed.is_empty() && self.unlisted.is_empty()
    }

    /// The people to whom anything happens, by id.
    pub fn touched(&self) -> Vec<UserId> {
        self.touched.iter().copied().collect()
    }
}

/// What `entries` change, or everything that stands in their way.
pub fn plan(entries: &[LinkEntry], people: &[LinkedUser]) -> Result<Plan> {
    let mut planner = Planner::new(entries, people);
    planner.choose_targets();
    planner.name();
    for (place, person) in people.iter().enumerate() {
        planner.settle(place, person);
    }
    planner.add();
    planner.check_sizes();
    Error::check(planner.errors)?;
    Ok(planner.plan)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Stays,
    Leaves(Option<usize>),
}

struct Planner<'a> {
    entries: &'a [LinkEntry],
    people: &'a [LinkedUser],
    groups: Vec<Vec<Group<'a>>>,
    names: HashSet<&'a str>,
    /// Who has an account, by its name.
    owners: HashMap<&'a IdentityName, usize>,
    /// Which entry lists an account, and where.
    places: HashMap<&'a IdentityName, (usize, &'a Listed)>,
    /// For each entry its person; for each person the entry.
    targets: Vec<Option<usize>>,
    claims: Vec<Option<usize>>,
    sizes: Vec<usize>,
    errors: Vec<FieldError>,
    plan: Plan,
}

impl<'a> Planner<'a> {
    fn new(entries: &'a [LinkEntry], people: &'a [LinkedUser]) -> Self {
        let listed = entries.iter().enumerate().flat_map(|(place, entry)| {
            let accounts = entry.accounts.iter();
            accounts.map(move |listed| (&listed.name, (place, listed)))
        });
        let places: HashMap<_, _> = listed.collect();
        let owned = people.iter().enumerate().flat_map(|(place, person)| {
            let accounts = person.accounts.iter();
            accounts.map(move |account| (&account.name, place))
        });
        Self {
            entries,
            people,
            groups: people
                .iter()
                .map(|one| Group::all_of(one, &places))
                .collect(),
            names: entries.iter().map(|entry| entry.name.as_str()).collect(),
            owners: owned.collect(),
            places,
            targets: vec![None; entries.len()],
            claims: vec![None; people.len()],
            sizes: vec![0; entries.len()],
            errors: Vec::new(),
            plan: Plan::default(),
        }
    }

    /// Whether a person has no name, or one that goes with the document before.
    fn is_free(&self, person: &LinkedUser) -> bool {
        match &person.external_id {
            Some(name) => person.named_by_import && !self.names.contains(name.as_str()),
            None => true,
        }
    }

    /// Where a person who is nobody's target would go: where the first of their groups is listed.
    fn drawn_to(&self, place: usize) -> Option<usize> {
        self.groups[place].first().and_then(Group::entry)
    }

    /// The person with the name; else the first who has a listed account and is free; else a new one.
    fn choose_targets(&mut self) {
        let named = self
            .people
            .iter()
            .enumerate()
            .filter_map(|(place, person)| Some((person.external_id.as_deref()?, place)));
        let named: HashMap<&str, usize> = named.collect();
        for (place, entry) in self.entries.iter().enumerate() {
            if let Some(person) = named.get(entry.name.as_str()) {
                self.targets[place] = Some(*person);
                self.claims[*person] = Some(place);
            }
        }
        for (place, entry) in self.entries.iter().enumerate() {
            if self.targets[place].is_some() {
                continue;
            }
            let owners = entry.accounts.iter();
            let owners = owners.filter_map(|listed| self.owners.get(&listed.name).copied());
            let found = owners.into_iter().find(|owner| {
                self.claims[*owner].is_none()
                    && self.is_free(&self.people[*owner])
                    && self.drawn_to(*owner) == Some(place)
            });
            if let Some(person) = found {
                self.targets[place] = Some(person);
                self.claims[person] = Some(place);
            }
        }
    }

    fn target(&self, entry: usize) -> Target {
        match self.targets[entry] {
            Some(person) => Target::Known(self.people[person].id),
            None => Target::New(entry),
        }
    }

    fn touch(&mut self, target: Target) {
        if let Target::Known(id) = target {
            self.plan.touched.insert(id);
        }
    }

    fn tell(&mut self, change: Change) {
        self.touch(change.user);
        self.plan.touched.extend(change.from);
        self.plan.changes.push(change);
    }

    /// Names go before they come: one may be given on.
    fn name(&mut self) {
        for person in self.people {
            if person.named_by_import && person.external_id.is_some() && self.is_free(person) {
                self.plan.unnamed.push(person.id);
                self.tell(Change {
                    action: LinkAction::UnnameUser,
                    name: person.external_id.clone(),
                    user: Target::Known(person.id),
                    identity: None,
                    from: None,
                });
            }
        }
        for (place, entry) in self.entries.iter().enumerate() {
            let person = self.targets[place].map(|person| &self.people[person]);
            let action = match person {
                Some(person) if person.external_id.as_ref() == Some(&entry.name) => continue,
                Some(person) => {
                    self.plan.named.push((person.id, place));
                    LinkAction::NameUser
                }
                None => {
                    self.plan.created.push(place);
                    LinkAction::CreateUser
                }
            };
            self.tell(Change {
                action,
                name: Some(entry.name.clone()),
                user: self.target(place),
                identity: None,
                from: None,
            });
        }
    }

    /// Decides which groups of a person stay, and whether the person joins another.
    fn settle(&mut self, place: usize, person: &'a LinkedUser) {
        let groups = std::mem::take(&mut self.groups[place]);
        let free = self.is_free(person);
        let claim = self.claims[place];
        let drawn = groups.first().and_then(Group::entry).filter(|_| free);
        let home = claim.or(drawn);
        let mut fates: Vec<Fate> = groups
            .iter()
            .map(|group| self.fate(person, group, home))
            .collect();
        let gets_others = home.is_some_and(|entry| !self.entries[entry].accounts.is_empty());
        if !gets_others && !fates.contains(&Fate::Stays) {
            // A person keeps an account where that takes nothing from anyone.
            let kept = fates.iter().position(|fate| *fate == Fate::Leaves(None));
            kept.into_iter().for_each(|kept| fates[kept] = Fate::Stays);
        }
        let arrivals = groups.iter().zip(&fates);
        let arrivals = arrivals.filter(|(group, fate)| !group.is_base && **fate == Fate::Stays);
        let first_arrival = arrivals.filter_map(|(group, _)| group.arrived_at()).min();
        let mut staying = Vec::new();
        for (group, fate) in groups.iter().zip(fates) {
            let Fate::Leaves(into) = fate else {
                staying.extend(group.members.iter().copied());
                continue;
            };
            // Whoever joined the base when others were there already did not join the base alone.
            let (leaving, stays): (Vec<_>, Vec<_>) =
                group
                    .members
                    .iter()
                    .copied()
                    .partition(|account: &&LinkedAccount| {
                        account.imported
                            || self.places.contains_key(&account.name)
                            || !group.is_base
                            || first_arrival.is_none_or(|first| account.linked_at < first)
                    });
            staying.extend(stays);
            self.leave(person, leaving, into);
        }
        self.stay(person, &staying, home, claim.is_none());
    }

    fn fate(&mut self, person: &LinkedUser, group: &Group<'a>, home: Option<usize>) -> Fate {
        let named_otherwise = person.external_id.is_some() && !person.named_by_import;
        let may_leave = group.imported && !(group.is_base && named_otherwise);
        if group.wanted.len() > 1 {
            let detail =
                "is linked with an identity listed under another name, and not by an import";
            self.refuse(group, detail);
            return Fate::Stays;
        }
        match group.entry() {
            Some(entry) if home == Some(entry) => Fate::Stays,
            Some(entry) if may_leave => Fate::Leaves(Some(entry)),
            Some(_) => {
                let who = match &person.external_id {
                    Some(name) => format!("the person with the external id {name:?}"),
                    None => person.id.to_string(),
                };
                self.refuse(group, &format!("belongs to {who}, and not by an import"));
                Fate::Stays
            }
            None if may_leave => Fate::Leaves(None),
            None => Fate::Stays,
        }
    }

    fn refuse(&mut self, group: &Group<'a>, detail: &str) {
        for account in &group.members {
            if let Some((entry, listed)) = self.places.get(&account.name) {
                let pointer = self.entries[*entry].pointer_to(listed);
                self.errors.push(FieldError::new(pointer, detail));
            }
        }
    }

    fn leave(&mut self, person: &LinkedUser, leaving: Vec<&LinkedAccount>, into: Option<usize>) {
        let target = into.map(|entry| self.target(entry));
        for account in &leaving {
            self.tell(Change {
                action: LinkAction::Remove,
                name: person.external_id.clone(),
                user: Target::Known(person.id),
                identity: Some(account.name.clone()),
                from: None,
            });
            if let (Some(entry), Some(target)) = (into, target) {
                self.sizes[entry] += 1;
                self.tell(Change {
                    action: LinkAction::Add,
                    name: Some(self.entries[entry].name.clone()),
                    user: target,
                    identity: Some(account.name.clone()),
                    from: Some(person.id),
                });
            }
            match self.places.contains_key(&account.name) {
                // Leaving its person takes the mark from it.
                true => self.plan.listed.push(account.id),
                false if account.imported => self.plan.unlisted.push(account.id),
                false => {}
            }
        }
        self.plan.leaving.push(Leaving {
            from: person.id,
            accounts: leaving.iter().map(|account| account.id).collect(),
            into: target,
        });
    }

    fn stay(
        &mut self,
        person: &LinkedUser,
        staying: &[&LinkedAccount],
        home: Option<usize>,
        is_nobodys_target: bool,
    ) {
        for account in staying {
            let is_listed = self.places.contains_key(&account.name);
            match (account.imported, is_listed) {
                (false, true) => self.plan.listed.push(account.id),
                (true, false) => {
                    self.plan.unlisted.push(account.id);
                    if staying.len() > 1 {
                        self.warn_of_kept(person, account);
                    }
                }
                (true, true) | (false, false) => continue,
            }
            self.plan.touched.insert(person.id);
        }
        let Some(entry) = home else {
            return;
        };
        self.sizes[entry] += staying.len();
        if let (true, Target::Known(into)) = (is_nobodys_target, self.target(entry)) {
            self.plan.merges.push((person.id, into));
            for account in staying {
                self.tell(Change {
                    action: LinkAction::Merge,
                    name: Some(self.entries[entry].name.clone()),
                    user: Target::Known(into),
                    identity: Some(account.name.clone()),
                    from: Some(person.id),
                });
            }
        }
    }

    fn warn_of_kept(&mut self, person: &LinkedUser, account: &LinkedAccount) {
        let name = person.external_id.as_deref();
        let name = name.filter(|name| self.names.contains(name));
        let pointer = name.map_or_else(|| LINKS.to_owned(), pointer_of);
        let detail = format!(
            "{} is no longer listed, and stays linked with {}: no import linked it",
            account.name, person.id
        );
        self.plan.warnings.push(FieldError::new(pointer, detail));
    }

    /// Listed accounts that nobody has.
    fn add(&mut self) {
        for (place, entry) in self.entries.iter().enumerate() {
            let target = self.target(place);
            let missing = entry.accounts.iter();
            let missing = missing.filter(|listed| !self.owners.contains_key(&listed.name));
            let missing: Vec<&IdentityName> = missing.map(|listed| &listed.name).collect();
            for name in &missing {
                self.plan.additions.push(Addition {
                    into: target,
                    name: (*name).clone(),
                });
                self.tell(Change {
                    action: LinkAction::Add,
                    name: Some(entry.name.clone()),
                    user: target,
                    identity: Some((*name).clone()),
                    from: None,
                });
            }
            self.sizes[place] += missing.len();
            if !missing.is_empty() && self.sizes[place] > 1 {
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
