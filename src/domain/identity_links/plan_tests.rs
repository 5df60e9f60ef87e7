use chrono::TimeDelta;
use serde_json::{Value, json};

use super::*;
use crate::domain::identity_links::group::Origin;

/// Users in a few words, and the changes that a document makes to them.
#[derive(Default)]
struct Sample(Vec<LinkedUser>);

fn minute(minute: i64) -> chrono::DateTime<chrono::Utc> {
    chrono::DateTime::UNIX_EPOCH + TimeDelta::minutes(minute)
}

/// An identity, the time of its link, and its origin.
fn identity(name: &str, at: i64, imported: bool, origin: Option<Origin>) -> LinkedIdentity {
    LinkedIdentity {
        id: IdentityId::generate(),
        name: name.parse().unwrap(),
        imported,
        linked_at: minute(at),
        origin,
    }
}

/// Linked by a first contact, a code or an admin.
fn own(name: &str, at: i64) -> LinkedIdentity {
    identity(name, at, false, None)
}

/// The same, and listed by a later document.
fn listed(name: &str, at: i64) -> LinkedIdentity {
    identity(name, at, true, None)
}

/// Created by an import.
fn created(name: &str, at: i64) -> LinkedIdentity {
    let origin = Origin {
        path: vec![UserId::generate()],
        created: true,
        at: minute(at),
    };
    identity(name, at, true, Some(origin))
}

/// Linked by an import that merged the user `from`.
fn merged(name: &str, at: i64, imported: bool, from: UserId) -> LinkedIdentity {
    let origin = Origin {
        path: vec![from],
        created: false,
        at: minute(at),
    };
    identity(name, at, imported, Some(origin))
}

impl Sample {
    fn user(
        mut self,
        name: Option<&str>,
        by_import: bool,
        identities: Vec<LinkedIdentity>,
    ) -> Self {
        self.0.push(LinkedUser {
            id: UserId::generate(),
            external_id: name.map(str::to_owned),
            named_by_import: by_import,
            identities,
        });
        self
    }

    fn imported(self, name: &str, identities: Vec<LinkedIdentity>) -> Self {
        self.user(Some(name), true, identities)
    }

    fn nameless(self, identities: Vec<LinkedIdentity>) -> Self {
        self.user(None, false, identities)
    }

    fn plan(&self, document: Value) -> Result<Plan> {
        let entries = document.as_object().unwrap().iter();
        let entries: Vec<LinkEntry> = entries
            .map(|(name, list)| LinkEntry {
                name: name.clone(),
                identities: list
                    .as_array()
                    .unwrap()
                    .iter()
                    .enumerate()
                    .map(|(index, text)| ListedIdentity {
                        name: text.as_str().unwrap().parse().unwrap(),
                        index,
                    })
                    .collect(),
            })
            .collect();
        plan(&entries, &self.0)
    }

    /// An existing user by its index, a new one by the index of its entry.
    fn describe(&self, target: Target) -> String {
        match target {
            Target::Existing(id) => {
                let index = self.0.iter().position(|user| user.id == id);
                format!("p{}", index.unwrap())
            }
            Target::New(entry) => format!("new{entry}"),
        }
    }

    fn changes(&self, document: Value) -> Vec<String> {
        let plan = self.plan(document).unwrap();
        let describe = |change: &Change| {
            let action = serde_json::to_value(change.action).unwrap();
            let mut words = vec![
                action.as_str().unwrap().to_owned(),
                change.name.clone().unwrap_or("-".to_owned()),
                self.describe(change.user),
            ];
            words.extend(change.identity.as_ref().map(ToString::to_string));
            let from = change
                .from
                .map(|from| self.describe(Target::Existing(from)));
            words.extend(from.map(|from| format!("< {from}")));
            words.join(" ")
        };
        plan.changes.iter().map(describe).collect()
    }

    fn error_pointers(&self, document: Value) -> Vec<String> {
        let error = self.plan(document).unwrap_err();
        let found = error.errors.into_iter();
        found
            .map(|one| one.pointer.replace("/session/identityLinks/", ""))
            .collect()
    }
}

#[test]
fn an_unknown_user_is_created_with_all_listed_identities() {
    let plan = Sample::default();
    let document = json!({"ann": ["irc:a", "web:a"], "bob": []});
    let expected = [
        "create_user ann new0",
        "create_user bob new1",
        "add ann new0 irc:a",
        "add ann new0 web:a",
    ];
    assert_eq!(plan.changes(document.clone()), expected);
    let plan = plan.plan(document).unwrap();
    assert_eq!(plan.linked, [Target::New(0)]);
    assert!(plan.touched().is_empty());
}

#[test]
fn existing_links_change_nothing() {
    let sample = Sample::default()
        .imported("ann", vec![created("irc:a", 1), created("web:a", 1)])
        .imported("bob", vec![])
        .imported(
            "eve",
            vec![listed("irc:e", 1), own("web:e", 2), created("sms:1", 3)],
        )
        .nameless(vec![own("irc:x", 1)]);
    let plan = sample
        .plan(json!({"ann": ["web:a", "irc:A"], "bob": [], "eve": ["irc:e", "sms:1"]}))
        .unwrap();
    assert!(plan.is_empty() && plan.touched().is_empty() && plan.warnings.is_empty());
}

#[test]
fn users_with_listed_identities_are_merged_into_the_user_of_the_name() {
    let sample = Sample::default()
        .nameless(vec![own("irc:a", 1)])
        .nameless(vec![own("web:a", 1), own("web:b", 2)])
        .user(Some("bob"), false, vec![own("sms:1", 1)]);
    let expected = [
        "name_user ann p0",
        "merge ann p0 web:a < p1",
        "merge ann p0 web:b < p1",
        "add bob p2 sms:2",
    ];
    let document = json!({"ann": ["irc:a", "web:a"], "bob": ["sms:2", "sms:1"]});
    assert_eq!(sample.changes(document.clone()), expected);
    let plan = sample.plan(document).unwrap();
    assert_eq!(plan.merges.len(), 1);
    assert_eq!(plan.linked, [Target::Existing(sample.0[2].id)]);
    assert_eq!(plan.listed.len(), 3, "the other identity is not listed");
    assert_eq!(plan.touched().len(), 3);
}

#[test]
fn an_unlisted_identity_is_unlinked_if_an_import_linked_it() {
    let ann = || {
        Sample::default().imported(
            "ann",
            vec![created("irc:a", 1), created("web:a", 1), own("sms:1", 5)],
        )
    };
    assert_eq!(
        ann().changes(json!({"ann": ["irc:a"]})),
        ["remove ann p0 web:a"]
    );
    // The name is gone: an identity that a code linked stays with the user.
    let expected = [
        "unname_user ann p0",
        "remove ann p0 irc:a",
        "remove ann p0 web:a",
    ];
    assert_eq!(ann().changes(json!({})), expected);
    // Without such an identity, the oldest stays.
    let sample = Sample::default().imported("ann", vec![created("irc:a", 1), created("web:a", 1)]);
    let expected = ["unname_user ann p0", "remove ann p0 web:a"];
    assert_eq!(sample.changes(json!({})), expected);
    assert_eq!(sample.plan(json!({})).unwrap().unlisted.len(), 2);
    assert_eq!(sample.changes(json!({"ann": []})), ["remove ann p0 web:a"]);
    let expected = [
        "remove ann p0 irc:a",
        "remove ann p0 web:a",
        "add ann p0 sms:9",
    ];
    assert_eq!(sample.changes(json!({"ann": ["sms:9"]})), expected);
}

#[test]
fn links_of_a_code_stay_though_they_were_listed() {
    let sample = Sample::default().imported("ann", vec![listed("irc:a", 1), listed("web:a", 2)]);
    for (document, changes, warned) in [
        (json!({"ann": ["irc:a"]}), vec![], 1),
        (json!({}), vec!["unname_user ann p0"], 2),
    ] {
        assert_eq!(sample.changes(document.clone()), changes);
        assert_eq!(sample.plan(document).unwrap().warnings.len(), warned);
    }
    let split = json!({"ann": ["irc:a"], "bob": ["web:a"]});
    assert_eq!(sample.error_pointers(split), ["ann/0", "bob/0"]);
}

#[test]
fn the_base_leaves_without_identities_that_were_linked_later() {
    let identities = vec![
        listed("irc:a", 1),
        own("web:before", 2),
        created("sms:1", 5),
        own("web:later", 9),
    ];
    let sample = Sample::default().imported("ann", identities.clone());
    let expected = ["remove ann p0 irc:a", "remove ann p0 web:before"];
    let document = json!({"ann": ["sms:1"]});
    assert_eq!(sample.changes(document.clone()), expected);
    let plan = sample.plan(document.clone()).unwrap();
    assert_eq!(plan.leaving.len(), 1, "they leave together");
    // The tenant itself named this user.
    let sample = Sample::default().user(Some("ann"), false, identities);
    assert_eq!(sample.changes(document), Vec::<String>::new());
}

#[test]
fn identities_of_one_merge_are_unlinked_together() {
    let from = UserId::generate();
    let sample = Sample::default().imported(
        "ann",
        vec![
            listed("irc:a", 1),
            merged("web:1", 2, true, from),
            merged("web:2", 2, true, from),
            merged("web:3", 2, false, from),
        ],
    );
    let plan = sample.plan(json!({"ann": ["irc:a"]})).unwrap();
    assert_eq!(plan.leaving.len(), 1);
    assert_eq!(plan.leaving[0].identities.len(), 3);
    let one_left = json!({"ann": ["irc:a", "web:2"]});
    assert_eq!(sample.changes(one_left), Vec::<String>::new());
    let torn = json!({"ann": ["irc:a", "web:1"], "bob": ["web:2"]});
    assert_eq!(sample.error_pointers(torn), ["ann/1", "bob/0"]);
}

#[test]
fn an_identity_moves_from_one_name_to_another() {
    let sample = Sample::default()
        .imported("ann", vec![created("irc:a", 1), created("web:a", 1)])
        .imported("bob", vec![created("irc:b", 1)]);
    let expected = ["remove ann p0 web:a", "add bob p1 web:a < p0"];
    let document = json!({"ann": ["irc:a"], "bob": ["irc:b", "web:a"]});
    assert_eq!(sample.changes(document.clone()), expected);
    assert_eq!(sample.plan(document).unwrap().listed.len(), 1);
    // To a new user, in a swap, and with the user when only the name changes.
    let expected = [
        "create_user eve new2",
        "remove ann p0 web:a",
        "add eve new2 web:a < p0",
    ];
    let document = json!({"ann": ["irc:a"], "bob": ["irc:b"], "eve": ["web:a"]});
    assert_eq!(sample.changes(document), expected);
    let expected = [
        "remove ann p0 irc:a",
        "add bob p1 irc:a < p0",
        "remove ann p0 web:a",
        "add bob p1 web:a < p0",
        "remove bob p1 irc:b",
        "add ann p0 irc:b < p1",
    ];
    let document = json!({"ann": ["irc:b"], "bob": ["irc:a", "web:a"]});
    assert_eq!(sample.changes(document), expected);
    let expected = ["unname_user ann p0", "name_user eve p0"];
    let document = json!({"bob": ["irc:b"], "eve": ["irc:a", "web:a"]});
    assert_eq!(sample.changes(document), expected);
    // One name is gone, and all its identities are listed under the other.
    let expected = ["unname_user bob p1", "merge ann p0 irc:b < p1"];
    let document = json!({"ann": ["irc:a", "web:a", "irc:b"]});
    assert_eq!(sample.changes(document), expected);
}

#[test]
fn an_identity_of_a_user_with_another_name_stays() {
    let sample = Sample::default()
        .user(Some("ann"), false, vec![own("irc:a", 1)])
        .user(
            Some("bob"),
            false,
            vec![listed("irc:b", 1), created("web:b", 2)],
        );
    assert_eq!(
        sample.error_pointers(json!({"eve": ["web:9", "irc:a", "irc:b"]})),
        ["eve/1", "eve/2"]
    );
    let expected = [
        "create_user eve new0",
        "remove bob p1 web:b",
        "add eve new0 web:b < p1",
    ];
    assert_eq!(sample.changes(json!({"eve": ["web:b"]})), expected);
}

#[test]
fn a_user_has_at_most_a_hundred_identities() {
    let besides: Vec<LinkedIdentity> = (0..60).map(|n| own(&format!("irc:{n}"), 1)).collect();
    let others: Vec<LinkedIdentity> = (0..30).map(|n| own(&format!("sms:{n}"), 1)).collect();
    let sample = Sample::default()
        .user(Some("ann"), false, besides)
        .nameless(others);
    let list = |new: usize| {
        let new = (0..new).map(|n| format!("web:{n}"));
        let list: Vec<String> = new.chain(["sms:3".to_owned()]).collect();
        json!({ "ann": list })
    };
    assert!(sample.plan(list(10)).is_ok());
    assert_eq!(sample.error_pointers(list(11)), ["ann"]);
}
