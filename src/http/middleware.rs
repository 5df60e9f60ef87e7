//! What surrounds every request: its id, its deadline, its one log line, its metrics, and the
//! rendering of whatever error comes out.

use std::time::{Duration, Instant};

use actix_web::body::{BoxBody, MessageBody};
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::header::{self, HeaderMap, HeaderName, HeaderValue};
use actix_web::http::{ConnectionType, Method, StatusCode, Uri};
use actix_web::middleware::Next;
use actix_web::{HttpMessage, HttpRequest, HttpResponse, error::InternalError, web};
use tracing::Instrument;

use super::auth::middleware::Authenticated;
use super::response::problem::{self, Shape};
use super::response::{held_answer, in_span};
use super::{cors, hops, limits};
use crate::app::App;
use crate::error::{Code, Error};
use crate::ids::RequestId;
use crate::telemetry;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const MAX_REQUEST_ID: usize = 64;
const MAX_URI: usize = 8 * 1024;
/// Longer than the longest wait an endpoint promises (55 s); streams have begun by then.
const DEADLINE: Duration = Duration::from_secs(65);
/// Chat waits for a model as long as its agent says, an hour at most, and for turns that came before. Each of its
/// own steps ends sooner.
const CHAT_DEADLINE: Duration = Duration::from_secs(2 * 3600);
/// Before inbound waits for as long, a large message may come in slowly, and wait for room.
const INBOUND_DEADLINE: Duration = Duration::from_secs(150);
/// Asked for every second by balancers: their lines would hide all others.
const PROBES: [&str; 2] = ["/healthz", "/readyz"];

/// The route of a request that no handler takes.
const UNMATCHED: &str = "unmatched";

/// A request's id, for what is logged while it is answered.
struct KnownId(String);

/// The id of a request, or nothing outside of `wrap_request`.
pub fn id_of(request: &HttpRequest) -> String {
    let extensions = request.extensions();
    let known = extensions.get::<KnownId>();
    known.map(|known| known.0.clone()).unwrap_or_default()
}

/// Everything of a request happens in its span, also what its answer does while it is read.
pub async fn wrap_request(
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<BoxBody>, actix_web::Error> {
    let id = request_id(request.headers());
    let route = match uri_length(request.uri()) {
        0..=MAX_URI => request.match_pattern(),
        _ => None,
    };
    let route = route.as_deref().unwrap_or(UNMATCHED);
    let span = telemetry::request_span(&id, request.method().as_str(), route);
    let answered = answer(request, next, &id, route);
    let answered = answered.instrument(span.clone()).await;
    answered.map(|response| in_span::body(response, span))
}

async fn answer(
    mut request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
    id: &str,
    route: &str,
) -> Result<ServiceResponse<BoxBody>, actix_web::Error> {
    let started = Instant::now();
    let method = request.method().clone();
    let shape = Shape::of_path(request.path());
    let app = request.app_data::<web::Data<App>>().cloned();
    // Asked when the answer is there: it may have been waited for.
    let leaves = || app.is_some_and(|app| app.shutdown.is_draining());
    request.extensions_mut().insert(KnownId(id.to_owned()));
    if method == Method::HEAD {
        // AnsweredRequest like GET; the connection knows that it was HEAD and sends no body.
        request.head_mut().method = Method::GET;
    }
    let outcome = if uri_length(request.uri()) > MAX_URI {
        Err(Error::new(Code::UriTooLong, "the URI is too long").into())
    } else if let Some(error) = passed_before(&request) {
        Err(error.into())
    } else if let Some(answer) = cors::preflight(&method, request.headers()) {
        Ok(request.into_response(answer))
    } else {
        let deadline = deadline_of(request.path());
        match tokio::time::timeout(deadline, next.call(request)).await {
            Ok(outcome) => outcome.map(|response| {
                let response = rendered(response, id, shape);
                held_answer::hold(response, |refusal| problem::render(&refusal, id, shape))
            }),
            Err(_) => Err(Error::new(Code::Timeout, "the request took too long").into()),
        }
    };
    let mut response = match outcome {
        Ok(response) => response,
        Err(error) => {
            let mut answer = render_any(&error, id, shape);
            if leaves() {
                answer.head_mut().set_connection_type(ConnectionType::Close);
            }
            set_request_id(answer.headers_mut(), id);
            forbid_keeping(answer.headers_mut());
            log_request(&AnsweredRequest {
                id,
                method: method.as_str(),
                route: UNMATCHED,
                status: answer.status().as_u16(),
                code: code_of(&answer),
                tenant: None,
                took: started.elapsed(),
            });
            return Err(InternalError::from_response("", answer).into());
        }
    };
    if leaves() {
        let head = response.response_mut().head_mut();
        head.set_connection_type(ConnectionType::Close);
    }
    set_request_id(response.headers_mut(), id);
    forbid_keeping(response.headers_mut());
    limits::set_headers(&mut response);
    let (tenant, origin) = match response.request().extensions().get::<Authenticated>() {
        Some(known) => (known.tenant_id(), known.allowed_origin()),
        None => (None, None),
    };
    if let Some(origin) = origin {
        cors::allow(response.headers_mut(), origin);
    } else if response.status() == StatusCode::UNAUTHORIZED {
        cors::allow_anyone(response.headers_mut());
    }
    let tenant = tenant.map(|tenant| tenant.to_string());
    log_request(&AnsweredRequest {
        id,
        method: method.as_str(),
        route,
        status: response.status().as_u16(),
        code: code_of(response.response()),
        tenant: tenant.as_deref(),
        took: started.elapsed(),
    });
    Ok(response)
}

fn passed_before(request: &ServiceRequest) -> Option<Error> {
    let app = request.app_data::<web::Data<App>>()?;
    hops::check(request.headers(), &app.keyring).err()
}

fn deadline_of(path: &str) -> Duration {
    match path {
        "/v1/chat/completions" => CHAT_DEADLINE,
        "/v1/inbound" => INBOUND_DEADLINE,
        _ => DEADLINE,
    }
}

/// Renders an error that a handler or extractor left in its response.
fn rendered<B: MessageBody + 'static>(
    response: ServiceResponse<B>,
    id: &str,
    shape: Shape,
) -> ServiceResponse<BoxBody> {
    match response.response().error() {
        Some(error) => {
            let answer = render_any(error, id, shape);
            response.into_response(answer)
        }
        None => response.map_into_boxed_body(),
    }
}

fn render_any(error: &actix_web::Error, id: &str, shape: Shape) -> HttpResponse {
    match error.as_error::<Error>() {
        Some(error) => problem::render(error, id, shape),
        None => {
            let status = error.as_response_error().status_code();
            problem::render(&problem::from_status(status), id, shape)
        }
    }
}

/// A client's own id is kept if it is short and printable, so that its logs and ours meet.
fn request_id(headers: &HeaderMap) -> String {
    headers
        .get(&REQUEST_ID)
        .and_then(|value| value.to_str().ok())
        .filter(|text| (1..=MAX_REQUEST_ID).contains(&text.len()))
        .filter(|text| text.bytes().all(|byte| byte.is_ascii_graphic()))
        .map(str::to_owned)
        .unwrap_or_else(|| RequestId::generate().to_string())
}

/// Answers are about people and may hold secrets: no cache keeps them, unless they say so themselves, and no
/// browser takes them for something else.
fn forbid_keeping(headers: &mut HeaderMap) {
    if !headers.contains_key(header::CACHE_CONTROL) {
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    }
    let nosniff = HeaderValue::from_static("nosniff");
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, nosniff);
}

fn set_request_id(headers: &mut HeaderMap, id: &str) {
    if let Ok(value) = HeaderValue::from_str(id) {
        headers.insert(REQUEST_ID, value);
    }
}

fn uri_length(uri: &Uri) -> usize {
    uri.path_and_query().map_or(0, |text| text.as_str().len())
}

struct AnsweredRequest<'a> {
    id: &'a str,
    method: &'a str,
    route: &'a str,
    status: u16,
    code: Option<&'static str>,
    tenant: Option<&'a str>,
    took: Duration,
}

/// The code of an error that `problem::render` made an answer of.
fn code_of<B>(answer: &HttpResponse<B>) -> Option<&'static str> {
    answer.extensions().get::<Code>().map(|code| code.as_str())
}

macro_rules! log_line {
    ($level:ident, $answered:ident) => {
        tracing::$level!(
            target: telemetry::REQUESTS,
            request_id = $answered.id,
            tenant = $answered.tenant,
            method = $answered.method,
            route = $answered.route,
            status = $answered.status,
            code = $answered.code,
            duration_ms = $answered.took.as_micros() as f64 / 1000.0,
            "request"
        )
    };
}

/// The route's pattern and not the path: a path can hold what a person typed.
fn log_request(answered: &AnsweredRequest) {
    telemetry::record_request(
        answered.method,
        answered.route,
        answered.status,
        answered.took.as_secs_f64(),
    );
    if PROBES.contains(&answered.route) {
        log_line!(debug, answered);
    } else {
        log_line!(info, answered);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chat_is_not_cut_off_before_a_model_may_answer() {
        assert!(deadline_of("/v1/chat/completions") > Duration::from_secs(3600));
        assert_eq!(deadline_of("/v1/sessions"), DEADLINE);
    }

    #[test]
    fn a_message_that_came_in_slowly_is_still_answered() {
        let room = 10;
        let upload = 50;
        let parsers = 30;
        let wait = 55;
        let most = Duration::from_secs(room + upload + parsers + wait);
        assert!(deadline_of("/v1/inbound") > most);
    }
}
