//! Strict reading of JSON bodies: what is malformed, mistyped, unknown, too large or too deep is refused here
//! with a pointer, so that no handler sees it and nothing becomes a 500.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use actix_web::dev::Payload;
use actix_web::http::header;
use actix_web::web::{self, BytesMut};
use actix_web::{FromRequest, HttpMessage, HttpRequest};
use futures_util::StreamExt;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::extract::pointer;
use super::objects::Objects;
use super::retry;
use crate::crypto;
use crate::domain::outside_text::normalise_json;
use crate::error::{Code, Error, FieldError, Result};

pub const MAX_JSON_BYTES: usize = 1024 * 1024;
/// For the few routes that take in what many calls have made.
pub const MAX_LARGE_JSON_BYTES: usize = 16 * MAX_JSON_BYTES;
/// Each value costs memory, however few bytes it has in the body.
const MAX_VALUES: usize = 500_000;
/// A body that trickles in longer holds a connection for nothing.
pub(super) const BODY_DEADLINE: Duration = Duration::from_secs(20);
const LARGE_BODY_DEADLINE: Duration = Duration::from_secs(50);

/// A JSON body of the documented shape.
pub struct JsonBody<T, const MAX_BYTES: usize = MAX_JSON_BYTES> {
    pub value: T,
    pub hash: BodyHash,
}

pub type LargeJsonBody<T> = JsonBody<T, MAX_LARGE_JSON_BYTES>;

/// A JSON object whose members are looked at later.
pub struct LargeJsonObject {
    pub members: Map<String, Value>,
    pub hash: BodyHash,
}

/// Equal for equal JSON. Only who sends an `Idempotency-Key` has one: for nothing else is it needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BodyHash(Option<[u8; 32]>);

impl BodyHash {
    pub fn of_nothing() -> Self {
        Self(Some(crypto::sha256(&[])))
    }

    /// Together with what else is asked.
    pub fn with(self, more: &[u8]) -> Self {
        let together = |hash: [u8; 32]| crypto::sha256(&[&hash[..], more].concat());
        Self(self.0.map(together))
    }

    pub fn get(self) -> Option<[u8; 32]> {
        self.0
    }
}

type Reading<T> = Pin<Box<dyn Future<Output = Result<T>>>>;

impl<T, const MAX_BYTES: usize> FromRequest for JsonBody<T, MAX_BYTES>
where
    T: DeserializeOwned + Send + 'static,
{
    type Error = Error;
    type Future = Reading<Self>;

    fn from_request(request: &HttpRequest, payload: &mut Payload) -> Self::Future {
        read_json(request, payload, MAX_BYTES, |bytes, hashed| {
            let (value, hash) = parse_json(bytes, hashed)?;
            Ok(Self { value, hash })
        })
    }
}

/// A JSON body that may be left out.
pub struct OptionalJsonBody<T>(pub Option<JsonBody<T>>);

impl<T> OptionalJsonBody<T> {
    pub fn hash(&self) -> BodyHash {
        self.0
            .as_ref()
            .map_or_else(BodyHash::of_nothing, |body| body.hash)
    }
}

impl<T> FromRequest for OptionalJsonBody<T>
where
    T: DeserializeOwned + Send + 'static,
{
    type Error = Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self>>>>;

    fn from_request(request: &HttpRequest, payload: &mut Payload) -> Self::Future {
        let headers = request.headers();
        let length = headers.get(header::CONTENT_LENGTH);
        let is_empty = length.is_none_or(|length| length == "0")
            && !headers.contains_key(header::TRANSFER_ENCODING);
        if is_empty {
            return Box::pin(std::future::ready(Ok(Self(None))));
        }
        let body = JsonBody::<T>::from_request(request, payload);
        Box::pin(async move { Ok(Self(Some(body.await?))) })
    }
}

impl FromRequest for LargeJsonObject {
    type Error = Error;
    type Future = Reading<Self>;

    fn from_request(request: &HttpRequest, payload: &mut Payload) -> Self::Future {
        read_json(request, payload, MAX_LARGE_JSON_BYTES, parse_object)
    }
}

/// The body as `parse` reads it, which is also told whether the hash is needed.
fn read_json<T: Send + 'static>(
    request: &HttpRequest,
    payload: &mut Payload,
    max_bytes: usize,
    parse: fn(&[u8], bool) -> Result<T>,
) -> Reading<T> {
    let checked = check_head(request, max_bytes);
    let hashed = request.headers().contains_key(retry::HEADER);
    let mut payload = payload.take();
    let deadline = match max_bytes > MAX_JSON_BYTES {
        true => LARGE_BODY_DEADLINE,
        false => BODY_DEADLINE,
    };
    Box::pin(async move {
        checked?;
        let bytes = read_within(&mut payload, max_bytes, deadline).await?;
        match bytes.len() > MAX_JSON_BYTES {
            // Long enough for others on this thread to notice.
            true => web::block(move || parse(&bytes, hashed))
                .await
                .map_err(Error::internal)?,
            false => parse(&bytes, hashed),
        }
    })
}

fn check_head(request: &HttpRequest, max_bytes: usize) -> Result<()> {
    let json = request
        .mime_type()
        .ok()
        .flatten()
        .is_some_and(|mime| mime.essence_str() == "application/json");
    if !json {
        let detail = "send the body as Content-Type: application/json";
        return Err(Error::new(Code::UnsupportedMediaType, detail));
    }
    let encoding = request.headers().get(header::CONTENT_ENCODING);
    if encoding.is_some_and(|encoding| encoding != "identity") {
        let detail = "send the body without Content-Encoding";
        return Err(Error::new(Code::UnsupportedMediaType, detail));
    }
    check_length(request, max_bytes)
}

pub(super) fn check_length(request: &HttpRequest, max_bytes: usize) -> Result<()> {
    let announced = request
        .headers()
        .get(header::CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok())
        .and_then(|text| text.parse::<usize>().ok());
    if announced.is_some_and(|length| length > max_bytes) {
        return Err(too_large(max_bytes));
    }
    Ok(())
}

fn too_large(max_bytes: usize) -> Error {
    let detail = format!("a body has at most {max_bytes} bytes");
    Error::new(Code::PayloadTooLarge, detail)
}

pub(super) async fn read_within(
    payload: &mut Payload,
    max_bytes: usize,
    deadline: Duration,
) -> Result<BytesMut> {
    tokio::time::timeout(deadline, read(payload, max_bytes))
        .await
        .map_err(|_| Error::new(Code::RequestTimeout, "the body did not arrive in time"))?
}

async fn read(payload: &mut Payload, max_bytes: usize) -> Result<BytesMut> {
    let mut bytes = BytesMut::new();
    while let Some(chunk) = payload.next().await {
        let broken = |_| Error::new(Code::InvalidRequest, "the body broke off");
        let chunk = chunk.map_err(broken)?;
        if bytes.len() + chunk.len() > max_bytes {
            return Err(too_large(max_bytes));
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}

/// How many values a text has at least, if it is JSON: all but the first of a list or an object
/// follow a comma.
fn count_values(bytes: &[u8]) -> usize {
    let (mut count, mut in_text, mut escaped) = (1, false, false);
    for byte in bytes {
        match (in_text, *byte) {
            (true, _) if escaped => escaped = false,
            (true, b'\\') => escaped = true,
            (_, b'"') => in_text = !in_text,
            (false, b',' | b'[' | b'{') => count += 1,
            (true | false, _) => {}
        }
    }
    count
}

/// The whole body as JSON, with its text: valid, and of not too many values.
fn read_values(bytes: &[u8]) -> Result<(Value, &str)> {
    if count_values(bytes) > MAX_VALUES {
        let detail = format!("a body has at most {MAX_VALUES} values");
        return Err(Error::new(Code::PayloadTooLarge, detail));
    }
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let detail = format!("not UTF-8 at byte {}", error.valid_up_to());
        Error::new(Code::InvalidJson, detail)
    })?;
    // Also finds numbers and nesting that no type asks for: the whole body is valid JSON or none of it.
    let whole: Value = serde_json::from_str(text).map_err(|error| {
        Error::fields(
            Code::InvalidJson,
            vec![FieldError::new("", error.to_string())],
        )
    })?;
    Ok((whole, text))
}

fn hash_of(whole: &Value, hashed: bool) -> Result<BodyHash> {
    let hash = match hashed {
        true => Some(crypto::sha256(
            &serde_json::to_vec(whole).map_err(Error::internal)?,
        )),
        false => None,
    };
    Ok(BodyHash(hash))
}

fn parse_object(bytes: &[u8], hashed: bool) -> Result<LargeJsonObject> {
    let bytes = normalise_json(bytes);
    let (whole, _) = read_values(&bytes)?;
    let hash = hash_of(&whole, hashed)?;
    let Value::Object(members) = whole else {
        let error = FieldError::new("", "must be a JSON object");
        return Err(Error::fields(Code::InvalidRequest, vec![error]));
    };
    Ok(LargeJsonObject { members, hash })
}

/// The value, and a hash of it that does not depend on spelling.
fn parse_json<T: DeserializeOwned>(bytes: &[u8], hashed: bool) -> Result<(T, BodyHash)> {
    let bytes = normalise_json(bytes);
    let (whole, text) = read_values(&bytes)?;
    let hash = hash_of(&whole, hashed)?;
    // From the text and not from `whole`, where a member given twice is no longer seen.
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(Objects(&mut deserializer)).map_err(|error| {
        let pointer = pointer(error.path());
        let detail = without_place(&error.into_inner().to_string());
        Error::fields(Code::InvalidRequest, vec![FieldError::new(pointer, detail)])
    })?;
    Ok((value, hash))
}

/// The pointer tells the place; line and column would tell it twice.
fn without_place(message: &str) -> String {
    match message.rfind(" at line ") {
        Some(end) => message[..end].to_owned(),
        None => message.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only its shape matters")]
    struct Sample {
        name: String,
        #[serde(default)]
        items: Vec<u8>,
        #[serde(default)]
        inner: Vec<Option<Inner>>,
    }

    #[derive(Debug, Default, Deserialize)]
    #[serde(default)]
    struct Inner {
        a: u8,
    }

    fn check(body: &[u8], code: Code, pointer: &str) {
        let shown = String::from_utf8_lossy(&body[..body.len().min(60)]);
        let error = match parse_json::<Sample>(body, true) {
            Ok((value, _)) => panic!("{shown} was taken as {value:?}"),
            Err(error) => error,
        };
        assert_eq!(error.code, code, "{shown}: {}", error.detail);
        let found = error.errors.first().map_or("", |first| &first.pointer);
        assert_eq!(found, pointer, "{shown}: {}", error.detail);
    }

    #[test]
    fn what_is_wrong_is_pointed_at() {
        check(b"", Code::InvalidJson, "");
        check(b"{", Code::InvalidJson, "");
        check(b"{\"name\": \"\xff\"}", Code::InvalidJson, "");
        check(b"{\"name\": \"a\"} x", Code::InvalidJson, "");
        check("[".repeat(10_000).as_bytes(), Code::InvalidJson, "");
        check(b"[]", Code::InvalidRequest, "");
        check(b"{}", Code::InvalidRequest, "");
        check(br#"{"name": 1}"#, Code::InvalidRequest, "/name");
        check(br#"{"name": "a", "name": "b"}"#, Code::InvalidRequest, "");
        check(br#"{"name": "a", "x/y": 1}"#, Code::InvalidRequest, "/x~1y");
        check(
            br#"{"name": "a", "items": [1, -1]}"#,
            Code::InvalidRequest,
            "/items/1",
        );
        check(br#"["a", [1], []]"#, Code::InvalidRequest, "");
        check(
            br#"{"name": "a", "inner": [null, {}, {"a": 1}, []]}"#,
            Code::InvalidRequest,
            "/inner/3",
        );
    }

    #[test]
    fn equal_json_has_an_equal_hash() {
        let hash = |text: &str| parse_json::<Sample>(text.as_bytes(), true).unwrap().1;
        let one = hash(r#"{"name": "a", "items": [1]}"#);
        assert_eq!(one, hash(r#"{"items":[1],"name":"a"}"#));
        assert_ne!(one, hash(r#"{"items":[2],"name":"a"}"#));
    }

    #[test]
    fn values_are_counted_outside_of_texts() {
        for (text, count) in [
            ("1", 1),
            (r#"[1, 2, [3]]"#, 5),
            (r#"{"a": "[,\\\",{", "b,": {}}"#, 4),
        ] {
            assert_eq!(count_values(text.as_bytes()), count, "{text}");
        }
        let many = format!("[{}0]", "0,".repeat(MAX_VALUES));
        check(many.as_bytes(), Code::PayloadTooLarge, "");
    }
}
