//! For which account a call speaks: the extractor of the endpoints where somebody appears, maybe for the
//! first time. Who may vouch is judged here, before anything is looked up.

use std::future::{Ready, ready};

use actix_web::dev::Payload;
use actix_web::{FromRequest, HttpRequest};

use super::credential::{TenantCredential, read_header};
use super::keys::{not_covered, not_proven};
use crate::app::App;
use crate::auth::KeyCaller;
use crate::domain::bridge::chat::Chat;
use crate::domain::people::access::Namespace;
use crate::domain::people::identity::{IdentityName, UserName};
use crate::domain::people::platform::covers;
use crate::domain::people::user::{Identity, KnownIdentity, NewIdentity};
use crate::domain::tenant::api_key::Scope;
use crate::error::{Code, Error, FieldError, Result};
use crate::ids::TenantId;
use crate::store::people::identities;
use crate::store::{Db, TenantTx};

/// Whoever may vouch for an account: a person for their own, a bridge for those of its platforms, an
/// admin for any.
pub struct IdentityCaller {
    credential: TenantCredential,
    header: Option<IdentityName>,
}

impl FromRequest for IdentityCaller {
    type Error = Error;
    type Future = Ready<Result<Self>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        ready(Self::of(request))
    }
}

impl IdentityCaller {
    fn of(request: &HttpRequest) -> Result<Self> {
        let credential = TenantCredential::of(request, &[Scope::Admin, Scope::Bridge])?;
        let header = match (read_header(request, &credential)?, &credential) {
            (Some(UserName::Identity(named)), _) => Some(named),
            (Some(UserName::Me | UserName::User(_)), TenantCredential::User(user)) => {
                Some(user.identity().name.clone())
            }
            (Some(UserName::Me | UserName::User(_)), TenantCredential::Key(_)) | (None, _) => None,
        };
        Ok(Self { credential, header })
    }

    /// Vouches for the account that the body names, else the header, else the token itself, in `chat`.
    pub fn vouch(self, claim: Claim<'_>) -> Result<VerifiedIdentity> {
        let chat = claim.chat;
        let errors = chat.map_or_else(Vec::new, |chat| chat.check("/chat"));
        if !errors.is_empty() {
            return Err(Error::invalid(errors));
        }
        let named = claim.identity.or(self.header);
        let identity = match (&self.credential, named) {
            (TenantCredential::User(user), named) => {
                if let Some(chat) = chat {
                    self.credential.check_chat(chat)?;
                }
                let own = &user.identity().name;
                if named.is_some_and(|named| named != *own) || claim.display_name.is_some() {
                    return Err(not_proven());
                }
                own.clone()
            }
            (TenantCredential::Key(key), Some(named)) => {
                if !key.has_scope(Scope::Admin) {
                    check_covered(key, &named, chat)?;
                }
                named
            }
            (TenantCredential::Key(key), None) if key.has_scope(Scope::Admin) => {
                let error = FieldError::new("/identity", "name an identity");
                return Err(Error::invalid(vec![error]));
            }
            (TenantCredential::Key(_), None) => {
                let detail = "name an identity in the body or in the header X-Throughline-Identity";
                return Err(Error::new(Code::IdentityRequired, detail));
            }
        };
        Ok(VerifiedIdentity {
            credential: self.credential,
            identity,
        })
    }
}

/// What a call says of who speaks and where. An API key is trusted with it, within its platforms. A user token
/// proves one account, in its direct chat, and nothing else of this.
pub struct Claim<'a> {
    pub identity: Option<IdentityName>,
    pub chat: Option<&'a Chat>,
    pub display_name: Option<&'a str>,
}

fn check_covered(key: &KeyCaller, named: &IdentityName, chat: Option<&Chat>) -> Result<()> {
    let in_chat = chat.is_none_or(|chat| covers(key.platforms(), &chat.platform_of(named)));
    if !in_chat || !named.is_covered_by(key.platforms()) {
        return Err(not_covered());
    }
    Ok(())
}

/// A call and the account it speaks for.
pub struct VerifiedIdentity {
    credential: TenantCredential,
    pub identity: IdentityName,
}

impl VerifiedIdentity {
    pub async fn begin(&self, db: &Db) -> Result<TenantTx> {
        self.credential.begin(db).await
    }

    pub fn tenant_id(&self) -> TenantId {
        self.credential.tenant_id()
    }

    /// Whose account it is now; made if nobody's. Call it before a transaction is open: it opens its own.
    pub async fn contact(&self, app: &App) -> Result<KnownIdentity> {
        match &self.credential {
            TenantCredential::Key(key) => {
                let account = NewIdentity {
                    name: self.identity.clone(),
                    issuer: None,
                };
                let people = &app.verifiers.people;
                people
                    .contact(key.tenant_id(), &account, key.limits())
                    .await
            }
            // The token has proven its own account, which may have gone since.
            TenantCredential::User(user) => {
                let mut tx = user.begin(&app.db).await?;
                let known = identities::find(&mut tx, &self.identity).await?;
                let known = known.ok_or_else(no_such_user)?;
                self.check_own(&known)?;
                Ok(known)
            }
        }
    }

    /// The same account, with its id.
    pub fn identity(&self, known: &KnownIdentity) -> Identity {
        Identity {
            id: known.id,
            name: self.identity.clone(),
        }
    }

    /// A person reaches nobody else, whoever they name. Whose the token's own account is, may have
    /// changed since the token was judged.
    pub fn check_own(&self, known: &KnownIdentity) -> Result<()> {
        match &self.credential {
            TenantCredential::Key(_) => Ok(()),
            TenantCredential::User(user) => {
                let own = user.identity().id == known.id;
                own.then_some(()).ok_or_else(no_such_user)
            }
        }
    }

    pub fn is_person(&self) -> bool {
        matches!(self.credential, TenantCredential::User(_))
    }

    pub fn namespace(&self) -> Namespace {
        match &self.credential {
            TenantCredential::Key(_) => Namespace::Service,
            TenantCredential::User(user) => Namespace::User(user.user_id()),
        }
    }

    /// The credential, for the audit.
    pub fn actor(&self) -> String {
        self.credential.principal()
    }

    pub(in crate::http) fn credential(&self) -> &TenantCredential {
        &self.credential
    }

    /// The credential and the account it speaks for, for retries.
    pub fn principal(&self) -> String {
        format!("{}/{}", self.actor(), self.identity)
    }
}

fn no_such_user() -> Error {
    Error::not_found("user")
}
