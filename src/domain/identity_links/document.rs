//! A tenant's document of identity links: `session.identityLinks`, with `session.dmScope` and
//! `platform_toolsets`. Every error is reported with its pointer; an unknown member is no error, and is
//! reported as a warning.

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

/// The most errors, and the most warnings, of one report.
const MAX_REPORTED: usize = 1000;

/// The pointer to the identity links of a document.
pub const LINKS: &str = "/session/identityLinks";
const TOOLSETS: &str = "/platform_toolsets";

#[derive(Debug, Clone, Default)]
pub struct LinkDocument {
    pub dm_scope: Option<DmScope>,
    /// The links of each user. `None` changes no links; an empty list removes all of them.
    pub links: Option<Vec<LinkEntry>>,
    pub toolsets: Option<BTreeMap<String, Vec<ToolName>>>,
    pub warnings: Vec<FieldError>,
}

/// A user by the tenant's own name, and the identities that the document lists for it, without duplicates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkEntry {
    pub name: String,
    pub identities: Vec<ListedIdentity>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedIdentity {
    pub name: IdentityName,
    /// Its index in the list.
    pub index: usize,
}

impl LinkEntry {
    pub fn pointer(&self) -> String {
        pointer_of(&self.name)
    }

    pub fn pointer_to(&self, listed: &ListedIdentity) -> String {
        format!("{}/{}", self.pointer(), listed.index)
    }
}

/// The pointer to the identities of `name`.
pub fn pointer_of(name: &str) -> String {
    format!("{LINKS}/{}", escape_pointer(name))
}

/// Parses a document, or reports all its errors.
pub fn parse(tree: &Tree) -> Result<LinkDocument> {
    let mut parser = Parser::default();
    let mut document = LinkDocument::default();
    for (name, member) in parser.members("", tree) {
        match name {
            "session" => parser.session(member, &mut document),
            "platform_toolsets" => document.toolsets = parser.toolsets(member),
            unknown => parser.unknown("", unknown),
        }
    }
    parser.errors.truncate(MAX_REPORTED);
    Error::check(parser.errors)?;
    document.warnings = parser.warnings;
    Ok(document)
}

#[derive(Default)]
struct Parser {
    errors: Vec<FieldError>,
    warnings: Vec<FieldError>,
}

impl Parser {
    fn refuse(&mut self, pointer: impl Into<String>, detail: impl Into<String>) {
        self.errors.push(FieldError::new(pointer, detail));
    }

    fn warn(&mut self, pointer: impl Into<String>, detail: impl Into<String>) {
        if self.warnings.len() < MAX_REPORTED {
            self.warnings.push(FieldError::new(pointer, detail));
        }
    }

    fn unknown(&mut self, at: &str, name: &str) {
        let pointer = format!("{at}/{}", escape_pointer(name));
        self.warn(pointer, "is unknown, and is ignored");
    }

    /// The members of an object, without duplicates.
    fn members<'a>(&mut self, at: &str, tree: &'a Tree) -> Vec<(&'a str, &'a Tree)> {
        let Tree::Map(members) = tree else {
            self.refuse(at, format!("must be an object, and not {}", tree.kind()));
            return Vec::new();
        };
        let mut seen = HashSet::new();
        let mut unique = Vec::new();
        for (name, member) in members {
            if !seen.insert(name.as_str()) {
                let pointer = format!("{at}/{}", escape_pointer(name));
                self.refuse(pointer, "is given twice");
            } else {
                unique.push((name.as_str(), member));
            }
        }
        unique
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
        let scope = match tree {
            Tree::Null => return None,
            Tree::Text(text) => {
                let text: StrDeserializer<'_, serde::de::value::Error> =
                    text.as_str().into_deserializer();
                DmScope::deserialize(text).ok()
            }
            Tree::Bool | Tree::Number(_) | Tree::List(_) | Tree::Map(_) => None,
        };
        if scope.is_none() {
            let detail = "must be per-channel-peer, per-account-channel-peer, per-peer or main";
            self.refuse("/session/dmScope", detail);
        }
        scope
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
                    "looks like an identity, and counts as a name",
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
            identities: Vec::new(),
        };
        let at = entry.pointer();
        let mut seen = HashMap::new();
        for (index, item) in self.list(&at, list).iter().enumerate() {
            let at = format!("{at}/{index}");
            let Some(identity) = self.identity(&at, item) else {
                continue;
            };
            if let Some(before) = seen.insert(identity.clone(), index) {
                let detail = format!("is the same identity as entry {before}, and counts once");
                self.warn(at, detail);
                seen.insert(identity, before);
                continue;
            }
            entry.identities.push(ListedIdentity {
                name: identity,
                index,
            });
        }
        if entry.identities.len() > MAX_IDENTITIES {
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

    /// An identity belongs to one user: every entry that lists it for a second one is an error.
    fn refuse_shared(&mut self, entries: &[LinkEntry]) {
        let mut positions: HashMap<&IdentityName, Vec<(&LinkEntry, &ListedIdentity)>> =
            HashMap::new();
        for entry in entries {
            for listed in &entry.identities {
                positions
                    .entry(&listed.name)
                    .or_default()
                    .push((entry, listed));
            }
        }
        for entry in entries {
            for listed in &entry.identities {
                let others = positions.get(&listed.name).into_iter().flatten();
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
            for (index, item) in self.list(&at, list).iter().enumerate() {
                tools.extend(self.tool(&format!("{at}/{index}"), item));
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
    use crate::domain::conversation::tree::{SizeBudget, TreeSeed};

    fn parse_text(text: &str) -> Result<LinkDocument> {
        let budget = SizeBudget::default();
        let mut json = serde_json::Deserializer::from_str(text);
        parse(&TreeSeed(&budget).deserialize(&mut json).unwrap())
    }

    fn parse_json(value: Value) -> Result<LinkDocument> {
        parse_text(&value.to_string())
    }

    fn pointers(found: &[FieldError]) -> Vec<&str> {
        found.iter().map(|one| one.pointer.as_str()).collect()
    }

    #[test]
    fn a_document_keeps_its_order_and_warns_of_unknown_members() {
        let document = parse_text(
            r#"{"session": {"dmScope": "per-account-channel-peer", "scope": "per-sender",
                            "identityLinks": {"zoe": [], "irc:Ann/~": ["irc:Ann", "irc:ann", "web:1"]}},
                "platform_toolsets": {"telegram": ["web"]}, "models": {"x": [1]}}"#,
        )
        .unwrap();
        assert_eq!(document.dm_scope, Some(DmScope::PerChannelPeer));
        let links = document.links.unwrap();
        let names: Vec<&str> = links.iter().map(|entry| entry.name.as_str()).collect();
        assert_eq!(names, ["zoe", "irc:Ann/~"]);
        let positions: Vec<usize> = links[1].identities.iter().map(|one| one.index).collect();
        assert_eq!(positions, [0, 2]);
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
    fn a_missing_or_null_member_changes_nothing() {
        for document in [
            json!({}),
            json!({"session": null, "platform_toolsets": null}),
            json!({"session": {"dmScope": null, "identityLinks": null}}),
        ] {
            let read = parse_json(document).unwrap();
            assert!(read.dm_scope.is_none() && read.links.is_none() && read.toolsets.is_none());
            assert!(read.warnings.is_empty());
        }
        let empty = parse_json(json!({"session": {"identityLinks": {}}})).unwrap();
        assert_eq!(empty.links, Some(Vec::new()));
    }

    #[test]
    fn every_error_has_its_pointer() {
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
        let error = parse_json(document).unwrap_err();
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
    fn duplicates_and_values_of_another_type_are_refused() {
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
            let error = parse_text(text).unwrap_err();
            assert_eq!(pointers(&error.errors), [pointer], "{text}");
        }
    }
}
