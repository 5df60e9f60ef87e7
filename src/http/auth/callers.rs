//! One extractor for each kind of caller, so that a handler's signature shows who may call it. The
//! credential is judged before anything of the body is read; without an extractor nothing is open.

use std::future::{Ready, ready};
use std::ops::Deref;
use std::sync::Arc;

use actix_web::body::MessageBody;
use actix_web::dev::{Payload, ServiceRequest, ServiceResponse};
use actix_web::http::header::{self, HeaderMap, HeaderValue};
use actix_web::middleware::Next;
use actix_web::{FromRequest, HttpMessage, HttpRequest, web};

use crate::app::App;
use crate::auth::{self, Caller, KeyCaller, OperatorCaller, Presented, UserCaller};
use crate::domain::people::identity::IdentityName;
use crate::domain::tenant::api_key::Scope;
use crate::error::{Code, Error, Result};
use crate::http::{cors, limits};
use crate::ids::TenantId;
use crate::streams::CheckedCredential;
use crate::telemetry;

pub(in crate::http) const IDENTITY: &str = "x-throughline-identity";
const TENANT: &str = "x-throughline-tenant";

/// What became of the request's credential; kept with the request.
pub struct Authenticated {
    judged: std::result::Result<Caller, Refusal>,
    /// The page that calls, where its tenant has allowed it.
    origin: Option<HeaderValue>,
}

/// An error that can be told to each extractor that asks.
struct Refusal {
    code: Code,
    detail: String,
    retry_after: Option<u32>,
    cause: Option<String>,
}

impl Authenticated {
    pub fn tenant_id(&self) -> Option<TenantId> {
        self.judged.as_ref().ok().and_then(Caller::tenant_id)
    }

    /// The web page that may read the answer.
    pub fn allowed_origin(&self) -> Option<HeaderValue> {
        self.origin.clone()
    }
}

/// Checks the credential of every request in a scope, the page that it comes from, and whether its limits admit it,
/// before its handler's extractors run.
pub async fn authenticate(
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<impl MessageBody>, actix_web::Error> {
    if let Some(app) = request.app_data::<web::Data<App>>().cloned() {
        let presented = presented(request.headers());
        let mut origin = None;
        let judged = match auth::verify(&app.verifiers, &presented).await {
            Ok(verified) => {
                // First contact is an effect.
                match cors::check(request.headers(), app.config.public_url.as_ref(), &verified) {
                    Ok(allowed) => origin = allowed,
                    Err(refusal) => {
                        return Ok(request.error_response(refusal).map_into_right_body());
                    }
                }
                verified.contact(&app.verifiers).await
            }
            Err(error) => Err(error),
        };
        let judged = judged.map_err(|error| Refusal {
            code: error.code,
            detail: error.detail,
            retry_after: error.retry_after,
            cause: error.cause.map(|cause| format!("{cause:#}")),
        });
        let mut admitted = None;
        if let Ok(caller) = &judged {
            if let Some(tenant_id) = caller.tenant_id() {
                telemetry::record_tenant(tenant_id);
            }
            admitted = limits::admit(&app, caller).await;
        }
        request
            .extensions_mut()
            .insert(Authenticated { judged, origin });
        if let Some(admitted) = admitted {
            request.extensions_mut().insert(admitted.allowance);
            if let Some(refusal) = admitted.refusal {
                return Ok(request.error_response(refusal).map_into_right_body());
            }
        }
    }
    let response = next.call(request).await?;
    Ok(response.map_into_left_body())
}

fn presented(headers: &HeaderMap) -> Presented {
    let tenant = headers.get(TENANT);
    Presented {
        authorization: headers
            .get(header::AUTHORIZATION)
            .map(|value| value.as_bytes().to_vec()),
        tenant: tenant.map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned()),
    }
}

/// Anything but a person's own is not there for that person.
fn not_there() -> Error {
    Error::new(Code::NotFound, "no such resource")
}

/// Who calls. Every extractor asks here, so that on no endpoint a user token names somebody else in the header.
pub fn caller(request: &HttpRequest) -> Result<Caller> {
    match request
        .extensions()
        .get::<Authenticated>()
        .map(|known| &known.judged)
    {
        Some(Ok(caller)) => {
            if let Caller::User(user) = caller
                && let Some(named) = named_in_header(request)
                && named != user.identity().name
            {
                return Err(not_proven());
            }
            Ok(caller.clone())
        }
        Some(Err(refusal)) => Err(Error {
            retry_after: refusal.retry_after,
            cause: refusal.cause.clone().map(anyhow::Error::msg),
            ..Error::new(refusal.code, refusal.detail.clone())
        }),
        None => Err(Error::unauthorized("no credential was judged")),
    }
}

/// The identity in `X-Throughline-Identity`; none if it is `me`, or no identity at all.
fn named_in_header(request: &HttpRequest) -> Option<IdentityName> {
    let value = request.headers().get(IDENTITY)?;
    std::str::from_utf8(value.as_bytes()).ok()?.parse().ok()
}

/// For what a user token claims and does not prove.
pub fn not_proven() -> Error {
    let detail =
        "a user token acts for its own identity, in its own direct chat, under its own name";
    Error::new(Code::NotFound, detail)
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

/// The credential of a request, to be checked again while a long answer is under way.
pub struct RawCredential(Presented);

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

impl BridgeKey {
    /// Whether it serves all platforms.
    pub fn sees_all(&self) -> bool {
        self.has_scope(Scope::Admin)
    }
}

impl DeliveryReader {
    pub fn sees_all(&self) -> bool {
        self.has_scope(Scope::Admin) || self.has_scope(Scope::Read)
    }

    /// Who only reads sees no texts.
    pub fn reads_texts(&self) -> bool {
        self.has_scope(Scope::Admin) || !self.has_scope(Scope::Read)
    }
}

/// A person with a user token.
pub struct Person(UserCaller);

impl FromRequest for Person {
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

impl Deref for Person {
    type Target = UserCaller;

    fn deref(&self) -> &UserCaller {
        &self.0
    }
}
