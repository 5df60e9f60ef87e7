//! Who calls, and for whom. A `Caller` is the key that opens a `TenantTx`: no other room opens one.
//! This room verifies credentials; `http::auth` says which endpoint wants which caller.

use secrecy::{ExposeSecret, SecretString};

use crate::crypto;
use crate::domain::people::platform::PlatformScope;
use crate::domain::people::user::Identity;
use crate::domain::tenant::TenantTerms;
use crate::domain::tenant::api_key::Scope;
use crate::domain::tenant::limits::Limits;
use crate::domain::tenant::origin::Origin;
use crate::error::{Error, Result};
use crate::ids::{ApiKeyId, TenantId, UserId};
use crate::store::db::jobs::DueJob;
use crate::store::{Db, TenantTx, Urgency};

mod api_keys;
mod first_contact;
mod key_sets;
mod tenant_caller;
mod tokens;

pub use api_keys::KeyVerifier;
pub use first_contact::FirstContact;
pub use tenant_caller::TenantCaller;
pub use tokens::{TokenVerifier, VerifiedToken, secret_context};

/// Who a credential was verified to be.
#[derive(Debug, Clone)]
pub enum Caller {
    Operator(OperatorCaller),
    Key(KeyCaller),
    User(UserCaller),
}

/// Who runs the deployment. Reads no tenant's content.
#[derive(Debug, Clone)]
pub struct OperatorCaller {
    fingerprint: String,
}

/// An API key of a tenant.
#[derive(Debug, Clone)]
pub struct KeyCaller {
    tenant_id: TenantId,
    key_id: ApiKeyId,
    scopes: Vec<Scope>,
    platforms: Vec<PlatformScope>,
    terms: TenantTerms,
}

/// A user, proven by a token of a registered issuer. Acts for itself alone.
#[derive(Debug, Clone)]
pub struct UserCaller {
    tenant_id: TenantId,
    user_id: UserId,
    identity: Identity,
    /// The name of the issuer that signed the token.
    issuer: Option<String>,
    terms: TenantTerms,
}

/// The service itself, doing a tenant's background work.
#[derive(Debug, Clone)]
pub struct ServiceCaller {
    tenant_id: TenantId,
    urgency: Urgency,
}

impl Caller {
    /// The tenant whose rows this caller can reach; operators have none.
    pub fn tenant_id(&self) -> Option<TenantId> {
        match self {
            Self::Operator(_) => None,
            Self::Key(key) => Some(key.tenant_id),
            Self::User(user) => Some(user.tenant_id),
        }
    }
}

impl KeyCaller {
    pub fn tenant_id(&self) -> TenantId {
        self.tenant_id
    }

    pub fn scopes(&self) -> &[Scope] {
        &self.scopes
    }

    pub fn has_scope(&self, scope: Scope) -> bool {
        self.scopes.contains(&scope)
    }

    /// The platforms a bridge key vouches for.
    pub fn platforms(&self) -> &[PlatformScope] {
        &self.platforms
    }

    pub fn key_id(&self) -> ApiKeyId {
        self.key_id
    }

    /// What its tenant may use, as of less than a second ago.
    pub fn limits(&self) -> &Limits {
        &self.terms.limits
    }

    /// Names this credential in what is stored about it.
    pub fn principal(&self) -> String {
        self.key_id.to_string()
    }

    pub async fn begin(&self, db: &Db) -> Result<TenantTx> {
        db.begin_tenant(self.tenant_id, Urgency::Request).await
    }
}

impl UserCaller {
    pub fn tenant_id(&self) -> TenantId {
        self.tenant_id
    }

    /// What its tenant may use, as of less than a second ago.
    pub fn limits(&self) -> &Limits {
        &self.terms.limits
    }

    pub fn user_id(&self) -> UserId {
        self.user_id
    }

    /// The account that the token proves.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The name under which the tenant registered who signed the token.
    pub fn issuer(&self) -> Option<&str> {
        self.issuer.as_deref()
    }

    pub fn principal(&self) -> String {
        self.identity.id.to_string()
    }

    pub async fn begin(&self, db: &Db) -> Result<TenantTx> {
        db.begin_tenant(self.tenant_id, Urgency::Request).await
    }
}

impl OperatorCaller {
    /// Who holds the machine and its configuration, for commands run on it.
    pub fn local() -> Self {
        Self {
            fingerprint: "local".to_owned(),
        }
    }

    pub fn principal(&self) -> String {
        format!("operator:{}", self.fingerprint)
    }

    /// A transaction of the operator's own plane.
    pub async fn begin(&self, db: &Db) -> Result<TenantTx> {
        db.begin_tenant(TenantId::OPERATOR, Urgency::Request).await
    }
}

impl ServiceCaller {
    /// A job that finds no connection is done later.
    pub fn for_job(job: &DueJob) -> Self {
        Self {
            tenant_id: job.tenant_id,
            urgency: Urgency::Request,
        }
    }

    /// For the turns and streams that this node has accepted of `tenant_id`, and what it counted. It opens any
    /// tenant: `tests/it/house/architecture.rs` names the only files that may call it.
    pub(crate) fn for_tenant(tenant_id: TenantId) -> Self {
        Self {
            tenant_id,
            urgency: Urgency::Turn,
        }
    }

    pub fn tenant_id(&self) -> TenantId {
        self.tenant_id
    }

    pub async fn begin(&self, db: &Db) -> Result<TenantTx> {
        db.begin_tenant(self.tenant_id, self.urgency).await
    }
}

/// The keys of `OPERATOR_KEY`, kept as hashes.
pub struct OperatorKeys {
    digests: Vec<[u8; 32]>,
}

impl OperatorKeys {
    pub fn new(keys: &[SecretString]) -> Self {
        let digest = |key: &SecretString| crypto::sha256(key.expose_secret().as_bytes());
        Self {
            digests: keys.iter().map(digest).collect(),
        }
    }

    pub fn verify(&self, presented: &str) -> Option<OperatorCaller> {
        let digest = crypto::sha256(presented.as_bytes());
        self.digests
            .iter()
            .any(|known| crypto::constant_time_eq(known, &digest))
            .then(|| OperatorCaller {
                fingerprint: hex::encode(&digest[..6]),
            })
    }
}

/// Verifies credentials, and makes the users of identities that are new.
pub struct Verifiers {
    pub operators: OperatorKeys,
    pub keys: KeyVerifier,
    pub tokens: TokenVerifier,
    pub first_contact: FirstContact,
}

/// What a request says about who sends it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct PresentedCredential {
    pub authorization: Option<Vec<u8>>,
    /// `X-Throughline-Tenant`: which tenant a user token is for.
    pub tenant: Option<String>,
}

impl PresentedCredential {
    /// What stands behind `Bearer`.
    fn bearer(&self) -> Result<&str> {
        let header = self.authorization.as_deref().ok_or_else(|| {
            Error::unauthorized("send a credential in the header Authorization: Bearer …")
        })?;
        std::str::from_utf8(header)
            .ok()
            .and_then(|text| text.split_once(' '))
            .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
            .map(|(_, token)| token.trim())
            .ok_or_else(|| {
                Error::unauthorized("the Authorization header must be Bearer and a token")
            })
    }
}

/// A good credential. The user of a token may still have to be found, or made.
pub enum Verified {
    Caller(Caller),
    Token(VerifiedToken),
}

impl Verified {
    /// Whether the tenant lets pages at `origin` call. The operator has no such list.
    pub fn allows_origin(&self, origin: &Origin) -> bool {
        let terms = match self {
            Self::Caller(Caller::Operator(_)) => return false,
            Self::Caller(Caller::Key(key)) => &key.terms,
            Self::Caller(Caller::User(user)) => &user.terms,
            Self::Token(token) => &token.terms,
        };
        let origin = origin.as_str();
        terms
            .allowed_origins
            .iter()
            .any(|allowed| allowed == origin)
    }

    /// Who calls. First contact of a token's identity makes its user.
    pub async fn contact(self, verifiers: &Verifiers) -> Result<Caller> {
        match self {
            Self::Caller(caller) => Ok(caller),
            Self::Token(token) => verifiers.tokens.contact(token).await.map(Caller::User),
        }
    }
}

/// Verifies a credential, or refuses it. It has no effect.
pub async fn verify(verifiers: &Verifiers, presented: &PresentedCredential) -> Result<Verified> {
    let token = presented.bearer()?;
    if let Some(operator) = verifiers.operators.verify(token) {
        return Ok(Verified::Caller(Caller::Operator(operator)));
    }
    if tokens::looks_like_token(token) {
        let tenant = presented.tenant.as_deref();
        return verifiers
            .tokens
            .check(token, tenant)
            .await
            .map(Verified::Token);
    }
    let key = verifiers.keys.verify(token).await?;
    Ok(Verified::Caller(Caller::Key(key)))
}

/// Checks credentials again that were accepted when something long began: keys with one statement for all of
/// them. Whose identity a token proves is not looked up, and nobody is made.
pub async fn recheck(verifiers: &Verifiers, presented: &[&PresentedCredential]) -> Vec<Result<()>> {
    let mut checked: Vec<Result<()>> = Vec::with_capacity(presented.len());
    let mut places = Vec::new();
    let mut keys = Vec::new();
    for (place, presented) in presented.iter().enumerate() {
        let outcome = match presented.bearer() {
            Err(error) => Err(error),
            Ok(text) if verifiers.operators.verify(text).is_some() => Ok(()),
            Ok(text) if tokens::looks_like_token(text) => {
                let tenant = presented.tenant.as_deref();
                verifiers.tokens.check(text, tenant).await.map(drop)
            }
            Ok(text) => {
                places.push(place);
                keys.push(text);
                Ok(())
            }
        };
        checked.push(outcome);
    }
    let found = verifiers.keys.recheck(&keys).await;
    for (place, found) in places.into_iter().zip(found) {
        checked[place] = found;
    }
    checked
}
