//! The check of every request's credential, of the page it comes from and of its limits, before anything of its body is
//! read. Without an extractor nothing is open.

use actix_web::body::MessageBody;
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::header::HeaderValue;
use actix_web::middleware::Next;
use actix_web::{HttpMessage, HttpRequest, web};

use super::credential::{named_in_header, presented};
use super::keys::not_proven;
use crate::app::App;
use crate::auth::{self, Caller};
use crate::error::{Code, Error, Result};
use crate::http::{cors, limits};
use crate::ids::TenantId;
use crate::telemetry;

/// The caller, or why there is none; kept with the request.
pub struct Authenticated {
    caller: std::result::Result<Caller, Refusal>,
    /// The page that calls, where its tenant has allowed it.
    origin: Option<HeaderValue>,
}

/// An error that is answered to each extractor that asks.
struct Refusal {
    code: Code,
    detail: String,
    retry_after: Option<u32>,
    cause: Option<String>,
}

impl Authenticated {
    pub fn tenant_id(&self) -> Option<TenantId> {
        self.caller.as_ref().ok().and_then(Caller::tenant_id)
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
        let verified = match auth::verify(&app.verifiers, &presented).await {
            Ok(verified) => {
                // First contact is an effect.
                match cors::check_origin(
                    request.headers(),
                    app.config.public_url.as_ref(),
                    &verified,
                ) {
                    Ok(allowed) => origin = allowed,
                    Err(refusal) => {
                        return Ok(request.error_response(refusal).map_into_right_body());
                    }
                }
                verified.contact(&app.verifiers).await
            }
            Err(error) => Err(error),
        };
        let caller = verified.map_err(|error| Refusal {
            code: error.code,
            detail: error.detail,
            retry_after: error.retry_after,
            cause: error.cause.map(|cause| format!("{cause:#}")),
        });
        let mut admitted = None;
        if let Ok(caller) = &caller {
            if let Some(tenant_id) = caller.tenant_id() {
                telemetry::record_tenant(tenant_id);
            }
            admitted = limits::admit(&app, caller).await;
        }
        request
            .extensions_mut()
            .insert(Authenticated { caller, origin });
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

/// Who calls. Every extractor asks here, so that on no endpoint a user token names somebody else in the header.
pub fn caller(request: &HttpRequest) -> Result<Caller> {
    match request
        .extensions()
        .get::<Authenticated>()
        .map(|known| &known.caller)
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
        None => Err(Error::unauthorized("no credential was verified")),
    }
}
