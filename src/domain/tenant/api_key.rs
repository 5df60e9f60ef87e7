//! API keys: their text, their scopes and their record. The text is
//! `tl_<tenant><key id>_<secret><checksum>`, all base62. The ids make the look-up one primary-key
//! read; the checksum lets scanners and clients detect a mistyped key without a request.

use chrono::{DateTime, Utc};
use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::crypto::{base62, parse_base62, sha256};
use crate::domain::people::display_name::DisplayName;
use crate::domain::people::platform::PlatformScope;
use crate::ids::{ApiKeyId, TenantId};

const ID_DIGITS: usize = 22;
const SECRET_BYTES: usize = 24;
const SECRET_DIGITS: usize = 33;
const CHECK_DIGITS: usize = 6;

/// A permission of a key. A key has one or more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// Everything of the tenant.
    Admin,
    /// Vouches for users of its platforms, one user per call.
    Bridge,
    /// The OpenAI-compatible endpoints, in the tenant's service namespace.
    Chat,
    /// Reads everything but delivery texts and secrets.
    Read,
}

impl Scope {
    pub const ALL: [Self; 4] = [Self::Admin, Self::Bridge, Self::Chat, Self::Read];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Admin => "admin",
            Self::Bridge => "bridge",
            Self::Chat => "chat",
            Self::Read => "read",
        }
    }

    pub fn from_column(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|scope| scope.as_str() == text)
    }
}

/// A key's record, without its text.
#[derive(Debug, Clone)]
pub struct ApiKey {
    pub id: ApiKeyId,
    pub name: String,
    pub scopes: Vec<Scope>,
    pub platforms: Vec<PlatformScope>,
    pub created_at: DateTime<Utc>,
    pub expires_at: Option<DateTime<Utc>>,
    pub revoked_at: Option<DateTime<Utc>>,
    pub last_used_at: Option<DateTime<Utc>>,
}

/// The members of a key that its creator sets.
#[derive(Debug, Clone)]
pub struct NewApiKey {
    pub name: DisplayName,
    pub scopes: Vec<Scope>,
    pub platforms: Vec<PlatformScope>,
    pub expires_at: Option<DateTime<Utc>>,
}

/// A key text from a client: parsed, but not yet verified.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PresentedKey {
    pub tenant_id: TenantId,
    pub id: ApiKeyId,
    pub digest: [u8; 32],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not the text of an API key, or mistyped")]
pub struct MalformedKey;

impl PresentedKey {
    pub fn parse(text: &str) -> Result<Self, MalformedKey> {
        let rest = text.strip_prefix("tl_").ok_or(MalformedKey)?;
        let (ids, secret) = rest.split_once('_').ok_or(MalformedKey)?;
        let right_length =
            ids.len() == 2 * ID_DIGITS && secret.len() == SECRET_DIGITS + CHECK_DIGITS;
        if !right_length || !rest.is_ascii() {
            return Err(MalformedKey);
        }
        let (body, check) = text.split_at(text.len() - CHECK_DIGITS);
        if check != checksum(body) {
            return Err(MalformedKey);
        }
        let (tenant, key) = ids.split_at(ID_DIGITS);
        let uuid = |digits| {
            parse_base62(digits)
                .map(Uuid::from_u128)
                .ok_or(MalformedKey)
        };
        Ok(Self {
            tenant_id: TenantId::from_uuid(uuid(tenant)?),
            id: ApiKeyId::from_uuid(uuid(key)?),
            digest: sha256(text.as_bytes()),
        })
    }
}

/// The full text of a new key from `secret`, 24 random bytes. The client gets it once; only its digest
/// is stored.
pub fn key_text(tenant_id: TenantId, id: ApiKeyId, secret: [u8; SECRET_BYTES]) -> SecretString {
    let (high, low) = secret.split_at(8);
    let high = high.iter().fold(0u128, |n, b| (n << 8) | u128::from(*b));
    let low = low.iter().fold(0u128, |n, b| (n << 8) | u128::from(*b));
    let body = format!(
        "tl_{}{}_{}{}",
        base62(tenant_id.as_uuid().as_u128(), ID_DIGITS),
        base62(id.as_uuid().as_u128(), ID_DIGITS),
        base62(high, SECRET_DIGITS - ID_DIGITS),
        base62(low, ID_DIGITS),
    );
    let check = checksum(&body);
    SecretString::from(body + &check)
}

pub fn digest(text: &SecretString) -> [u8; 32] {
    sha256(text.expose_secret().as_bytes())
}

fn checksum(body: &str) -> String {
    base62(u128::from(crc32fast::hash(body.as_bytes())), CHECK_DIGITS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text() -> (TenantId, ApiKeyId, String) {
        let tenant = TenantId::generate();
        let id = ApiKeyId::generate();
        let text = key_text(tenant, id, [0xff; 24]);
        (tenant, id, text.expose_secret().to_owned())
    }

    #[test]
    fn a_key_text_carries_its_ids() {
        let (tenant, id, text) = text();
        let parsed = PresentedKey::parse(&text).unwrap();
        assert_eq!((parsed.tenant_id, parsed.id), (tenant, id));
        assert_eq!(parsed.digest, sha256(text.as_bytes()));
    }

    #[test]
    fn every_mistyped_character_fails_the_checksum() {
        let (_, _, text) = text();
        for index in 0..text.len() {
            let mut wrong = text.clone().into_bytes();
            wrong[index] = if wrong[index] == b'x' { b'y' } else { b'x' };
            let wrong = String::from_utf8(wrong).unwrap();
            assert_eq!(PresentedKey::parse(&wrong), Err(MalformedKey), "{index}");
        }
        for wrong in [
            "",
            "tl_",
            "tl__",
            "sk-1234",
            "tl_é_é",
            &text[..text.len() - 1],
        ] {
            assert_eq!(PresentedKey::parse(wrong), Err(MalformedKey), "{wrong}");
        }
    }
}
