//! Calls from web pages. A preflight reveals nothing and is answered for every origin; a request from an origin that
//! the tenant has not allowed is refused before it has any effect. Cookies play no part.

use std::net::IpAddr;

use actix_web::HttpResponse;
use actix_web::http::Method;
use actix_web::http::header::{self, HeaderMap, HeaderValue};

use url::Url;

use crate::auth::Verified;
use crate::domain::tenant::origin::Origin;
use crate::error::{Code, Error, Result};

const METHODS: &str = "GET, HEAD, POST, PUT, PATCH, DELETE";
/// The default for a preflight without a list. Official clients send further headers of their own, so requested ones
/// are allowed: without cookies a header carries only what the page itself could send.
const REQUEST_HEADERS: &str = "Authorization, Content-Type, Idempotency-Key, If-Match, Last-Event-ID, \
     X-Hermes-Session-Id, X-Hermes-Session-Key, X-Throughline-Identity, X-Throughline-Tenant, X-Request-Id";
const EXPOSED: &str = "X-Hermes-Session-Id, X-Hermes-Session-Key, X-Throughline-Conversation-Id, \
     X-Throughline-Turn-Id, X-Throughline-Stateless, X-Request-Id, X-Should-Retry, Idempotency-Replayed, RateLimit, \
     RateLimit-Policy, Retry-After, Location, ETag";
const PREFLIGHT_MAX_AGE_SECONDS: &str = "600";

/// The answer to a preflight; `None` if it is none.
pub fn preflight(method: &Method, headers: &HeaderMap) -> Option<HttpResponse> {
    let is_preflight = method == Method::OPTIONS
        && headers.contains_key(header::ORIGIN)
        && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    is_preflight.then(|| {
        let requested = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS);
        let allowed = requested
            .cloned()
            .unwrap_or(HeaderValue::from_static(REQUEST_HEADERS));
        HttpResponse::NoContent()
            .insert_header((header::ACCESS_CONTROL_ALLOW_ORIGIN, "*"))
            .insert_header((header::ACCESS_CONTROL_ALLOW_METHODS, METHODS))
            .insert_header((header::ACCESS_CONTROL_ALLOW_HEADERS, allowed))
            .insert_header((header::ACCESS_CONTROL_MAX_AGE, PREFLIGHT_MAX_AGE_SECONDS))
            .insert_header((header::VARY, "Access-Control-Request-Headers"))
            .finish()
    })
}

/// Checks that the credential may call from the request's origin, and returns the origin for the browser. `None` if
/// the request has none. `public_url` is the address of the service's own pages.
pub fn check_origin(
    headers: &HeaderMap,
    public_url: Option<&Url>,
    verified: &Verified,
) -> Result<Option<HeaderValue>> {
    let mut all = headers.get_all(header::ORIGIN);
    let Some(sent) = all.next() else {
        return Ok(None);
    };
    let origin = sent
        .to_str()
        .ok()
        .filter(|_| all.next().is_none())
        .and_then(|text| text.parse::<Origin>().ok());
    let is_allowed = origin.as_ref().is_some_and(|origin| {
        is_public(origin, public_url)
            || is_served_here(origin, headers)
            || verified.allows_origin(origin)
    });
    if is_allowed {
        Ok(Some(sent.clone()))
    } else {
        let detail = "the tenant has not allowed calls from this origin";
        Err(Error::new(Code::OriginNotAllowed, detail))
    }
}

fn is_public(origin: &Origin, public_url: Option<&Url>) -> bool {
    public_url.is_some_and(|url| url.origin().ascii_serialization() == origin.as_str())
}

/// Whether the page came from the address that it calls. The host proves it only if it is an IP address or
/// `localhost`: the owner of a name can point it at us, and the page would count as our own.
fn is_served_here(origin: &Origin, headers: &HeaderMap) -> bool {
    let host = headers.get(header::HOST);
    let called = host.and_then(|host| host.to_str().ok());
    let authority = origin.authority();
    let name = match authority.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        Some(_) | None => authority,
    };
    let address = name.trim_start_matches('[').trim_end_matches(']');
    let fixed = name == "localhost" || address.parse::<IpAddr>().is_ok();
    fixed && called == Some(authority)
}

/// Lets the page at `origin` read the answer.
pub fn allow(headers: &mut HeaderMap, origin: HeaderValue) {
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.insert(
        header::ACCESS_CONTROL_EXPOSE_HEADERS,
        HeaderValue::from_static(EXPOSED),
    );
    headers.append(header::VARY, HeaderValue::from_static("Origin"));
}

/// For the refusal of a credential. The refusal reveals nothing about any tenant, and a page must be able to read
/// that its token has expired.
pub fn allow_anyone(headers: &mut HeaderMap) {
    headers.insert(
        header::ACCESS_CONTROL_ALLOW_ORIGIN,
        HeaderValue::from_static("*"),
    );
}
