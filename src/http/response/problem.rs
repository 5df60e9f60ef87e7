//! The one place where an `Error` becomes an answer: problem+json on Throughline's own endpoints, the
//! OpenAI shape on the compatible ones. Causes are logged here, once, and never shown.

use std::borrow::Cow;

use actix_web::http::StatusCode;
use actix_web::http::header::{self, HeaderName, HeaderValue};
use actix_web::{HttpResponse, ResponseError};
use serde::Serialize;

use crate::error::{Code, Error, FieldError};
use crate::http::fallback::is_of_responses;
use crate::telemetry::{self, CallPurpose};

pub const CONTENT_TYPE: &str = "application/problem+json";

/// RFC 9457.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct Problem {
    /// Names the kind of problem: `urn:throughline:error:` and the code.
    pub r#type: String,
    pub title: String,
    pub status: u16,
    pub detail: String,
    /// Stable: compare with this.
    pub code: String,
    pub request_id: String,
    /// Which fields were wrong.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<FieldError>,
}

#[derive(Serialize)]
struct OpenAiEnvelope<'a> {
    error: OpenAiError<'a>,
}

#[derive(Serialize)]
struct OpenAiError<'a> {
    message: Cow<'a, str>,
    r#type: &'a str,
    param: Option<String>,
    code: &'a str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    Problem,
    OpenAi,
}

impl Shape {
    /// Official clients of OpenAI read errors on these paths.
    pub fn of_path(path: &str) -> Self {
        let compatible = path == "/v1/models"
            || path.starts_with("/v1/models/")
            || path.starts_with("/v1/chat/")
            || is_of_responses(path);
        if compatible {
            Self::OpenAi
        } else {
            Self::Problem
        }
    }
}

pub fn render(error: &Error, request_id: &str, shape: Shape) -> HttpResponse {
    log_cause(error, request_id);
    let mut answer = build(error, request_id, shape);
    // For the request's line in the log.
    answer.extensions_mut().insert(error.code);
    answer
}

fn build(error: &Error, request_id: &str, shape: Shape) -> HttpResponse {
    let status =
        StatusCode::from_u16(error.code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = HttpResponse::build(status);
    if !error.code.retry_helps() || error.is_final {
        response.insert_header(("x-should-retry", "false"));
    }
    if status == StatusCode::UNAUTHORIZED {
        response.insert_header((header::WWW_AUTHENTICATE, "Bearer"));
    }
    if let Some(seconds) = error.retry_after {
        response.insert_header((header::RETRY_AFTER, seconds));
    } else if status == StatusCode::SERVICE_UNAVAILABLE {
        response.insert_header((header::RETRY_AFTER, "1"));
    }
    for (name, value) in &error.headers {
        if let Ok(value) = HeaderValue::from_str(value) {
            response.insert_header((HeaderName::from_static(name), value));
        }
    }
    if let Some(allow) = &error.allow
        && let Ok(allow) = HeaderValue::from_str(allow)
    {
        response.insert_header((header::ALLOW, allow));
    }
    match shape {
        Shape::Problem => response
            .content_type(CONTENT_TYPE)
            .json(problem(error, request_id)),
        Shape::OpenAi => response.json(openai_envelope(error)),
    }
}

fn openai_envelope(error: &Error) -> OpenAiEnvelope<'_> {
    let first = error.errors.first();
    let param = first.map(|first| openai_param(&first.pointer));
    let rest = first.and_then(|first| error.detail.strip_prefix(first.pointer.as_str()));
    let message = match (rest, &param) {
        (Some(rest), Some(param)) => Cow::Owned(format!("{param}{rest}")),
        (Some(_) | None, _) => Cow::Borrowed(error.detail.as_str()),
    };
    OpenAiEnvelope {
        error: OpenAiError {
            message,
            r#type: openai_type(error.code),
            param,
            code: error.code.as_str(),
        },
    }
}

/// A pointer as OpenAI writes it: `/messages/0/content` is `messages[0].content`. Of what is not in the body only
/// the name.
fn openai_param(pointer: &str) -> String {
    let mut param = String::new();
    let elsewhere = ["/header/", "/query/", "/path/"];
    let outside = elsewhere.iter().find_map(|part| pointer.strip_prefix(part));
    for name in outside
        .unwrap_or(pointer)
        .split('/')
        .filter(|name| !name.is_empty())
    {
        let name = name.replace("~1", "/").replace("~0", "~");
        let is_place = !param.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit());
        if is_place {
            param.push_str(&format!("[{name}]"));
        } else {
            if !param.is_empty() {
                param.push('.');
            }
            param.push_str(&name);
        }
    }
    param
}

/// An error in the middle of a stream, whose head has left long ago.
pub fn openai_body(error: &Error) -> String {
    serde_json::to_string(&openai_envelope(error)).unwrap_or_default()
}

fn problem(error: &Error, request_id: &str) -> Problem {
    Problem {
        r#type: format!("urn:throughline:error:{}", error.code.as_str()),
        title: error.code.title().to_owned(),
        status: error.code.status(),
        detail: error.detail.clone(),
        code: error.code.as_str().to_owned(),
        request_id: request_id.to_owned(),
        errors: error.errors.clone(),
    }
}

/// The classes that the official clients know.
fn openai_type(code: Code) -> &'static str {
    match code.status() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        409 => "conflict_error",
        429 => "rate_limit_error",
        400..=499 => "invalid_request_error",
        _ => "server_error",
    }
}

fn log_cause(error: &Error, request_id: &str) {
    if let Some(cause) = &error.cause {
        let code = error.code.as_str();
        let cause = format!("{cause:#}");
        // A request that lost against another is nothing that an operator could mend.
        if matches!(error.code, Code::Conflict | Code::Busy) {
            tracing::info!(request_id, code, cause, "request conflicted");
        } else {
            tracing::error!(request_id, code, cause, "request failed");
        }
    }
    if let Some(failed) = &error.failed_call {
        telemetry::warn_of_failed_call(failed, CallPurpose::Request(request_id));
    }
}

/// The error of anything that is not ours: actix's own refusals, told by their status alone.
pub fn from_status(status: StatusCode) -> Error {
    let code = match status.as_u16() {
        401 => Code::Unauthorized,
        404 => Code::NotFound,
        405 => Code::MethodNotAllowed,
        408 => Code::RequestTimeout,
        413 => Code::PayloadTooLarge,
        414 => Code::UriTooLong,
        415 => Code::UnsupportedMediaType,
        400..=499 => Code::InvalidRequest,
        503 => Code::Unavailable,
        504 => Code::Timeout,
        _ => Code::Internal,
    };
    Error::new(code, code.title())
}

/// Handlers fail with `Error`; `http::context` renders it again with the request's id and shape.
impl ResponseError for Error {
    fn status_code(&self) -> StatusCode {
        StatusCode::from_u16(self.code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }

    fn error_response(&self) -> HttpResponse {
        HttpResponse::new(self.status_code())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pointer_is_written_as_openai_writes_it() {
        for (pointer, param) in [
            ("/model", "model"),
            ("/messages/0/content", "messages[0].content"),
            ("/messages/12/tool_calls/3", "messages[12].tool_calls[3]"),
            ("/header/X-Hermes-Session-Id", "X-Hermes-Session-Id"),
            ("/a~1b", "a/b"),
        ] {
            assert_eq!(openai_param(pointer), param);
        }
        let error = Error::fields(
            Code::ModelNotFound,
            vec![FieldError::new("/model", "there is no such agent")],
        );
        let body: serde_json::Value = serde_json::from_str(&openai_body(&error)).unwrap();
        assert_eq!(body["error"]["message"], "model: there is no such agent");
        assert_eq!(body["error"]["param"], "model");
    }
}
