//! Limits at the door: what a request costs, the refusal, and the `RateLimit` headers of the IETF draft
//! (draft-ietf-httpapi-ratelimit-headers) on every answer to a caller with limits.

use actix_web::HttpMessage;
use actix_web::body::BoxBody;
use actix_web::dev::ServiceResponse;
use actix_web::http::header::{HeaderName, HeaderValue};

use crate::app::App;
use crate::auth::KeyCaller;
use crate::domain::usage::{UsageCounts, UsageName};
use crate::error::{Code, Error};
use crate::limits::{Allowance, Bucket, Demand};

const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATE_LIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");

/// What the limits say to a request.
pub struct Admitted {
    /// The tightest limit; the one that refused, if one did.
    pub allowance: Option<Allowance>,
    pub refusal: Option<Error>,
}

/// Spends one request of the key and of its tenant, and counts it as used. A refused one costs nothing.
pub async fn admit(app: &App, key: &KeyCaller) -> Admitted {
    let (tenant_id, limits) = (key.tenant_id(), key.limits());
    let demands = [
        Demand::one(
            Bucket::KeyRequests(key.key_id()),
            limits.requests_per_minute_per_key,
        ),
        Demand::one(Bucket::Requests, limits.requests_per_minute),
    ];
    match app.limits.take(tenant_id, &demands).await {
        Ok(allowance) => {
            let name = UsageName::api_request(app.clock.now());
            app.usage.count(tenant_id, name, &UsageCounts::ONE_REQUEST);
            Admitted {
                allowance,
                refusal: None,
            }
        }
        Err(refused) => Admitted {
            allowance: Some(refused),
            refusal: Some(refusal(&refused)),
        },
    }
}

fn refusal(refused: &Allowance) -> Error {
    let detail = format!(
        "the limit \"{}\" is {} in {} seconds; it begins anew in {} seconds",
        refused.policy, refused.limit, refused.window_seconds, refused.resets_in
    );
    Error {
        retry_after: Some(refused.resets_in),
        ..Error::new(Code::RateLimited, detail)
    }
}

/// Tells the caller where its tightest limit stands.
pub fn set_headers(response: &mut ServiceResponse<BoxBody>) {
    let known = response.request().extensions();
    let Some(allowance) = known.get::<Option<Allowance>>().copied().flatten() else {
        return;
    };
    drop(known);
    let Allowance {
        policy,
        limit,
        window_seconds,
        remaining,
        resets_in,
    } = allowance;
    let headers = response.headers_mut();
    for (name, value) in [
        (
            RATE_LIMIT_POLICY,
            format!("\"{policy}\";q={limit};w={window_seconds}"),
        ),
        (
            RATE_LIMIT,
            format!("\"{policy}\";r={remaining};t={resets_in}"),
        ),
    ] {
        if let Ok(value) = HeaderValue::try_from(value) {
            headers.insert(name, value);
        }
    }
}
