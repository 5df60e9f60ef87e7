//! For whom a call on conversations is: an extractor for those who write and one for those who read, and the user
//! that the body or `X-Throughline-Identity` names. A name is never a right: its owner is looked up at every call.

use std::future::{Ready, ready};

use actix_web::dev::Payload;
use actix_web::{FromRequest, HttpRequest};

use super::credential::{check_chat, read_header, tenant_caller};
use super::keys::{missing_scope, not_covered, not_proven};
use crate::app::App;
use crate::auth::{KeyCaller, TenantCaller, UserCaller};
use crate::domain::bridge::chat::Chat;
use crate::domain::people::access::{Access, Visibility, scope_in_use, sender_through};
use crate::domain::people::identity::{IdentityName, UserName};
use crate::domain::people::user::{Identity, IdentityRecord, NewIdentity, User};
use crate::domain::tenant::api_key::Scope;
use crate::domain::tenant::limits::Limits;
use crate::error::{Code, Error, FieldError, Result};
use crate::ids::{TenantId, UserId};
use crate::people;
use crate::store::people::{identities, users};
use crate::store::{Db, TenantTx};

/// A call before its body is read, which may name the user it is for.
struct Call {
    credential: TenantCaller,
    /// The scopes that the endpoint accepts.
    accepted: &'static [Scope],
    header: Option<UserName>,
}

macro_rules! extractor {
    ($(#[$doc:meta])* $name:ident, $scopes:expr) => {
        $(#[$doc])*
        pub struct $name(Call);

        #[allow(dead_code, reason = "some endpoints need a transaction at once, others later")]
        impl $name {
            /// For whom the call is. `named` is the user in the body, which wins over the header.
            /// Call it before a transaction is open: it opens its own.
            pub async fn context(self, app: &App, named: Option<&UserName>) -> Result<CallerContext> {
                self.0.context(app, named).await
            }

            /// The same, and a transaction in which it acts.
            pub async fn begin(
                self,
                app: &App,
                named: Option<&UserName>,
            ) -> Result<(CallerContext, TenantTx)> {
                let context = self.0.context(app, named).await?;
                let tx = context.begin(&app.db).await?;
                Ok((context, tx))
            }
        }

        impl FromRequest for $name {
            type Error = Error;
            type Future = Ready<Result<Self>>;

            fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
                ready(Call::of(request, $scopes).map(Self))
            }
        }
    };
}

extractor!(
    /// Who may write in conversations: a user, or a key with `admin`, `bridge` or `chat`.
    ConversationWriter,
    &[Scope::Admin, Scope::Bridge, Scope::Chat]
);
impl ConversationWriter {
    /// For whom the call is, where the body's `user` may name the sender: an identity that the key vouches
    /// for, or `me` with a token. Then that identity comes with it. Any other value is a label. A token
    /// speaks for its own identity, unless it names nobody and asks that nothing is stored.
    pub async fn speaking(
        self,
        app: &App,
        user: Option<&str>,
        stores: bool,
    ) -> Result<(CallerContext, Option<Identity>)> {
        let named = user.and_then(|user| user.parse::<IdentityName>().ok());
        let verified = match (&self.0.credential, named) {
            (TenantCaller::User(_), _) => {
                let is_me = user == Some("me") || self.0.header == Some(UserName::Me);
                let context = self.0.context(app, None).await?;
                let sender = context.access.sender.clone();
                return Ok((context, sender.filter(|_| stores || is_me)));
            }
            (TenantCaller::Key(key), Some(named)) if key.has_scope(Scope::Admin) => {
                // Naming an identity here is a first contact.
                known_or_new(app, key, &named).await?;
                Some(named)
            }
            (TenantCaller::Key(key), Some(named)) if key.has_scope(Scope::Bridge) => {
                Some(named).filter(|named| named.is_covered_by(key.platforms()))
            }
            (TenantCaller::Key(_), _) => None,
        };
        let Some(named) = verified.map(UserName::Identity) else {
            return Ok((self.0.context(app, None).await?, None));
        };
        let context = self.0.context(app, Some(&named)).await?;
        let sender = context.access.sender.clone();
        Ok((context, sender))
    }
}

extractor!(
    /// Who may read conversations: the same, and a key with `read`.
    ConversationReader,
    &[Scope::Admin, Scope::Bridge, Scope::Chat, Scope::Read]
);

extractor!(
    /// Who may change what is a user's own: the user, a bridge that names them, or an admin.
    UserWriter,
    &[Scope::Admin, Scope::Bridge]
);
extractor!(
    /// Who may export everything of a user: the user, or an admin.
    UserExporter,
    &[Scope::Admin]
);
extractor!(
    /// Who may read what is a user's own: the user, a bridge that names them, an admin, and a key with `read`.
    UserReader,
    &[Scope::Admin, Scope::Bridge, Scope::Read]
);

impl Call {
    fn of(request: &HttpRequest, accepted: &'static [Scope]) -> Result<Self> {
        let credential = tenant_caller(request, accepted)?;
        let header = read_header(request, &credential)?;
        Ok(Self {
            credential,
            accepted,
            header,
        })
    }

    async fn context(self, app: &App, named: Option<&UserName>) -> Result<CallerContext> {
        let named = named.or(self.header.as_ref());
        let access = match &self.credential {
            TenantCaller::Key(key) => access_of_key(app, key, self.accepted, named).await?,
            TenantCaller::User(user) => access_of_user(app, user, named).await?,
        };
        let name = match &self.credential {
            TenantCaller::Key(_) => named.map(ToString::to_string),
            TenantCaller::User(user) => Some(user.identity().name.to_string()),
        };
        Ok(CallerContext {
            access,
            name,
            credential: self.credential,
        })
    }
}

async fn access_of_key(
    app: &App,
    key: &KeyCaller,
    accepted: &[Scope],
    named: Option<&UserName>,
) -> Result<Access> {
    let scope = scope_in_use(key.scopes(), accepted, named.is_some());
    match scope.ok_or_else(|| missing_scope(accepted))? {
        Scope::Admin => {
            let (user_id, sender) = match named {
                Some(named) => find_user_of_identity(app, key, named).await?,
                None => (None, None),
            };
            Ok(Access::of_admin_key(user_id, sender))
        }
        Scope::Bridge => access_of_bridge(app, key, named).await,
        Scope::Chat if named.is_some() => {
            let detail = "a chat key does not act for users";
            Err(Error::new(Code::MissingScope, detail))
        }
        Scope::Chat => Ok(Access::of_chat_key()),
        Scope::Read => Ok(Access::of_read_key()),
    }
}

/// A user that the tenant has; naming an identity is no first contact here.
async fn find_user_of_identity(
    app: &App,
    key: &KeyCaller,
    named: &UserName,
) -> Result<(Option<UserId>, Option<Identity>)> {
    match named {
        UserName::Me => Err(key_is_nobody()),
        UserName::User(id) => {
            let mut tx = key.begin(&app.db).await?;
            let user = users::find(&mut tx, *id).await?;
            tx.end().await?;
            let user = user.ok_or_else(no_such_user)?;
            Ok((Some(user.id), None))
        }
        UserName::Identity(name) => {
            let mut tx = key.begin(&app.db).await?;
            let known = identities::find(&mut tx, name).await?;
            tx.end().await?;
            let known = known.ok_or_else(no_such_user)?;
            let sender = Identity {
                id: known.id,
                name: name.clone(),
            };
            Ok((Some(known.user_id), Some(sender)))
        }
    }
}

async fn access_of_bridge(app: &App, key: &KeyCaller, named: Option<&UserName>) -> Result<Access> {
    let named = named.ok_or_else(|| {
        let detail = "name an identity in the body or in the header X-Throughline-Identity";
        Error::new(Code::IdentityRequired, detail)
    })?;
    let (user_id, sender) = match named {
        UserName::Me => return Err(key_is_nobody()),
        UserName::User(id) => {
            let mut tx = key.begin(&app.db).await?;
            let user = users::find(&mut tx, *id).await?.ok_or_else(no_such_user)?;
            let identities = identities::list(&mut tx, user.id).await?;
            tx.end().await?;
            let identities: Vec<Identity> =
                identities.iter().map(IdentityRecord::identity).collect();
            let sender = sender_through(key.platforms(), &identities);
            (user.id, sender.ok_or_else(no_such_user)?)
        }
        UserName::Identity(name) => {
            let (user_id, sender) = contact(app, key, name).await?;
            (user_id, Some(sender))
        }
    };
    let chats_too = key.has_scope(Scope::Chat);
    Ok(Access::of_bridge_key(user_id, sender, chats_too))
}

async fn contact(app: &App, key: &KeyCaller, name: &IdentityName) -> Result<(UserId, Identity)> {
    if !name.is_covered_by(key.platforms()) {
        return Err(not_covered());
    }
    known_or_new(app, key, name).await
}

async fn known_or_new(
    app: &App,
    key: &KeyCaller,
    name: &IdentityName,
) -> Result<(UserId, Identity)> {
    let identity = NewIdentity {
        name: name.clone(),
        issuer: None,
    };
    let first_contact = &app.verifiers.first_contact;
    let known = first_contact
        .contact(key.tenant_id(), &identity, key.limits())
        .await?;
    let sender = Identity {
        id: known.id,
        name: name.clone(),
    };
    Ok((known.user_id, sender))
}

async fn access_of_user(app: &App, user: &UserCaller, named: Option<&UserName>) -> Result<Access> {
    let own = user.user_id();
    let meant = match named {
        None | Some(UserName::Me) => Some(own),
        Some(UserName::User(id)) if *id == own => Some(own),
        Some(UserName::User(id)) => {
            let mut tx = user.begin(&app.db).await?;
            let user = users::find(&mut tx, *id).await?;
            tx.end().await?;
            user.map(|user| user.id)
        }
        Some(UserName::Identity(name)) if *name == user.identity().name => Some(own),
        Some(UserName::Identity(_)) => return Err(not_proven()),
    };
    if meant != Some(own) {
        return Err(no_such_user());
    }
    Ok(Access::of_user(own, user.identity().clone()))
}

fn key_is_nobody() -> Error {
    let detail = "an API key has no user of its own: give a user's id or an identity";
    Error::invalid(vec![FieldError::new("/user", detail)])
}

fn no_such_user() -> Error {
    Error::not_found("user")
}

/// A call and for whom it is.
pub struct CallerContext {
    pub access: Access,
    /// Who is acted for, as the caller names them: it stays the same when users are merged.
    name: Option<String>,
    credential: TenantCaller,
}

impl CallerContext {
    /// The user of an id, or the one it was merged into, if this caller may see it.
    pub async fn find_user(&self, tx: &mut TenantTx, id: UserId) -> Result<User> {
        let user = users::find(tx, id).await?.ok_or_else(no_such_user)?;
        match self.access.visibility {
            Visibility::Tenant => Ok(user),
            Visibility::User(own) if own == user.id => Ok(user),
            Visibility::User(_) | Visibility::Service => Err(no_such_user()),
        }
    }

    /// Fails for a chat that the credential does not prove.
    pub fn check_chat(&self, chat: &Chat) -> Result<()> {
        check_chat(&self.credential, chat)
    }

    /// Fails when the sender's identity has another user by now: for what goes on long after the call was checked.
    pub async fn check_present(&self, tx: &mut TenantTx) -> Result<()> {
        let (Visibility::User(user_id), Some(sender)) =
            (self.access.visibility, &self.access.sender)
        else {
            return Ok(());
        };
        people::find_present_user(tx, sender.id, user_id)
            .await
            .map(drop)
    }

    /// The user that a list is filtered by: the one that the id was merged into. A user sees its own alone.
    pub async fn user_filter(
        &self,
        tx: &mut TenantTx,
        user_id: Option<UserId>,
    ) -> Result<Option<UserId>> {
        let Some(id) = user_id else {
            return Ok(None);
        };
        let present = users::find_redirect(tx, id).await?.unwrap_or(id);
        match self.access.visibility {
            Visibility::User(own) if own != present => Err(no_such_user()),
            Visibility::User(_) | Visibility::Tenant | Visibility::Service => Ok(Some(present)),
        }
    }

    pub async fn begin(&self, db: &Db) -> Result<TenantTx> {
        self.credential.begin(db).await
    }

    pub fn tenant_id(&self) -> TenantId {
        self.credential.tenant_id()
    }

    /// What its tenant may use.
    pub fn limits(&self) -> &Limits {
        self.credential.limits()
    }

    /// The credential, for the audit.
    pub fn actor(&self) -> String {
        self.credential.principal()
    }

    pub fn caller(&self) -> &TenantCaller {
        &self.credential
    }

    /// The credential and who it acts for: one key's retries for two users never meet. An unlink deletes what
    /// is stored under an identity's name.
    pub fn principal(&self) -> String {
        let actor = self.actor();
        match &self.name {
            Some(name) => format!("{actor}/{name}"),
            None => actor,
        }
    }
}
