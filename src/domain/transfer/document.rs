//! The document of an exported or imported conversation, and the content of its signature: exactly the
//! data that an import reads, in canonical form.

use std::str::FromStr;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use crate::crypto::{Hasher, Keyring};
use crate::domain::conversation::message::{Content, MessageKind, Role, ToolCall};
use crate::domain::conversation::session::CompressionRecord;
use crate::domain::people::display_name::{DisplayName, without_misleading};
use crate::domain::people::identity::IdentityName;
use crate::domain::people::platform::PlatformScope;
use crate::domain::values::resource_name::ResourceName;
use crate::domain::values::timestamp;
use crate::error::{Error, Result};
use crate::ids::TenantId;

pub const FORMAT: &str = "throughline.conversation";
pub const VERSION: u32 = 1;

/// The position of a message in a chain: the depth of its link, and its number there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = DocumentPlace)]
pub struct MessagePosition {
    #[schema(minimum = 0)]
    pub link: i32,
    #[schema(minimum = 1)]
    pub seq: i64,
}

/// A whole conversation: each original message once, and its copies by compression.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = ConversationDocument)]
pub struct Document {
    pub format: Option<DocumentFormat>,
    #[schema(minimum = 1, maximum = 1)]
    pub version: Option<u32>,
    #[serde(default, deserialize_with = "timestamp::optional")]
    pub exported_at: Option<DateTime<Utc>>,
    #[schema(max_length = 256)]
    pub conversation_id: Option<String>,
    /// Characters that change the reading direction are removed.
    #[serde(default, deserialize_with = "without_misleading")]
    #[schema(
        value_type = Option<String>, min_length = 1, max_length = 100,
        pattern = r"^(?=.*\S)[^\u0000-\u001f\u007f-\u009f\u2028\u2029]+$"
    )]
    pub title: Option<DisplayName>,
    pub agent: Option<ResourceName>,
    #[serde(default, deserialize_with = "timestamp::optional")]
    pub created_at: Option<DateTime<Utc>>,
    /// The chain, oldest link first.
    #[schema(min_items = 1)]
    pub links: Vec<DocumentLink>,
    /// Proves that this service exported exactly this document, for this tenant.
    pub signature: Option<DocumentSignature>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, utoipa::ToSchema)]
pub enum DocumentFormat {
    #[serde(rename = "throughline.conversation")]
    Conversation,
}

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DocumentLink {
    #[schema(max_length = 256)]
    pub id: Option<String>,
    /// Its index in the list.
    #[schema(minimum = 0)]
    pub depth: Option<i32>,
    #[serde(default, deserialize_with = "timestamp::optional")]
    pub created_at: Option<DateTime<Utc>>,
    /// The result of the compression that created it; null for the first link only.
    pub compression: Option<DocumentCompression>,
    pub messages: Vec<DocumentMessage>,
}

#[derive(Debug, Clone, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DocumentCompression {
    #[schema(minimum = 0)]
    pub summarised: i64,
    #[schema(minimum = 0)]
    pub kept: i64,
    #[schema(minimum = 0)]
    pub tokens_before: i64,
    #[schema(minimum = 0)]
    pub tokens_after: i64,
    #[schema(max_length = 256)]
    pub model: Option<String>,
    #[schema(minimum = 0)]
    pub duration_ms: i64,
}

impl From<DocumentCompression> for CompressionRecord {
    fn from(compression: DocumentCompression) -> Self {
        Self {
            summarised: compression.summarised,
            kept: compression.kept,
            tokens_before: compression.tokens_before,
            tokens_after: compression.tokens_after,
            model: compression.model,
            duration_ms: compression.duration_ms,
        }
    }
}

/// An original message, or a copy, which has only `seq` and `copied_from`.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DocumentMessage {
    /// From 1, without gaps in its link.
    #[schema(minimum = 1)]
    pub seq: i64,
    pub role: Option<Role>,
    pub kind: Option<MessageKind>,
    pub content: Option<Content>,
    #[schema(min_items = 1, max_items = 128)]
    pub tool_calls: Option<Vec<ToolCall>>,
    #[schema(min_length = 1, max_length = 256)]
    pub tool_call_id: Option<String>,
    /// The author's name.
    #[schema(min_length = 1, max_length = 256)]
    pub name: Option<String>,
    /// The model's reasoning before the answer.
    #[schema(max_length = 1_048_576)]
    pub reasoning_content: Option<String>,
    pub identity: Option<IdentityName>,
    pub platform: Option<PlatformScope>,
    #[schema(maximum = 10_000_000)]
    pub token_count: Option<u32>,
    #[serde(default, deserialize_with = "timestamp::optional")]
    pub created_at: Option<DateTime<Utc>>,
    /// The original of a copy, in an earlier link.
    pub copied_from: Option<MessagePosition>,
}

/// The signed members of an original message. Its texts are canonical JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Original {
    pub seq: i64,
    pub role: Role,
    pub kind: MessageKind,
    pub content: Option<String>,
    pub tool_calls: Option<String>,
    pub tool_call_id: Option<String>,
    pub token_count: i32,
    /// Omitted if empty, so that documents from before this member keep their signature.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub extra: Option<String>,
}

/// JSON with its members sorted and without white space.
pub fn canonical(value: &impl Serialize) -> Result<String> {
    let value = serde_json::to_value(value).map_err(Error::internal)?;
    serde_json::to_string(&value).map_err(Error::internal)
}

/// Hashes the parts of a document in order. The digest is signed.
pub struct DocumentHasher(Hasher);

impl DocumentHasher {
    pub fn new(title: Option<&str>, agent: Option<&str>) -> Result<Self> {
        let mut hasher = Self(Hasher::new());
        hasher.part(&(FORMAT, VERSION, title, agent))?;
        Ok(hasher)
    }

    pub fn link(&mut self, depth: i32, compression: Option<&CompressionRecord>) -> Result<()> {
        self.part(&("link", depth, compression))
    }

    pub fn original(&mut self, message: &Original) -> Result<()> {
        self.part(&("message", message))
    }

    pub fn copy(&mut self, seq: i64, from: MessagePosition) -> Result<()> {
        self.part(&("copy", seq, from))
    }

    /// One line for each part: the JSON has no line ends, so no part can be read as two others.
    fn part(&mut self, part: &impl Serialize) -> Result<()> {
        let line = serde_json::to_vec(part).map_err(Error::internal)?;
        self.0.update(&line);
        self.0.update(b"\n");
        Ok(())
    }

    pub fn finish(self) -> [u8; 32] {
        self.0.finish()
    }
}

/// The signature of a document, as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DocumentSignature(String);

const SIGNATURE_CHARS: usize = 22;

wire_text!(
    DocumentSignature,
    "^[A-Za-z0-9_-]{22}$",
    SIGNATURE_CHARS,
    SIGNATURE_CHARS
);

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a signature is {SIGNATURE_CHARS} of A-Z, a-z, 0-9, - and _")]
pub struct InvalidSignature;

impl FromStr for DocumentSignature {
    type Err = InvalidSignature;

    fn from_str(text: &str) -> Result<Self, InvalidSignature> {
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        if text.len() == SIGNATURE_CHARS && text.bytes().all(is_allowed) {
            Ok(Self(text.to_owned()))
        } else {
            Err(InvalidSignature)
        }
    }
}

impl DocumentSignature {
    pub fn make(keyring: &Keyring, tenant_id: TenantId, digest: &[u8; 32]) -> Self {
        Self(URL_SAFE_NO_PAD.encode(keyring.sign(&context(tenant_id), digest)))
    }

    /// Whether this service signed this digest for this tenant.
    pub fn is_valid(&self, keyring: &Keyring, tenant_id: TenantId, digest: &[u8; 32]) -> bool {
        let signature = URL_SAFE_NO_PAD.decode(&self.0).unwrap_or_default();
        keyring.verify(&context(tenant_id), digest, &signature)
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

fn context(tenant_id: TenantId) -> String {
    format!("export/{tenant_id}")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_signature_is_valid_for_one_tenant_and_one_document() {
        let keyring =
            Keyring::new(&["a secret of more than thirty-two characters".into()]).unwrap();
        let ours = TenantId::generate();
        let theirs = TenantId::generate();
        let signature = DocumentSignature::make(&keyring, ours, &[1; 32]);
        let read: DocumentSignature = signature.as_str().parse().unwrap();
        assert!(read.is_valid(&keyring, ours, &[1; 32]));
        assert!(!read.is_valid(&keyring, ours, &[2; 32]));
        assert!(!read.is_valid(&keyring, theirs, &[1; 32]));
        for wrong in [
            "",
            "AAAA",
            "AAAAAAAAAAAAAAAAAAAAA!",
            "AAAAAAAAAAAAAAAAAAAAAAA",
        ] {
            assert_eq!(
                wrong.parse::<DocumentSignature>(),
                Err(InvalidSignature),
                "{wrong}"
            );
        }
        let odd: DocumentSignature = "_____________________w".parse().unwrap();
        assert!(!odd.is_valid(&keyring, ours, &[1; 32]));
    }

    #[test]
    fn equal_values_have_one_canonical_form() {
        let one: serde_json::Value = serde_json::from_str(r#"{"b": 1, "a": [1.5, "x"]}"#).unwrap();
        assert_eq!(canonical(&one).unwrap(), r#"{"a":[1.5,"x"],"b":1}"#);
        assert_eq!(canonical(&json!("é\n")).unwrap(), "\"é\\n\"");
    }

    #[test]
    fn every_part_and_its_position_change_the_digest() {
        let message = Original {
            seq: 1,
            role: Role::Assistant,
            kind: MessageKind::Normal,
            content: Some("\"hi\"".to_owned()),
            tool_calls: None,
            tool_call_id: None,
            token_count: 5,
            extra: None,
        };
        let record = CompressionRecord {
            summarised: 1,
            kept: 0,
            tokens_before: 1,
            tokens_after: 1,
            model: None,
            duration_ms: 0,
        };
        let hash = |title: Option<&str>, record: Option<&CompressionRecord>, message: &Original| {
            let mut hasher = DocumentHasher::new(title, Some("main")).unwrap();
            hasher.link(0, record).unwrap();
            hasher.original(message).unwrap();
            hasher.finish()
        };
        let base = hash(None, None, &message);
        assert_eq!(base, hash(None, None, &message.clone()));
        assert_ne!(base, hash(Some("t"), None, &message));
        assert_ne!(base, hash(None, Some(&record), &message));
        let changed: [fn(&mut Original); 8] = [
            |m| m.seq = 2,
            |m| m.role = Role::User,
            |m| m.kind = MessageKind::Notice,
            |m| m.content = Some("\"ho\"".to_owned()),
            |m| m.tool_calls = Some("[]".to_owned()),
            |m| m.tool_call_id = Some("c".to_owned()),
            |m| m.token_count = 6,
            |m| m.extra = Some("{}".to_owned()),
        ];
        for (index, change) in changed.into_iter().enumerate() {
            let mut other = message.clone();
            change(&mut other);
            assert_ne!(base, hash(None, None, &other), "{index}");
        }
    }
}
