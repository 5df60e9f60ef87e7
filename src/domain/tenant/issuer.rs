//! Issuers of user tokens: the signer, its algorithm and its platform. The issuer pins the algorithm,
//! so a token cannot choose it.

use chrono::{DateTime, Utc};
use jsonwebtoken::DecodingKey;
use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, PublicKeyUse};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::domain::values::resource_name::ResourceName;
use crate::error::FieldError;

/// A shorter secret can be guessed from one token.
pub const MIN_SECRET_BYTES: usize = 32;
const MAX_SECRET_CHARS: usize = 4096;
/// 2048 bits, in base64url characters.
const MIN_MODULUS_CHARS: usize = 341;
pub const MAX_KEYS: usize = 100;
/// The limit of `iss` and of an audience.
pub const MAX_ISSUER_CHARS: usize = 512;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub enum TokenAlgorithm {
    HS256,
    RS256,
    ES256,
    EdDSA,
}

impl TokenAlgorithm {
    pub const ALL: [Self; 4] = [Self::HS256, Self::RS256, Self::ES256, Self::EdDSA];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::HS256 => "HS256",
            Self::RS256 => "RS256",
            Self::ES256 => "ES256",
            Self::EdDSA => "EdDSA",
        }
    }

    pub fn from_column(text: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|algorithm| algorithm.as_str() == text)
    }

    pub const fn to_library(self) -> jsonwebtoken::Algorithm {
        match self {
            Self::HS256 => jsonwebtoken::Algorithm::HS256,
            Self::RS256 => jsonwebtoken::Algorithm::RS256,
            Self::ES256 => jsonwebtoken::Algorithm::ES256,
            Self::EdDSA => jsonwebtoken::Algorithm::EdDSA,
        }
    }
}

/// The source of the verifying keys.
#[derive(Debug, Clone, PartialEq)]
pub enum KeySource {
    /// A secret, encrypted for the issuer's row.
    Secret(Vec<u8>),
    Document(Value),
    Url(String),
}

#[derive(Debug, Clone, PartialEq)]
pub struct Issuer {
    pub name: ResourceName,
    pub iss: String,
    pub audience: Option<String>,
    pub platform: String,
    pub algorithm: TokenAlgorithm,
    pub keys: KeySource,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
}

/// A public key that may verify tokens of one algorithm.
#[derive(Clone)]
pub struct VerifyingKey {
    pub kid: Option<String>,
    pub key: DecodingKey,
}

/// The keys of a JWKS document that fit `algorithm`. The rest are ignored.
pub fn verifying_keys(document: &Value, algorithm: TokenAlgorithm) -> Vec<VerifyingKey> {
    let keys = document["keys"].as_array();
    keys.into_iter()
        .flatten()
        .take(MAX_KEYS)
        .filter_map(|key| serde_json::from_value::<Jwk>(key.clone()).ok())
        .filter(|key| fits(key, algorithm))
        .filter_map(|key| {
            Some(VerifyingKey {
                key: DecodingKey::from_jwk(&key).ok()?,
                kid: key.common.key_id,
            })
        })
        .collect()
}

fn fits(key: &Jwk, algorithm: TokenAlgorithm) -> bool {
    let is_of_kind = match (&key.algorithm, algorithm) {
        (AlgorithmParameters::RSA(rsa), TokenAlgorithm::RS256) => rsa.n.len() >= MIN_MODULUS_CHARS,
        (AlgorithmParameters::EllipticCurve(ec), TokenAlgorithm::ES256) => {
            ec.curve == EllipticCurve::P256
        }
        (AlgorithmParameters::OctetKeyPair(okp), TokenAlgorithm::EdDSA) => {
            okp.curve == EllipticCurve::Ed25519
        }
        _ => false,
    };
    let is_for_signatures = matches!(
        key.common.public_key_use,
        None | Some(PublicKeyUse::Signature)
    );
    let is_for_algorithm = key
        .common
        .key_algorithm
        .is_none_or(|named| named.to_string().eq_ignore_ascii_case(algorithm.as_str()));
    is_of_kind && is_for_signatures && is_for_algorithm
}

/// The key source in a request: exactly one, and of the kind that the algorithm needs.
pub struct KeyChoice<'a> {
    pub algorithm: TokenAlgorithm,
    pub secret: Option<&'a str>,
    pub jwks: Option<&'a Value>,
    pub jwks_url: Option<&'a str>,
}

impl KeyChoice<'_> {
    pub fn check(&self) -> Vec<FieldError> {
        let mut errors = Vec::new();
        let count = usize::from(self.secret.is_some())
            + usize::from(self.jwks.is_some())
            + usize::from(self.jwks_url.is_some());
        if count != 1 {
            let detail = "give exactly one of secret, jwks and jwks_url";
            errors.push(FieldError::new("", detail));
        } else if (self.algorithm == TokenAlgorithm::HS256) != self.secret.is_some() {
            let detail = "HS256 needs a secret, the others jwks or jwks_url";
            errors.push(FieldError::new("/algorithm", detail));
        }
        if self
            .secret
            .is_some_and(|secret| secret.len() < MIN_SECRET_BYTES)
        {
            let detail = format!("must have {MIN_SECRET_BYTES} bytes or more");
            errors.push(FieldError::new("/secret", detail));
        }
        if self
            .secret
            .is_some_and(|secret| secret.chars().count() > MAX_SECRET_CHARS)
        {
            let detail = format!("must have {MAX_SECRET_CHARS} characters or fewer");
            errors.push(FieldError::new("/secret", detail));
        }
        if let Some(document) = self.jwks {
            errors.extend(check_document(document, self.algorithm));
        }
        errors
    }
}

/// Private members of a JSON Web Key (RFC 7518, 6.2.2, 6.3.2 and 6.4.1).
const PRIVATE_MEMBERS: [&str; 8] = ["d", "p", "q", "dp", "dq", "qi", "oth", "k"];

/// The pointer to the first private member of a document.
fn find_private_member(document: &Value) -> Option<String> {
    let keys = document["keys"].as_array()?;
    keys.iter().enumerate().find_map(|(index, key)| {
        let member = PRIVATE_MEMBERS
            .iter()
            .find(|member| key.get(**member).is_some())?;
        Some(format!("/jwks/keys/{index}/{member}"))
    })
}

/// The document without private members. Older versions accepted them.
pub fn without_private_members(mut document: Value) -> Value {
    let keys = document.get_mut("keys").and_then(Value::as_array_mut);
    for key in keys.into_iter().flatten().filter_map(Value::as_object_mut) {
        key.retain(|member, _| !PRIVATE_MEMBERS.contains(&member.as_str()));
    }
    document
}

fn check_document(document: &Value, algorithm: TokenAlgorithm) -> Option<FieldError> {
    let keys = document["keys"].as_array().map_or(0, Vec::len);
    if let Some(pointer) = find_private_member(document) {
        let detail = "is a part of a private key: register the public key, and make a new pair";
        Some(FieldError::new(pointer, detail))
    } else if keys > MAX_KEYS {
        let detail = format!("a key set has at most {MAX_KEYS} keys");
        Some(FieldError::new("/jwks/keys", detail))
    } else if verifying_keys(document, algorithm).is_empty() {
        let detail = format!(
            "must be a JSON Web Key Set with a public key for {} (RSA of 2048 bits or more, P-256, Ed25519)",
            algorithm.as_str()
        );
        Some(FieldError::new("/jwks", detail))
    } else {
        None
    }
}
