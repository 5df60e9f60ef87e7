//! The audit chain of a tenant: the content of an entry, and the bytes its hash is computed from. An
//! entry holds ids and fixed words only; the types accept no text that a user wrote.

use std::str::FromStr;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::crypto::MAC_LEN;
use crate::ids::{Id, TenantId};

/// The hash of an entry of the chain. The next entry contains it.
pub type Hash = [u8; MAC_LEN];

const MAX_ACTOR: usize = 100;

/// The previous hash of the first entry of a chain.
pub const GENESIS_HASH: Hash = [0; MAC_LEN];

macro_rules! actions {
    ($($variant:ident, $name:literal;)+) => {
        /// The audited action. Rows are added and never renamed: stored chains contain the names.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
        pub enum Action {
            $(#[serde(rename = $name)] $variant),+
        }

        impl Action {
            pub const ALL: &'static [Action] = &[$(Action::$variant),+];

            pub const fn as_str(self) -> &'static str {
                match self { $(Action::$variant => $name),+ }
            }
        }

        // Written by hand: the derive does not see a name that comes from a macro.
        impl utoipa::PartialSchema for Action {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
                utoipa::openapi::schema::ObjectBuilder::new()
                    .schema_type(utoipa::openapi::schema::Type::String)
                    .enum_values(Some([$($name),+]))
                    .build()
                    .into()
            }
        }

        impl utoipa::ToSchema for Action {}
    };
}

actions! {
    TenantCreate, "tenant.create";
    TenantSuspend, "tenant.suspend";
    TenantResume, "tenant.resume";
    TenantUpdate, "tenant.update";
    TenantDelete, "tenant.delete";
    TenantLimits, "tenant.limits";
    SecretsReseal, "secrets.reseal";
    ApiKeyCreate, "api_key.create";
    ApiKeyRevoke, "api_key.revoke";
    IssuerPut, "issuer.put";
    IssuerDelete, "issuer.delete";
    AgentPut, "agent.put";
    AgentDelete, "agent.delete";
    ConversationRead, "conversation.read";
    ConversationDelete, "conversation.delete";
    RetentionSweep, "retention.sweep";
    GrantRevoke, "grant.revoke";
    UserCreate, "user.create";
    UserUpdate, "user.update";
    UserMerge, "user.merge";
    UserErase, "user.erase";
    UserExport, "user.export";
    IdentityUnlink, "identity.unlink";
    LinkCodeCreate, "link_code.create";
    IdentityLinksPut, "identity_links.put";
    HomeChannelPut, "home_channel.put";
    HomeChannelDelete, "home_channel.delete";
}

/// The principal in a filter of audit entries.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ActorName(String);

wire_text!(ActorName, "^[!-~]+$", 1, MAX_ACTOR);

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an actor is 1 to {MAX_ACTOR} visible ASCII characters")]
pub struct InvalidActorName;

impl ActorName {
    pub fn into_text(self) -> String {
        self.0
    }
}

impl FromStr for ActorName {
    type Err = InvalidActorName;

    fn from_str(text: &str) -> Result<Self, InvalidActorName> {
        let visible = text.bytes().all(|byte| byte.is_ascii_graphic());
        if visible && (1..=MAX_ACTOR).contains(&text.len()) {
            Ok(Self(text.to_owned()))
        } else {
            Err(InvalidActorName)
        }
    }
}

/// A new entry, before it is appended to the chain.
#[derive(Debug, Clone)]
pub struct Entry {
    /// The caller's principal.
    pub actor: String,
    pub action: Action,
    /// The id of the object of the action.
    pub target: Option<String>,
    pub detail: Detail,
}

impl Entry {
    pub fn new(actor: &str, action: Action, target: &impl std::fmt::Display) -> Self {
        Self {
            actor: actor.to_owned(),
            action,
            target: Some(target.to_string()),
            detail: Detail::default(),
        }
    }

    pub fn with(self, detail: Detail) -> Self {
        Self { detail, ..self }
    }
}

/// Details of an entry: ids, counts and fixed words.
#[derive(Debug, Clone, Default)]
pub struct Detail(Map<String, Value>);

impl Detail {
    pub fn id(self, name: &'static str, id: impl Id) -> Self {
        self.with(name, Value::String(id.to_string()))
    }

    pub fn word(self, name: &'static str, word: &'static str) -> Self {
        self.with(name, Value::from(word))
    }

    pub fn words(self, name: &'static str, words: impl Iterator<Item = &'static str>) -> Self {
        self.with(name, words.map(Value::from).collect())
    }

    pub fn count(self, name: &'static str, count: i64) -> Self {
        self.with(name, Value::from(count))
    }

    fn with(mut self, name: &'static str, value: Value) -> Self {
        self.0.insert(name.to_owned(), value);
        self
    }

    pub fn into_value(self) -> Value {
        Value::Object(self.0)
    }
}

/// A stored entry. The action is text: a newer node may have written one that this version lacks.
#[derive(Debug, Clone, PartialEq)]
pub struct AuditEntry {
    pub seq: i64,
    pub at: DateTime<Utc>,
    pub actor: String,
    pub action: String,
    pub target: Option<String>,
    pub detail: Value,
    pub hash: Vec<u8>,
}

/// The last entry of a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditHead {
    pub seq: i64,
    pub hash: Vec<u8>,
    pub at: DateTime<Utc>,
}

impl AuditHead {
    /// The bytes that a head's MAC covers.
    pub fn encode(&self, tenant_id: TenantId) -> Vec<u8> {
        let mut out = Encoding::default();
        out.field(tenant_id.as_uuid().as_bytes());
        out.number(self.seq);
        out.field(&self.hash);
        out.number(self.at.timestamp_micros());
        out.0
    }
}

/// An entry with its position in the chain: everything its hash covers.
#[derive(Debug, Clone, Copy)]
pub struct AuditLink<'a> {
    pub tenant_id: TenantId,
    pub seq: i64,
    pub at: DateTime<Utc>,
    pub actor: &'a str,
    pub action: &'a str,
    pub target: Option<&'a str>,
    pub detail: &'a Value,
    pub prev_hash: &'a [u8],
}

impl AuditLink<'_> {
    /// The canonical encoding of the entry. No two entries share one.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Encoding::default();
        out.field(self.tenant_id.as_uuid().as_bytes());
        out.number(self.seq);
        out.number(self.at.timestamp_micros());
        out.field(self.actor.as_bytes());
        out.field(self.action.as_bytes());
        match self.target {
            None => out.kind(b'-'),
            Some(target) => {
                out.kind(b'+');
                out.field(target.as_bytes());
            }
        }
        out.value(self.detail);
        out.field(self.prev_hash);
        out.0
    }
}

/// Every part has a length prefix or a fixed length, so no byte can move from one part to the next.
#[derive(Default)]
struct Encoding(Vec<u8>);

impl Encoding {
    fn field(&mut self, bytes: &[u8]) {
        self.length(bytes.len());
        self.0.extend_from_slice(bytes);
    }

    fn number(&mut self, number: i64) {
        self.0.extend_from_slice(&number.to_be_bytes());
    }

    fn length(&mut self, length: usize) {
        self.0.extend_from_slice(&(length as u64).to_be_bytes());
    }

    fn kind(&mut self, kind: u8) {
        self.0.push(kind);
    }

    /// JSON by value: Postgres keeps neither the order of members nor white space.
    fn value(&mut self, value: &Value) {
        match value {
            Value::Null => self.kind(b'0'),
            Value::Bool(false) => self.kind(b'f'),
            Value::Bool(true) => self.kind(b't'),
            Value::Number(number) => {
                self.kind(b'n');
                self.field(number.to_string().as_bytes());
            }
            Value::String(text) => {
                self.kind(b's');
                self.field(text.as_bytes());
            }
            Value::Array(items) => {
                self.kind(b'a');
                self.length(items.len());
                items.iter().for_each(|item| self.value(item));
            }
            Value::Object(members) => {
                self.kind(b'o');
                self.length(members.len());
                let mut members: Vec<_> = members.iter().collect();
                members.sort_unstable_by_key(|(name, _)| name.as_str());
                for (name, member) in members {
                    self.field(name.as_bytes());
                    self.value(member);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use serde_json::json;

    use super::*;
    use crate::ids::ApiKeyId;

    #[test]
    fn an_action_has_one_name_everywhere() {
        for action in Action::ALL {
            assert_eq!(json!(action), action.as_str());
            assert!(action.as_str().split_once('.').is_some());
        }
        let names: HashSet<_> = Action::ALL.iter().map(|action| action.as_str()).collect();
        assert_eq!(names.len(), Action::ALL.len());
    }

    #[test]
    fn a_detail_holds_ids_counts_and_words() {
        let id = ApiKeyId::generate();
        let detail = Detail::default()
            .id("key_id", id)
            .word("reason", "lost")
            .count("deleted", 3)
            .words("scopes", ["admin", "read"].into_iter());
        let expected =
            json!({"key_id": id, "reason": "lost", "deleted": 3, "scopes": ["admin", "read"]});
        assert_eq!(detail.into_value(), expected);
    }

    #[test]
    fn no_two_entries_have_the_same_encoding() {
        let detail = json!({"a": 1});
        let other = json!({"a": "1"});
        let nested = json!({"a": ["b", "c"]});
        let split = json!({"a": [["b"], "c"]});
        let base = AuditLink {
            tenant_id: TenantId::OPERATOR,
            seq: 1,
            at: DateTime::UNIX_EPOCH,
            actor: "key_a",
            action: "a.b",
            target: Some("x"),
            detail: &detail,
            prev_hash: &GENESIS_HASH,
        };
        let later = DateTime::UNIX_EPOCH + chrono::TimeDelta::microseconds(1);
        let links = [
            base,
            AuditLink {
                tenant_id: TenantId::generate(),
                ..base
            },
            AuditLink { seq: 2, ..base },
            AuditLink { at: later, ..base },
            AuditLink {
                actor: "key_aa",
                action: ".b",
                ..base
            },
            AuditLink {
                actor: "key_",
                action: "aa.b",
                ..base
            },
            AuditLink {
                action: "a.bx",
                target: Some(""),
                ..base
            },
            AuditLink {
                target: None,
                ..base
            },
            AuditLink {
                target: Some(""),
                ..base
            },
            AuditLink {
                detail: &other,
                ..base
            },
            AuditLink {
                detail: &nested,
                ..base
            },
            AuditLink {
                detail: &split,
                ..base
            },
            AuditLink {
                prev_hash: &[1; 32],
                ..base
            },
        ];
        let encodings: HashSet<_> = links.iter().map(AuditLink::encode).collect();
        assert_eq!(encodings.len(), links.len());
    }

    #[test]
    fn the_order_of_members_does_not_matter() {
        let encode = |text: &str| {
            let mut out = Encoding::default();
            out.value(&serde_json::from_str(text).unwrap());
            out.0
        };
        assert_eq!(
            encode(r#"{"b": {"y": 1, "x": null}, "a": [true]}"#),
            encode(r#"{"a":[true],"b":{"x":null,"y":1}}"#)
        );
    }
}
