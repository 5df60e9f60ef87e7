//! One extractor for each kind of caller, so that a handler's signature shows who may call it. The
//! credential is judged before anything of the body is read; without an extractor nothing is open.

use std::future::{Ready, ready};
use std::ops::Deref;

use actix_web::body::MessageBody;
use actix_web::dev::{Payload, ServiceRequest, ServiceResponse};
use actix_web::http::header;
use actix_web::middleware::Next;
use actix_web::{FromRequest, HttpMessage, HttpRequest, web};

use super::limits;
use crate::app::App;
use crate::auth::{self, Caller, KeyCaller, OperatorCaller};
use crate::domain::api_key::Scope;
use crate::error::{Code, Error, Result};
use crate::ids::TenantId;

/// What became of the request's credential; kept with the request.
pub struct Authenticated(std::result::Result<Caller, Refusal>);

/// An error that can be told to each extractor that asks.
struct Refusal {
    code: Code,
    detail: String,
    cause: Option<String>,
}

impl Authenticated {
    pub fn tenant_id(&self) -> Option<TenantId> {
        self.0.as_ref().ok().and_then(Caller::tenant_id)
    }
}

/// Judges the credential of every request in a scope, and whether its limits admit it, before its
/// handler's extractors run.
pub async fn authenticate(
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<impl MessageBody>, actix_web::Error> {
    if let Some(app) = request.app_data::<web::Data<App>>().cloned() {
        let header = request
            .headers()
            .get(header::AUTHORIZATION)
            .map(|value| value.as_bytes().to_vec());
        let judged = auth::authenticate(&app.operators, &app.keys, header.as_deref()).await;
        let judged = judged.map_err(|error| Refusal {
            code: error.code,
            detail: error.detail,
            cause: error.cause.map(|cause| format!("{cause:#}")),
        });
        let admitted = match &judged {
            Ok(Caller::Key(key)) => Some(limits::admit(&app, key).await),
            Ok(Caller::Operator(_)) | Err(_) => None,
        };
        request.extensions_mut().insert(Authenticated(judged));
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

fn caller(request: &HttpRequest) -> Result<Caller> {
    match request.extensions().get::<Authenticated>() {
        Some(Authenticated(Ok(caller))) => Ok(caller.clone()),
        Some(Authenticated(Err(refusal))) => Err(Error {
            cause: refusal.cause.clone().map(anyhow::Error::msg),
            ..Error::new(refusal.code, refusal.detail.clone())
        }),
        None => Err(Error::unauthorized("no credential was judged")),
    }
}

fn key_with(request: &HttpRequest, scopes: &[Scope]) -> Result<KeyCaller> {
    let needed = || {
        let names: Vec<&str> = scopes.iter().map(|scope| scope.as_str()).collect();
        let detail = format!(
            "this needs an API key with the scope {}",
            names.join(" or ")
        );
        Error::new(Code::MissingScope, detail)
    };
    match caller(request)? {
        Caller::Key(key) if scopes.iter().any(|scope| key.has_scope(*scope)) => Ok(key),
        Caller::Key(_) | Caller::Operator(_) => Err(needed()),
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
