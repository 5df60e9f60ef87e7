//! The credential of a request: as it was sent, to be verified again, and as what acts in a tenant.

use std::future::{Ready, ready};
use std::str::FromStr;
use std::sync::Arc;

use actix_web::dev::Payload;
use actix_web::http::header::{self, HeaderMap};
use actix_web::{FromRequest, HttpRequest};

use super::keys::{key_with, not_proven};
use super::middleware::caller;
use crate::app::App;
use crate::auth::{Caller, PresentedCredential, TenantCaller};
use crate::domain::bridge::chat::Chat;
use crate::domain::people::identity::{IdentityName, UserName};
use crate::domain::tenant::api_key::Scope;
use crate::error::{Code, Error, FieldError, Result};
use crate::streams::CheckedCredential;

const IDENTITY: &str = "x-throughline-identity";
const TENANT: &str = "x-throughline-tenant";

/// The credential of a request, to be checked again while a long answer is under way.
pub struct RawCredential(PresentedCredential);

impl FromRequest for RawCredential {
    type Error = Error;
    type Future = Ready<Result<Self>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        ready(Ok(Self(presented(request.headers()))))
    }
}

impl RawCredential {
    /// As all who use it on this node share it. Checking it makes nobody: only a request is a first contact.
    pub fn share(&self, app: &App) -> Arc<CheckedCredential> {
        app.streams.credentials.open(&self.0)
    }
}

/// A user's token, or a key with one of `scopes`.
pub(in crate::http) fn tenant_caller(
    request: &HttpRequest,
    scopes: &[Scope],
) -> Result<TenantCaller> {
    match caller(request)? {
        Caller::User(user) => Ok(TenantCaller::User(user)),
        Caller::Key(_) | Caller::Operator(_) => key_with(request, scopes).map(TenantCaller::Key),
    }
}

/// A user token proves one identity, and so its direct chat. Every other chat, and a direct chat by an id or in
/// a scope that the token does not prove, is a bridge's to name.
pub(in crate::http) fn check_chat(caller: &TenantCaller, chat: &Chat) -> Result<()> {
    match caller {
        TenantCaller::User(_) if *chat != Chat::DM => Err(not_proven()),
        TenantCaller::User(_) | TenantCaller::Key(_) => Ok(()),
    }
}

pub(super) fn presented(headers: &HeaderMap) -> PresentedCredential {
    let tenant = headers.get(TENANT);
    PresentedCredential {
        authorization: headers
            .get(header::AUTHORIZATION)
            .map(|value| value.as_bytes().to_vec()),
        tenant: tenant.map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned()),
    }
}

/// The identity in `X-Throughline-Identity`; none if it is `me`, or no identity at all.
pub(super) fn named_in_header(request: &HttpRequest) -> Option<IdentityName> {
    let value = request.headers().get(IDENTITY)?;
    std::str::from_utf8(value.as_bytes()).ok()?.parse().ok()
}

/// Who the header `X-Throughline-Identity` names: an identity, or with a user's token `me`.
pub(in crate::http) fn read_header(
    request: &HttpRequest,
    credential: &TenantCaller,
) -> Result<Option<UserName>> {
    let Some(value) = request.headers().get(IDENTITY) else {
        return Ok(None);
    };
    let malformed = |detail: String| {
        let error = FieldError::new("/header/X-Throughline-Identity", detail);
        Error::fields(Code::InvalidRequest, vec![error])
    };
    let text =
        std::str::from_utf8(value.as_bytes()).map_err(|error| malformed(error.to_string()))?;
    if text == "me" {
        return match credential {
            TenantCaller::User(_) => Ok(Some(UserName::Me)),
            TenantCaller::Key(_) => Err(malformed(
                "an API key is nobody: name an identity in X-Throughline-Identity".to_owned(),
            )),
        };
    }
    let name = IdentityName::from_str(text).map_err(|error| malformed(error.to_string()))?;
    Ok(Some(UserName::Identity(name)))
}
