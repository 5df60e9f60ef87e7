//! One extractor for each kind of caller, so that a handler's signature shows who may call it.

use std::future::{Ready, ready};
use std::ops::Deref;

use actix_web::dev::Payload;
use actix_web::{FromRequest, HttpRequest};

use super::middleware::caller;
use crate::auth::{Caller, KeyCaller, OperatorCaller, UserCaller};
use crate::domain::tenant::api_key::Scope;
use crate::error::{Code, Error, Result};

/// Anything but a person's own is not there for that person.
fn not_there() -> Error {
    Error::new(Code::NotFound, "no such resource")
}

/// For what a user token claims and does not prove.
pub fn not_proven() -> Error {
    let detail =
        "a user token acts for its own identity, in its own direct chat, under its own name";
    Error::new(Code::NotFound, detail)
}

/// For an identity or a chat of a platform that is not the key's.
pub fn not_covered() -> Error {
    let detail = "the key does not cover the identity's platform";
    Error::new(Code::PlatformNotAllowed, detail)
}

pub fn missing_scope(scopes: &[Scope]) -> Error {
    let names: Vec<&str> = scopes.iter().map(|scope| scope.as_str()).collect();
    let detail = format!(
        "this needs an API key with the scope {}",
        names.join(" or ")
    );
    Error::new(Code::MissingScope, detail)
}

pub fn key_with(request: &HttpRequest, scopes: &[Scope]) -> Result<KeyCaller> {
    match caller(request)? {
        Caller::Key(key) if scopes.iter().any(|scope| key.has_scope(*scope)) => Ok(key),
        Caller::Key(_) | Caller::Operator(_) => Err(missing_scope(scopes)),
        Caller::User(_) => Err(not_there()),
    }
}

/// Any caller with a good credential.
pub struct AnyCaller(pub Caller);

impl FromRequest for AnyCaller {
    type Error = Error;
    type Future = Ready<Result<Self>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        ready(caller(request).map(Self))
    }
}

/// The operator.
pub struct Operator(pub OperatorCaller);

impl FromRequest for Operator {
    type Error = Error;
    type Future = Ready<Result<Self>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        ready(caller(request).and_then(|caller| match caller {
            Caller::Operator(operator) => Ok(Self(operator)),
            Caller::Key(_) => {
                let detail = "this needs the operator's key";
                Err(Error::new(Code::MissingScope, detail))
            }
            Caller::User(_) => Err(not_there()),
        }))
    }
}

macro_rules! key_extractor {
    ($(#[$doc:meta])* $name:ident, $scopes:expr) => {
        $(#[$doc])*
        pub struct $name(KeyCaller);

        impl FromRequest for $name {
            type Error = Error;
            type Future = Ready<Result<Self>>;

            fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
                ready(key_with(request, &$scopes).map(Self))
            }
        }

        impl Deref for $name {
            type Target = KeyCaller;

            fn deref(&self) -> &KeyCaller {
                &self.0
            }
        }
    };
}

key_extractor!(
    /// An API key with the scope `admin`.
    Admin,
    [Scope::Admin]
);
key_extractor!(
    /// An API key that may read what the tenant has: `admin` or `read`.
    Reader,
    [Scope::Admin, Scope::Read]
);

key_extractor!(
    /// A key that serves platforms: a bridge for its own, an admin for all.
    BridgeKey,
    [Scope::Admin, Scope::Bridge]
);
key_extractor!(
    /// The same, and a key that may only read what the tenant has.
    DeliveryReader,
    [Scope::Admin, Scope::Bridge, Scope::Read]
);

impl From<BridgeKey> for KeyCaller {
    fn from(key: BridgeKey) -> Self {
        key.0
    }
}

impl DeliveryReader {
    /// A key that may only read sees no texts.
    pub fn reads_texts(&self) -> bool {
        self.has_scope(Scope::Admin) || !self.has_scope(Scope::Read)
    }
}

/// A person with a user token.
pub struct TokenUser(UserCaller);

impl FromRequest for TokenUser {
    type Error = Error;
    type Future = Ready<Result<Self>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        ready(caller(request).and_then(|caller| match caller {
            Caller::User(user) => Ok(Self(user)),
            Caller::Key(_) | Caller::Operator(_) => {
                let detail = "this needs a user token";
                Err(Error::new(Code::MissingScope, detail))
            }
        }))
    }
}

impl Deref for TokenUser {
    type Target = UserCaller;

    fn deref(&self) -> &UserCaller {
        &self.0
    }
}
