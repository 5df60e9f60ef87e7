//! The document in which tenants keep who is who: `session.identityLinks`, with `session.dmScope` and
//! `platform_toolsets` beside it. Every fault in it is told with its place; what nobody here knows is no
//! fault, but is told too.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::StrDeserializer;

use crate::domain::conversation::tree::Tree;
use crate::domain::people::identity::IdentityName;
use crate::domain::people::platform::PlatformScope;
use crate::domain::people::user::{EXTERNAL_ID_RULE, MAX_IDENTITIES, is_external_id};
use crate::domain::tenant::agent::{DmScope, ToolName};
use crate::domain::tenant::agent_rules::MAX_ENTRIES;
use crate::error::{Error, FieldError, Result, escape_pointer};

/// More than this of one kind are not told.
const MAX_TOLD: usize = 1000;

/// Where a document says who is who.
pub const LINKS: &str = "/session/identityLinks";
const TOOLSETS: &str = "/platform_toolsets";

#[derive(Debug, Clone, Default)]
pub struct LinkDocument {
    pub dm_scope: Option<DmScope>,
    /// Who is who; `None` says nothing about anyone, and an empty list that there is nobody.
    pub links: Option<Vec<LinkEntry>>,
    pub toolsets: Option<BTreeMap<String, Vec<ToolName>>>,
    pub warnings: Vec<FieldError>,
}

/// A person by the tenant's own name, and the accounts that are listed under it, each once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkEntry {
    pub name: String,
    pub accounts: Vec<Listed>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    pub name: IdentityName,
    /// Its place in the list, from 0.
    pub place: usize,
}

impl LinkEntry {
    pub fn pointer(&self) -> String {
        pointer_of(&self.name)
    }

    pub fn pointer_to(&self, listed: &Listed) -> String {
        format!("{}/{}", self.pointer(), listed.place)
    }
}

/// Where a document lists the accounts of `name`.
pub fn pointer_of(name: &str) -> String {
    format!("{LINKS}/{}", escape_pointer(name))
}

/// Reads a document, or says everything that is wrong with it.
pub fn read(tree: &Tree) -> Result<LinkDocument> {
    let mut reader = Reader::default();
    let mut document = LinkDocument::default();
    for (name, member) in reader.members("", tree) {
        match name {
            "session" => reader.session(member, &mut document),
            "platform_toolsets" => document.toolsets = reader.toolsets(member),
            unknown => reader.unknown("", unknown),
        }
    }
    reader.errors.truncate(MAX_TOLD);
    Error::check(reader.errors)?;
    document.warnings = reader.warnings;
    Ok(document)
}

#[derive(Default)]
struct Reader {
    errors: Vec<FieldError>,
    warnings: Vec<FieldError>,
}

impl Reader {
    fn refuse(&mut self, pointer: impl Into<String>, detail: impl Into<String>) {
        self.errors.push(FieldError::new(pointer, detail));
    }

    fn warn(&mut self, pointer: impl Into<String>, detail: impl Into<String>) {
        if self.warnings.len() < MAX_TOLD {
            self.warnings.push(FieldError::new(pointer, detail));
        }
    }

    fn unknown(&mut self, at: &str, name: &str) {
        let pointer = format!("{at}/{}", escape_pointer(name));
        self.warn(pointer, "is not known here, and was left out");
    }

    /// The members of an object that are given; null is as good as nothing.
    fn members<'a>(&mut self, at: &str, tree: &'a Tree) -> Vec<(&'a str, &'a Tree)> {
        let Tree::Map(members) = tree else {
            self.refuse(at, format!("must be an object, and not {}", tree.kind()));
            return Vec::new();
        };
        let mut seen = HashSet::new();
        let mut given = Vec::new();
        for (name, member) in members {
            if !seen.insert(name.as_str()) {
                let pointer = format!("{at}/{}", escape_pointer(name));
                self.refuse(pointer, "is given twice");
            } else {
                given.push((name.as_str(), member));
            }
        }
        given
    }

    fn list<'a>(&mut self, at: &str, tree: &'a Tree) -> &'a [Tree] {
        let Tree::List(items) = tree else {
            self.refuse(at, format!("must be a list, and not {}", tree.kind()));
            return &[];
        };
        items
    }

    fn session(&mut self, tree: &Tree, document: &mut LinkDocument) {
        if *tree == Tree::Null {
            return;
        }
        for (name, member) in self.members("/session", tree) {
            match name {
                "dmScope" => document.dm_scope = self.dm_scope(member),
                "identityLinks" => document.links = self.links(member),
                unknown => self.unknown("/session", unknown),
            }
        }
    }

    fn dm_scope(&mut self, tree: &Tree) -> Option<DmScope> {
        let read = match tree {
            Tree::Null => return None,
            Tree::Text(text) => {
                let text: StrDeserializer<'_, serde::de::value::Error> =
                    text.as_str().into_deserializer();
                DmScope::deserialize(text).ok()
            }
            Tree::Bool | Tree::Number(_) | Tree::List(_) | Tree::Map(_) => None,
        };
        if read.is_none() {
            let detail = "must be per-channel-peer, per-account-channel-peer, per-peer or main";
            self.refuse("/session/dmScope", detail);
        }
        read
    }

    fn links(&mut self, tree: &Tree) -> Option<Vec<LinkEntry>> {
        if *tree == Tree::Null {
            return None;
        }
        let mut entries = Vec::new();
        for (name, list) in self.members(LINKS, tree) {
            if !is_external_id(name) {
                self.refuse(pointer_of(name), EXTERNAL_ID_RULE);
            }
            if name.contains(':') {
                self.warn(
                    pointer_of(name),
                    "looks like an identity, and is taken as a name",
                );
            }
            entries.push(self.entry(name, list));
        }
        self.refuse_shared(&entries);
        Some(entries)
    }

    fn entry(&mut self, name: &str, list: &Tree) -> LinkEntry {
        let mut entry = LinkEntry {
            name: name.to_owned(),
            accounts: Vec::new(),
        };
        let at = entry.pointer();
        let mut seen = HashMap::new();
        for (place, item) in self.list(&at, list).iter().enumerate() {
            let at = format!("{at}/{place}");
            let Some(account) = self.identity(&at, item) else {
                continue;
            };
            if let Some(before) = seen.insert(account.clone(), place) {
                let detail = format!("is the same identity as entry {before}, and counts once");
                self.warn(at, detail);
                seen.insert(account, before);
                continue;
            }
            entry.accounts.push(Listed {
                name: account,
                place,
            });
        }
        if entry.accounts.len() > MAX_IDENTITIES {
            let detail = format!("a user has at most {MAX_IDENTITIES} identities");
            self.refuse(at, detail);
        }
        entry
    }

    fn identity(&mut self, at: &str, item: &Tree) -> Option<IdentityName> {
        let text = match item {
            Tree::Text(text) => text,
            Tree::Number(number) => {
                let detail = format!("has no platform: an identity is platform:{number}, as text");
                self.refuse(at, detail);
                return None;
            }
            Tree::Map(_) => {
                let detail =
                    "must be a text, and not an object: in YAML, no space follows the colon";
                self.refuse(at, detail);
                return None;
            }
            Tree::Null | Tree::Bool | Tree::List(_) => {
                self.refuse(at, format!("must be a text, and not {}", item.kind()));
                return None;
            }
        };
        match text.parse() {
            Ok(name) => Some(name),
            Err(problem) => {
                let problem: crate::domain::people::identity::InvalidIdentityName = problem;
                self.refuse(at, problem.to_string());
                None
            }
        }
    }

    /// One account is one person's: each place that lists it is at fault.
    fn refuse_shared(&mut self, entries: &[LinkEntry]) {
        let mut places: HashMap<&IdentityName, Vec<(&LinkEntry, &Listed)>> = HashMap::new();
        for entry in entries {
            for listed in &entry.accounts {
                places
                    .entry(&listed.name)
                    .or_default()
                    .push((entry, listed));
            }
        }
        for entry in entries {
            for listed in &entry.accounts {
                let others = places.get(&listed.name).into_iter().flatten();
                let other = others
                    .into_iter()
                    .find(|(other, _)| other.name != entry.name);
                if let Some((other, same)) = other {
                    let detail = format!("is also listed at {}", other.pointer_to(same));
                    self.refuse(entry.pointer_to(listed), detail);
                }
            }
        }
    }

    fn toolsets(&mut self, tree: &Tree) -> Option<BTreeMap<String, Vec<ToolName>>> {
        if *tree == Tree::Null {
            return None;
        }
        let members = self.members(TOOLSETS, tree);
        if !members.is_empty() {
            self.warn(TOOLSETS, "is stored, and not used yet");
        }
        if members.len() > MAX_ENTRIES {
            let detail = format!("must have at most {MAX_ENTRIES} members");
            self.refuse(TOOLSETS, detail);
        }
        let mut toolsets = BTreeMap::new();
        for (platform, list) in members {
            let at = format!("{TOOLSETS}/{}", escape_pointer(platform));
            if let Err(problem) = platform.parse::<PlatformScope>() {
                self.refuse(&at, problem.to_string());
            }
            let mut tools = Vec::new();
            for (place, item) in self.list(&at, list).iter().enumerate() {
                tools.extend(self.tool(&format!("{at}/{place}"), item));
            }
            toolsets.insert(platform.to_owned(), tools);
        }
        Some(toolsets)
    }

    fn tool(&mut self, at: &str, item: &Tree) -> Option<ToolName> {
        let Tree::Text(text) = item else {
            self.refuse(at, format!("must be a text, and not {}", item.kind()));
            return None;
        };
        match text.parse::<ToolName>() {
            Ok(tool) => Some(tool),
            Err(problem) => {
                self.refuse(at, problem.to_string());
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde::de::DeserializeSeed;
    use serde_json::{Value, json};

    use super::*;
    use crate::domain::conversation::tree::{Allowance, TreeSeed};

    fn read_text(text: &str) -> Result<LinkDocument> {
        let allowance = Allowance::default();
        let mut json = serde_json::Deserializer::from_str(text);
        read(&TreeSeed(&allowance).deserialize(&mut json).unwrap())
    }

    fn read_json(value: Value) -> Result<LinkDocument> {
        read_text(&value.to_string())
    }

    fn pointers(found: &[FieldError]) -> Vec<&str> {
        found.iter().map(|one| one.pointer.as_str()).collect()
    }

    #[test]
    fn a_document_is_read_in_its_order_and_says_what_it_leaves_out() {
        let document = read_text(
            r#"{"session": {"dmScope": "per-account-channel-peer", "scope": "per-sender",
                            "identityLinks": {"zoe": [], "irc:Ann/~": ["irc:Ann", "irc:ann", "web:1"]}},
                "platform_toolsets": {"telegram": ["web"]}, "models": {"x": [1]}}"#,
        )
        .unwrap();
        assert_eq!(document.dm_scope, Some(DmScope::PerChannelPeer));
        let links = document.links.unwrap();
        let names: Vec<&str> = links.iter().map(|entry| entry.name.as_str()).collect();
        assert_eq!(names, ["zoe", "irc:Ann/~"]);
        let places: Vec<usize> = links[1].accounts.iter().map(|one| one.place).collect();
        assert_eq!(places, [0, 2]);
        assert_eq!(document.toolsets.unwrap().len(), 1);
        let expected = [
            "/session/scope",
            "/session/identityLinks/irc:Ann~1~0",
            "/session/identityLinks/irc:Ann~1~0/1",
            "/platform_toolsets",
            "/models",
        ];
        assert_eq!(pointers(&document.warnings), expected);
    }

    #[test]
    fn what_is_left_out_or_null_is_not_said() {
        for document in [
            json!({}),
            json!({"session": null, "platform_toolsets": null}),
            json!({"session": {"dmScope": null, "identityLinks": null}}),
        ] {
            let read = read_json(document).unwrap();
            assert!(read.dm_scope.is_none() && read.links.is_none() && read.toolsets.is_none());
            assert!(read.warnings.is_empty());
        }
        let nobody = read_json(json!({"session": {"identityLinks": {}}})).unwrap();
        assert_eq!(nobody.links, Some(Vec::new()));
    }

    #[test]
    fn every_fault_is_told_with_its_place() {
        let many: Vec<String> = (0..101).map(|n| format!("irc:{n}")).collect();
        let document = json!({
            "session": {
                "dmScope": "per-sender",
                "identityLinks": {
                    "a": ["123", 123, {"telegram": 5}, null, "dm:1", "irc:Bob", "telegram:1"],
                    "b": ["web:1", "irc:bob"],
                    "c": "web:2",
                    "d": many,
                    "": [],
                    "e\n": [],
                }
            },
            "platform_toolsets": {"telegram": ["x", "", 1], "DM": [], "irc": {}},
        });
        let error = read_json(document).unwrap_err();
        let mut found = pointers(&error.errors);
        found.sort_unstable();
        let links = |rest: &str| format!("/session/identityLinks/{rest}");
        let mut expected: Vec<String> = [
            "", "a/0", "a/1", "a/2", "a/3", "a/4", "a/5", "b/1", "c", "d", "e\n",
        ]
        .map(links)
        .to_vec();
        expected.push("/session/dmScope".to_owned());
        for rest in ["DM", "irc", "telegram/1", "telegram/2"] {
            expected.push(format!("/platform_toolsets/{rest}"));
        }
        expected.sort_unstable();
        assert_eq!(found, expected);
    }

    #[test]
    fn what_is_no_object_or_given_twice_is_refused() {
        for (text, pointer) in [
            ("[]", ""),
            ("null", ""),
            (r#"{"session": 5}"#, "/session"),
            (
                r#"{"session": {"identityLinks": []}}"#,
                "/session/identityLinks",
            ),
            (
                r#"{"session": {"identityLinks": {"a": [], "a": ["irc:1"]}}}"#,
                "/session/identityLinks/a",
            ),
        ] {
            let error = read_text(text).unwrap_err();
            assert_eq!(pointers(&error.errors), [pointer], "{text}");
        }
    }
}
