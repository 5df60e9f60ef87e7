//! Believing user tokens: JWTs that a tenant's registered issuer signed. Nothing a token says about
//! itself is believed before its signature is; the algorithm is the registration's, never the token's.

use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use chrono::{DateTime, TimeDelta, Utc};
use jsonwebtoken::{DecodingKey, Validation};
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};

use super::UserCaller;
use super::first_contact::FirstContact;
use super::key_sets::{KeySets, matching};
use crate::cache::ShortCache;
use crate::clock::Clock;
use crate::crypto::Keyring;
use crate::domain::people::identity::IdentityName;
use crate::domain::people::platform::PlatformScope;
use crate::domain::people::user::{Identity, NewIdentity};
use crate::domain::tenant::TenantTerms;
use crate::domain::tenant::issuer::{
    Issuer, KeySource, MAX_ISSUER_CHARS, TokenAlgorithm, verifying_keys,
};
use crate::error::{Code, Error, Result};
use crate::ids::TenantId;
use crate::store::Db;
use crate::store::tenant::issuers::{self, IssuerMatch};
use crate::upstream::GuardedClient;

const MAX_TOKEN_BYTES: usize = 8 * 1024;
/// Clocks of issuers differ a little.
const LEEWAY: TimeDelta = TimeDelta::seconds(30);
const LONGEST_LIFE: TimeDelta = TimeDelta::hours(24);
/// Of those with one `iss` and other audiences than a token's, how many may have signed it.
const TRIED_ISSUERS: usize = 4;

#[derive(Deserialize)]
struct Header {
    alg: String,
    kid: Option<String>,
    /// Extensions that must be understood; we understand none.
    crit: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct Claims {
    iss: String,
    sub: String,
    exp: f64,
    nbf: Option<f64>,
    iat: Option<f64>,
    #[serde(default)]
    aud: Audiences,
}

#[derive(Deserialize, Default)]
#[serde(untagged)]
enum Audiences {
    #[default]
    None,
    One(String),
    Many(Vec<String>),
}

impl Audiences {
    fn as_slice(&self) -> &[String] {
        match self {
            Self::None => &[],
            Self::One(one) => std::slice::from_ref(one),
            Self::Many(many) => many,
        }
    }

    fn contains(&self, wanted: &str) -> bool {
        self.as_slice().iter().any(|audience| audience == wanted)
    }
}

pub struct TokenVerifier {
    db: Db,
    clock: Clock,
    keyring: Arc<Keyring>,
    key_sets: KeySets,
    first_contact: FirstContact,
    /// As for API keys: a deleted issuer stops everywhere within a second.
    issuers: ShortCache<(TenantId, String), Arc<IssuerMatch>>,
}

/// True for what can only be a JWT: API keys and operator keys have no two dots.
pub fn looks_like_token(text: &str) -> bool {
    text.bytes().filter(|byte| *byte == b'.').count() == 2
}

/// Seals an issuer's secret for its row.
pub fn secret_context(tenant_id: TenantId, issuer: &str) -> String {
    format!("issuers/{tenant_id}/{issuer}/secret")
}

impl TokenVerifier {
    pub fn new(
        db: Db,
        clock: Clock,
        keyring: Arc<Keyring>,
        client: GuardedClient,
        first_contact: FirstContact,
    ) -> Self {
        let issuers = ShortCache::new(clock.clone());
        Self {
            key_sets: KeySets::new(client, clock.clone()),
            db,
            clock,
            keyring,
            first_contact,
            issuers,
        }
    }

    /// The user a token stands for; first contact makes one.
    pub async fn contact(&self, token: VerifiedToken) -> Result<UserCaller> {
        let VerifiedToken {
            tenant_id,
            account,
            terms,
        } = token;
        // The present owner, read for every request.
        let known = self
            .first_contact
            .contact(tenant_id, &account, &terms.limits)
            .await?;
        Ok(UserCaller {
            tenant_id,
            user_id: known.user_id,
            identity: Identity {
                id: known.id,
                name: account.name,
            },
            issuer: account.issuer,
            terms,
        })
    }

    /// The account that a token proves, and its tenant. `tenant_header` is `X-Throughline-Tenant`.
    pub async fn check(&self, token: &str, tenant_header: Option<&str>) -> Result<VerifiedToken> {
        if token.len() > MAX_TOKEN_BYTES {
            return Err(invalid("the token is too long"));
        }
        let mut parts = token.split('.');
        let header: Header = decode_part(parts.next())?;
        let claims: Claims = decode_part(parts.next())?;
        if header.crit.is_some() {
            return Err(invalid("the token has a critical extension"));
        }
        let tenant_id = tenant_of(&claims, tenant_header)?;
        let found = self.find_issuers(tenant_id, &claims.iss).await?;
        let presented = PresentedToken {
            text: token,
            tenant_id,
            header: &header,
        };
        let issuer = self
            .find_signer(&presented, &found.issuers, &claims)
            .await
            .map_err(|error| log_refusal(tenant_id, error))?;
        check_times(&claims, self.clock.now())?;
        let platform: PlatformScope = issuer.platform.parse().map_err(Error::internal)?;
        let name = name_of(platform, claims.sub)?;
        let terms = found
            .terms
            .clone()
            .ok_or_else(|| invalid("the issuer has no tenant"))?;
        terms.check_state()?;
        let account = NewIdentity {
            name,
            issuer: Some(issuer.name.as_str().to_owned()),
        };
        Ok(VerifiedToken {
            tenant_id,
            account,
            terms,
        })
    }

    /// The registered issuer that signed a token. Until a signature is good, every refusal is the same: what a tenant
    /// has registered is not for everybody. Who has signed a token for somebody else is told so.
    async fn find_signer<'a>(
        &self,
        token: &PresentedToken<'_>,
        issuers: &'a [Issuer],
        claims: &Claims,
    ) -> Result<&'a Issuer> {
        if issuers.is_empty() {
            return Err(token.refused("the issuer is not registered"));
        }
        if let Some(issuer) = choose(issuers, token.tenant_id, claims) {
            self.check_signature(token, issuer).await?;
            return Ok(issuer);
        }
        for issuer in issuers.iter().take(TRIED_ISSUERS) {
            match self.check_signature(token, issuer).await {
                Ok(()) => {
                    let detail = "the token's aud is not the registered audience";
                    return Err(Error::new(Code::WrongAudience, detail));
                }
                Err(error) if error.code == Code::InvalidToken => {}
                Err(error) => return Err(error),
            }
        }
        Err(token.refused("the audience is not the registered one"))
    }

    async fn find_issuers(&self, tenant_id: TenantId, iss: &str) -> Result<Arc<IssuerMatch>> {
        // Postgres could not even be asked for U+0000.
        if iss.chars().count() > MAX_ISSUER_CHARS || iss.contains('\0') {
            return Ok(Arc::new(IssuerMatch {
                issuers: Vec::new(),
                terms: None,
            }));
        }
        self.issuers
            .get_with((tenant_id, iss.to_owned()), || async {
                let found = issuers::find_presented(&self.db, tenant_id, iss).await?;
                Ok(Arc::new(found))
            })
            .await
    }

    async fn check_signature(&self, token: &PresentedToken<'_>, issuer: &Issuer) -> Result<()> {
        if token.header.alg != issuer.algorithm.as_str() {
            return Err(token.refused("the algorithm is not the registered one"));
        }
        let tenant_id = token.tenant_id;
        let kid = token.header.kid.as_deref();
        let keys = match &issuer.keys {
            KeySource::Secret(sealed) => {
                let context = secret_context(tenant_id, issuer.name.as_str());
                let secret = self
                    .keyring
                    .open(&context, sealed)
                    .map_err(Error::internal)?;
                return check_with(token, issuer.algorithm, &DecodingKey::from_secret(&secret));
            }
            KeySource::Document(document) => {
                matching(verifying_keys(document, issuer.algorithm), kid)
            }
            KeySource::Url(url) => {
                self.key_sets
                    .find(tenant_id, url, issuer.algorithm, kid)
                    .await?
            }
        };
        let unknown = || token.refused("the issuer has published no key with the token's kid");
        let key = keys.first().ok_or_else(unknown)?;
        check_with(token, issuer.algorithm, &key.key)
    }
}

/// What a good token proves.
pub struct VerifiedToken {
    tenant_id: TenantId,
    account: NewIdentity,
    pub terms: TenantTerms,
}

/// A token whose signature is still to be checked.
struct PresentedToken<'a> {
    text: &'a str,
    tenant_id: TenantId,
    header: &'a Header,
}

impl PresentedToken<'_> {
    /// The one answer to all tokens without a good signature. `reason` is for the log.
    fn refused(&self, reason: &'static str) -> Error {
        Error {
            cause: Some(anyhow::anyhow!(reason)),
            ..invalid("no issuer registered by the tenant signed the token")
        }
    }
}

/// Says why in the log, once for each token, and never to who sent it.
fn log_refusal(tenant_id: TenantId, mut error: Error) -> Error {
    if error.code == Code::InvalidToken
        && let Some(reason) = error.cause.take()
    {
        tracing::info!(tenant = %tenant_id, %reason, "user token rejected");
    }
    error
}

fn invalid(detail: &str) -> Error {
    Error::new(Code::InvalidToken, detail)
}

fn decode_part<T: DeserializeOwned>(part: Option<&str>) -> Result<T> {
    part.and_then(|part| URL_SAFE_NO_PAD.decode(part).ok())
        .and_then(|bytes| serde_json::from_slice(&bytes).ok())
        .ok_or_else(|| invalid("the token is not a JWT with iss, sub and exp"))
}

/// The tenant whose id is in `aud`, or the one the header names; never two.
fn tenant_of(claims: &Claims, header: Option<&str>) -> Result<TenantId> {
    let ambiguous = |detail: &str| Error::new(Code::TenantAmbiguous, detail);
    let named = match header {
        Some(text) => Some(
            text.parse::<TenantId>()
                .map_err(|_| ambiguous("X-Throughline-Tenant is not a tenant's id"))?,
        ),
        None => None,
    };
    let audiences = claims.aud.as_slice().iter();
    let mut tenants: Vec<TenantId> = audiences
        .filter_map(|audience| audience.parse().ok())
        .chain(named)
        .collect();
    tenants.sort_unstable();
    tenants.dedup();
    match tenants[..] {
        [one] => Ok(one),
        [] => Err(ambiguous(
            "put the tenant's id into aud, or into the header X-Throughline-Tenant",
        )),
        _ => Err(ambiguous(
            "the token and the header name more than one tenant",
        )),
    }
}

/// The registration the token is for. One with an audience wants that audience; one without wants the
/// tenant's id, unless the token has no audience at all: a token for someone else is never taken.
fn choose<'a>(issuers: &'a [Issuer], tenant_id: TenantId, claims: &Claims) -> Option<&'a Issuer> {
    let meant = |issuer: &&Issuer| match &issuer.audience {
        Some(audience) => claims.aud.contains(audience),
        None => claims.aud.as_slice().is_empty() || claims.aud.contains(&tenant_id.to_string()),
    };
    issuers.iter().find(meant)
}

/// Only the signature: times are checked by our own clock, names above.
fn check_with(
    token: &PresentedToken<'_>,
    algorithm: TokenAlgorithm,
    key: &DecodingKey,
) -> Result<()> {
    let mut validation = Validation::new(algorithm.to_library());
    validation.required_spec_claims.clear();
    validation.validate_exp = false;
    validation.validate_nbf = false;
    validation.validate_aud = false;
    jsonwebtoken::decode::<IgnoredAny>(token.text, key, &validation)
        .map(|_| ())
        .map_err(|_| token.refused("the signature is not right"))
}

fn check_times(claims: &Claims, now: DateTime<Utc>) -> Result<()> {
    let now = now.timestamp() as f64;
    let leeway = LEEWAY.num_seconds() as f64;
    if claims.exp <= now - leeway {
        return Err(Error::new(Code::TokenExpired, "the token has expired"));
    }
    let starts = claims.nbf.unwrap_or(now).max(claims.iat.unwrap_or(now));
    if starts > now + leeway {
        return Err(Error::new(
            Code::TokenNotYetValid,
            "the token is not valid yet",
        ));
    }
    // From when it was made, where it says so: an old token must not grow young again.
    let begins = claims.iat.unwrap_or(now).min(now);
    if claims.exp > begins + LONGEST_LIFE.num_seconds() as f64 + leeway {
        let detail = "a token may be valid for at most 24 hours";
        return Err(Error::new(Code::TokenLivesTooLong, detail));
    }
    Ok(())
}

fn name_of(platform: PlatformScope, sub: String) -> Result<IdentityName> {
    IdentityName::new(platform, sub)
        .map_err(|_| invalid("sub must be 1 to 256 characters without control characters"))
}
