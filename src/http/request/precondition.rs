//! `If-Match` on a number: a message's last `seq`, a key's `generation`. The ETag has the same number.

use std::future::{Ready, ready};

use actix_web::dev::Payload;
use actix_web::http::header::{self, HeaderValue};
use actix_web::{FromRequest, HttpRequest};

use crate::error::{Code, Error, FieldError, Result};

/// The expected number; `None` if any is accepted.
pub struct IfMatch(pub Option<i64>);

impl FromRequest for IfMatch {
    type Error = Error;
    type Future = Ready<Result<Self>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        ready(match request.headers().get(header::IF_MATCH) {
            None => Ok(Self(None)),
            Some(value) => value.to_str().ok().and_then(parse).ok_or_else(|| {
                let detail = "must be the ETag's number, or *";
                let error = FieldError::new("/header/If-Match", detail);
                Error::fields(Code::InvalidRequest, vec![error])
            }),
        })
    }
}

fn parse(text: &str) -> Option<IfMatch> {
    let text = text.trim();
    if text == "*" {
        return Some(IfMatch(None));
    }
    let digits = match text.strip_prefix('"') {
        Some(rest) => rest.strip_suffix('"')?,
        None => text,
    };
    let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    digits
        .parse()
        .ok()
        .filter(|_| plain)
        .map(|number| IfMatch(Some(number)))
}

pub fn etag(number: i64) -> (header::HeaderName, HeaderValue) {
    let value = HeaderValue::from_str(&format!("\"{number}\""));
    (header::ETAG, value.unwrap_or(HeaderValue::from_static("")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_read_with_or_without_quotes() {
        for (text, read) in [
            ("\"12\"", Some(Some(12))),
            ("12", Some(Some(12))),
            (" \"0\" ", Some(Some(0))),
            ("*", Some(None)),
            ("", None),
            ("\"", None),
            ("\"\"", None),
            ("-1", None),
            ("+1", None),
            ("\"1\", \"2\"", None),
            ("W/\"1\"", None),
            ("99999999999999999999", None),
        ] {
            assert_eq!(parse(text).map(|found| found.0), read, "{text}");
        }
    }
}
