//! Keys and tokens of test issuers.

use aws_lc_rs::encoding::AsDer;
use aws_lc_rs::rsa::KeySize;
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, RsaKeyPair,
};
use jsonwebtoken::jwk::Jwk;
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use serde_json::{Value, json};

use crate::support::{Reply, Tenant, World};

/// A signing key, and the public half as issuers publish it.
pub struct SigningKey {
    pub algorithm: &'static str,
    kid: String,
    key: EncodingKey,
    jwk: Value,
}

impl SigningKey {
    pub fn generate(algorithm: &'static str, kid: &str) -> Self {
        let (named, key) = match algorithm {
            "RS256" => {
                let pair = RsaKeyPair::generate(KeySize::Rsa2048).unwrap();
                let der: aws_lc_rs::encoding::Pkcs8V1Der = pair.as_der().unwrap();
                // jsonwebtoken wants PKCS#1, which PKCS#8 holds behind a header of 26 bytes.
                (
                    Algorithm::RS256,
                    EncodingKey::from_rsa_der(&der.as_ref()[26..]),
                )
            }
            "ES256" => {
                let pair = EcdsaKeyPair::generate(&ECDSA_P256_SHA256_FIXED_SIGNING).unwrap();
                let der = pair.to_pkcs8v1().unwrap();
                (Algorithm::ES256, EncodingKey::from_ec_der(der.as_ref()))
            }
            "EdDSA" => {
                let pair = Ed25519KeyPair::generate().unwrap();
                let der = pair.to_pkcs8v1().unwrap();
                (Algorithm::EdDSA, EncodingKey::from_ed_der(der.as_ref()))
            }
            other => panic!("no such algorithm: {other}"),
        };
        let mut jwk = serde_json::to_value(Jwk::from_encoding_key(&key, named).unwrap()).unwrap();
        jwk["kid"] = json!(kid);
        Self {
            algorithm,
            kid: kid.to_owned(),
            key,
            jwk,
        }
    }

    pub fn jwks(keys: &[&Self]) -> Value {
        let keys: Vec<&Value> = keys.iter().map(|key| &key.jwk).collect();
        json!({ "keys": keys })
    }

    /// The public key's own member, to forge an HS256 token with.
    pub fn public_part(&self) -> String {
        self.jwk.to_string()
    }

    pub fn sign(&self, claims: &Value) -> String {
        let algorithm = self.algorithm.parse().unwrap();
        let mut header = Header::new(algorithm);
        header.kid = Some(self.kid.clone());
        jsonwebtoken::encode(&header, claims, &self.key).unwrap()
    }
}

pub fn hs256(claims: &Value, secret: &str) -> String {
    let key = EncodingKey::from_secret(secret.as_bytes());
    jsonwebtoken::encode(&Header::new(Algorithm::HS256), claims, &key).unwrap()
}

/// A token that says it needs no signature.
pub fn unsigned(claims: &Value) -> String {
    use base64::Engine;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    let part = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
    format!(
        "{}.{}.",
        part(&json!({"alg": "none", "typ": "JWT"})),
        part(claims)
    )
}

pub const ISS: &str = "https://id.example";

pub fn claims(world: &World, tenant: &Tenant) -> Value {
    let now = world.clock.now().timestamp();
    json!({"iss": ISS, "aud": tenant.id, "sub": "alice", "iat": now, "exp": now + 600})
}

pub async fn me(world: &World, token: &str) -> Reply {
    world.get(token, "/v1/users/me").await
}
