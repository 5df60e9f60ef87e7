//! The identity that a call is for: the extractor of the endpoints where an identity may be new. Who may vouch for it
//! is checked here, before anything is looked up.

use std::future::{Ready, ready};

use actix_web::dev::Payload;
use actix_web::{FromRequest, HttpRequest};

use super::credential::{check_chat, read_header, tenant_caller};
use super::keys::{not_covered, not_proven};
use crate::app::App;
use crate::auth::{KeyCaller, TenantCaller};
use crate::domain::bridge::chat::Chat;
use crate::domain::people::access::Namespace;
use crate::domain::people::identity::{IdentityName, UserName};
use crate::domain::people::platform::covers;
use crate::domain::people::user::{Identity, IdentityOwner, NewIdentity};
use crate::domain::tenant::api_key::Scope;
use crate::error::{Code, Error, FieldError, Result};
use crate::ids::TenantId;
use crate::store::people::identities;
use crate::store::{Db, TenantTx};

/// Who may vouch for an identity: a user for its own, a bridge for those of its platforms, an admin for any.
pub struct IdentityCaller {
    credential: TenantCaller,
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
        let credential = tenant_caller(request, &[Scope::Admin, Scope::Bridge])?;
        let header = match (read_header(request, &credential)?, &credential) {
            (Some(UserName::Identity(named)), _) => Some(named),
            (Some(UserName::Me | UserName::User(_)), TenantCaller::User(user)) => {
                Some(user.identity().name.clone())
            }
            (Some(UserName::Me | UserName::User(_)), TenantCaller::Key(_)) | (None, _) => None,
        };
        Ok(Self { credential, header })
    }

    /// Vouches for the identity that the body names, else the header, else the token itself, in `chat`.
    pub fn vouch(self, claim: Claim<'_>) -> Result<VerifiedIdentity> {
        let chat = claim.chat;
        let errors = chat.map_or_else(Vec::new, |chat| chat.check("/chat"));
        if !errors.is_empty() {
            return Err(Error::invalid(errors));
        }
        let named = claim.identity.or(self.header);
        let identity = match (&self.credential, named) {
            (TenantCaller::User(user), named) => {
                if let Some(chat) = chat {
                    check_chat(&self.credential, chat)?;
                }
                let own = &user.identity().name;
                if named.is_some_and(|named| named != *own) || claim.display_name.is_some() {
                    return Err(not_proven());
                }
                own.clone()
            }
            (TenantCaller::Key(key), Some(named)) => {
                if !key.has_scope(Scope::Admin) {
                    check_covered(key, &named, chat)?;
                }
                named
            }
            (TenantCaller::Key(key), None) if key.has_scope(Scope::Admin) => {
                let error = FieldError::new("/identity", "name an identity");
                return Err(Error::invalid(vec![error]));
            }
            (TenantCaller::Key(_), None) => {
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

/// The sender and the chat as the call names them. An API key is trusted with both, within its platforms. A user token
/// proves one identity, in its direct chat, and nothing else of this.
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

/// A call and the identity it is for.
pub struct VerifiedIdentity {
    credential: TenantCaller,
    pub identity: IdentityName,
}

impl VerifiedIdentity {
    pub async fn begin(&self, db: &Db) -> Result<TenantTx> {
        self.credential.begin(db).await
    }

    pub fn tenant_id(&self) -> TenantId {
        self.credential.tenant_id()
    }

    /// The present owner of the identity; a new user if it has none. Call it before a transaction is open: it opens its
    /// own.
    pub async fn contact(&self, app: &App) -> Result<IdentityOwner> {
        match &self.credential {
            TenantCaller::Key(key) => {
                let identity = NewIdentity {
                    name: self.identity.clone(),
                    issuer: None,
                };
                let first_contact = &app.verifiers.first_contact;
                first_contact
                    .contact(key.tenant_id(), &identity, key.limits())
                    .await
            }
            // The token has proven its identity, which may have been erased since.
            TenantCaller::User(user) => {
                let mut tx = user.begin(&app.db).await?;
                let known = identities::find(&mut tx, &self.identity).await?;
                tx.end().await?;
                let known = known.ok_or_else(no_such_user)?;
                self.check_own(&known)?;
                Ok(known)
            }
        }
    }

    /// The same identity, with its id.
    pub fn identity(&self, known: &IdentityOwner) -> Identity {
        Identity {
            id: known.id,
            name: self.identity.clone(),
        }
    }

    /// A user reaches nobody else. The owner of the token's identity may have changed since the token was checked.
    pub fn check_own(&self, known: &IdentityOwner) -> Result<()> {
        match &self.credential {
            TenantCaller::Key(_) => Ok(()),
            TenantCaller::User(user) => {
                let own = user.identity().id == known.id;
                own.then_some(()).ok_or_else(no_such_user)
            }
        }
    }

    pub fn is_user(&self) -> bool {
        matches!(self.credential, TenantCaller::User(_))
    }

    pub fn namespace(&self) -> Namespace {
        match &self.credential {
            TenantCaller::Key(_) => Namespace::Service,
            TenantCaller::User(user) => Namespace::User(user.user_id()),
        }
    }

    pub fn into_caller(self) -> TenantCaller {
        self.credential
    }

    /// The credential, for the audit.
    pub fn actor(&self) -> String {
        self.credential.principal()
    }

    pub(in crate::http) fn credential(&self) -> &TenantCaller {
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
