//! Rate limits of requests: the cost of a request, the refusal, and the `RateLimit` headers of the IETF draft
//! (draft-ietf-httpapi-ratelimit-headers) on every answer to a caller with limits.

use actix_web::HttpMessage;
use actix_web::body::BoxBody;
use actix_web::dev::ServiceResponse;
use actix_web::http::header::{HeaderName, HeaderValue};

use crate::app::App;
use crate::auth::Caller;
use crate::domain::tenant::usage::{UsageCounts, UsageKey};
use crate::error::Error;
use crate::limits::{Allowance, Bucket, Demand};

const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATE_LIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");

/// The decision of the limits on a request.
pub struct Admission {
    /// The tightest limit, or the one that refused.
    pub allowance: Option<Allowance>,
    pub refusal: Option<Error>,
}

/// Spends one request of the caller and of its tenant, and counts it as usage. A refused request costs nothing. The
/// operator has no limits.
pub async fn admit(app: &App, caller: &Caller) -> Option<Admission> {
    let (tenant_id, limits, own) = match caller {
        Caller::Operator(_) => return None,
        Caller::Key(key) => {
            let limits = key.limits();
            let bucket = Bucket::KeyRequests(key.key_id());
            let own = Demand::one(bucket, limits.requests_per_minute_per_key);
            (key.tenant_id(), limits, own)
        }
        Caller::User(user) => {
            let limits = user.limits();
            let bucket = Bucket::UserRequests(user.user_id());
            let own = Demand::one(bucket, limits.requests_per_minute_per_person);
            (user.tenant_id(), limits, own)
        }
    };
    let demands = [
        own,
        Demand::one(Bucket::Requests, limits.requests_per_minute),
    ];
    Some(match app.limits.take(tenant_id, &demands).await {
        Ok(allowance) => {
            let name = UsageKey::api_request(app.clock.now());
            app.usage.count(tenant_id, name, &UsageCounts::ONE_REQUEST);
            Admission {
                allowance,
                refusal: None,
            }
        }
        Err(refused) => Admission {
            allowance: Some(refused),
            refusal: Some(refused.refusal()),
        },
    })
}

/// Adds the state of the caller's tightest limit.
pub fn set_headers(response: &mut ServiceResponse<BoxBody>) {
    let extensions = response.request().extensions();
    let Some(allowance) = extensions.get::<Option<Allowance>>().copied().flatten() else {
        return;
    };
    drop(extensions);
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
