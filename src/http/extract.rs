//! Strict reading of bodies, queries and paths: what is malformed, mistyped, unknown, too large or
//! too deep is refused here with a pointer, so that no handler sees it and nothing becomes a 500.

use std::future::{Future, Ready, ready};
use std::pin::Pin;
use std::str::FromStr;
use std::time::Duration;

use actix_web::dev::Payload;
use actix_web::http::header;
use actix_web::web::{self, BytesMut};
use actix_web::{FromRequest, HttpMessage, HttpRequest};
use futures_util::StreamExt;
use percent_encoding::percent_decode_str;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::objects::Objects;
use crate::crypto;
use crate::domain::platform::{InvalidPlatform, PlatformScope};
use crate::domain::resource_name::{InvalidResourceName, ResourceName};
use crate::domain::session_name::{SessionKey, SessionRef};
use crate::error::{Code, Error, FieldError, Result, escape_pointer};

pub const MAX_JSON_BYTES: usize = 1024 * 1024;
/// For the few routes that take in what many calls have made.
pub const MAX_LARGE_JSON_BYTES: usize = 16 * MAX_JSON_BYTES;
/// Each value costs memory, however few bytes it has in the body.
const MAX_VALUES: usize = 500_000;
/// A body that trickles in longer holds a connection for nothing.
pub(super) const BODY_DEADLINE: Duration = Duration::from_secs(20);
const LARGE_BODY_DEADLINE: Duration = Duration::from_secs(50);

/// A JSON body of the documented shape, and a hash that is equal for equal JSON.
pub struct JsonBody<T, const MAX_BYTES: usize = MAX_JSON_BYTES> {
    pub value: T,
    pub hash: [u8; 32],
}

pub type LargeJsonBody<T> = JsonBody<T, MAX_LARGE_JSON_BYTES>;

impl<T, const MAX_BYTES: usize> FromRequest for JsonBody<T, MAX_BYTES>
where
    T: DeserializeOwned + Send + 'static,
{
    type Error = Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self>>>>;

    fn from_request(request: &HttpRequest, payload: &mut Payload) -> Self::Future {
        let checked = check_head(request, MAX_BYTES);
        let mut payload = payload.take();
        let deadline = match MAX_BYTES > MAX_JSON_BYTES {
            true => LARGE_BODY_DEADLINE,
            false => BODY_DEADLINE,
        };
        Box::pin(async move {
            checked?;
            let bytes = read_within(&mut payload, MAX_BYTES, deadline).await?;
            let (value, hash) = match bytes.len() > MAX_JSON_BYTES {
                // Long enough for others on this thread to notice.
                true => web::block(move || parse_json(&bytes))
                    .await
                    .map_err(Error::internal)??,
                false => parse_json(&bytes)?,
            };
            Ok(Self { value, hash })
        })
    }
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

/// The value, and a hash of it that does not depend on spelling.
fn parse_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<(T, [u8; 32])> {
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
    if let Some(pointer) = find_nul(&whole, &mut String::new()) {
        let error = FieldError::new(pointer, "text must not contain the character U+0000");
        return Err(Error::invalid(vec![error]));
    }
    let hash = crypto::sha256(&serde_json::to_vec(&whole).map_err(Error::internal)?);
    // From the text and not from `whole`, where a member given twice is no longer seen.
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(Objects(&mut deserializer)).map_err(|error| {
        let pointer = pointer(error.path());
        let detail = without_place(&error.into_inner().to_string());
        Error::fields(Code::InvalidRequest, vec![FieldError::new(pointer, detail)])
    })?;
    Ok((value, hash))
}

/// Where the first text with a NUL is: Postgres cannot hold one.
fn find_nul(value: &Value, path: &mut String) -> Option<String> {
    let descend = |key: &str, child: &Value, path: &mut String| {
        let length = path.len();
        path.push('/');
        path.push_str(&escape_pointer(key));
        let found = find_nul(child, path);
        path.truncate(length);
        found
    };
    match value {
        Value::String(text) => text.contains('\0').then(|| path.clone()),
        Value::Array(items) => items
            .iter()
            .enumerate()
            .find_map(|(place, item)| descend(&place.to_string(), item, path)),
        Value::Object(members) => members.iter().find_map(|(key, member)| {
            if key.contains('\0') {
                Some(path.clone())
            } else {
                descend(key, member, path)
            }
        }),
        Value::Null | Value::Bool(_) | Value::Number(_) => None,
    }
}

/// A JSON pointer (RFC 6901).
fn pointer(path: &serde_path_to_error::Path) -> String {
    use serde_path_to_error::Segment;
    path.iter()
        .map(|segment| match segment {
            Segment::Seq { index } => format!("/{index}"),
            Segment::Map { key } => format!("/{}", escape_pointer(key)),
            Segment::Enum { .. } | Segment::Unknown => String::new(),
        })
        .collect()
}

/// The pointer tells the place; line and column would tell it twice.
fn without_place(message: &str) -> String {
    match message.rfind(" at line ") {
        Some(end) => message[..end].to_owned(),
        None => message.to_owned(),
    }
}

/// Query parameters of the documented shape: an unknown one is refused like an unknown member.
pub struct Query<T>(pub T);

impl<T: DeserializeOwned> FromRequest for Query<T> {
    type Error = Error;
    type Future = Ready<Result<Self>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        ready(parse_query(request.query_string()).map(Self))
    }
}

fn parse_query<T: DeserializeOwned>(query: &str) -> Result<T> {
    let wrong = |pointer: &str, detail: String| {
        Error::fields(Code::InvalidRequest, vec![FieldError::new(pointer, detail)])
    };
    if let Some((name, _)) =
        url::form_urlencoded::parse(query.as_bytes()).find(|(_, value)| value.contains('\0'))
    {
        let detail = "must not contain the character U+0000".to_owned();
        return Err(wrong(&format!("/query/{}", escape_pointer(&name)), detail));
    }
    serde_path_to_error::deserialize(serde_urlencoded::Deserializer::new(
        url::form_urlencoded::parse(query.as_bytes()),
    ))
    .map_err(|error| {
        let place = format!("/query{}", pointer(error.path()));
        wrong(&place, error.into_inner().to_string())
    })
}

/// The `{id}` of a path. One that cannot be an id names nothing: 404, like one that is not there.
pub struct PathId<T>(pub T);

impl<T: FromStr> FromRequest for PathId<T> {
    type Error = Error;
    type Future = Ready<Result<Self>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        let id = request.match_info().get("id").unwrap_or_default();
        ready(
            id.parse()
                .map(Self)
                .map_err(|_| Error::new(Code::NotFound, "no such thing")),
        )
    }
}

/// The `{id}` of a path that names a session, by the service's id or by the client's own.
pub struct PathSession(pub SessionRef);

impl FromRequest for PathSession {
    type Error = Error;
    type Future = Ready<Result<Self>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        let id = decoded(request, "id");
        ready(SessionRef::parse(&id, "/path/id").map(Self))
    }
}

/// The `{key}` of a path.
pub struct PathKey(pub SessionKey);

impl FromRequest for PathKey {
    type Error = Error;
    type Future = Ready<Result<Self>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        let key = decoded(request, "key");
        ready(SessionKey::parse(&key, "/path/key").map(Self))
    }
}

/// The `{platform}` of a path.
pub struct PathPlatform(pub PlatformScope);

impl FromRequest for PathPlatform {
    type Error = Error;
    type Future = Ready<Result<Self>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        let parsed = decoded(request, "platform").parse().map(Self);
        ready(parsed.map_err(|error: InvalidPlatform| {
            let error = FieldError::new("/path/platform", error.to_string());
            Error::fields(Code::InvalidRequest, vec![error])
        }))
    }
}

/// A part of the path as the client meant it. The router leaves `%25`, `%2B` and `%2F` as they are, and
/// only these. What is not UTF-8 then breaks the rule of any name.
fn decoded(request: &HttpRequest, part: &str) -> String {
    let text = request.match_info().get(part).unwrap_or_default();
    percent_decode_str(text).decode_utf8_lossy().into_owned()
}

/// For a member of a body: tells null from absent.
pub fn given<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Option<Option<T>>, D::Error> {
    Option::<T>::deserialize(deserializer).map(Some)
}

/// The `{name}` of a path, for things that tenants name themselves.
pub struct PathName(Option<ResourceName>);

impl FromRequest for PathName {
    type Error = Error;
    type Future = Ready<Result<Self>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        let name = request.match_info().get("name").unwrap_or_default();
        ready(Ok(Self(name.parse().ok())))
    }
}

impl PathName {
    /// For reading: a name that nothing can have names nothing.
    pub fn or_missing(self) -> Result<ResourceName> {
        self.0
            .ok_or_else(|| Error::new(Code::NotFound, "no such thing"))
    }

    /// For making: the rule is told.
    pub fn or_invalid(self) -> Result<ResourceName> {
        self.0.ok_or_else(|| {
            let error = FieldError::new("/path/name", InvalidResourceName.to_string());
            Error::invalid(vec![error])
        })
    }
}

#[cfg(test)]
mod tests {
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
        let error = match parse_json::<Sample>(body) {
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
        check(br#"{"name": "a\u0000b"}"#, Code::InvalidValue, "/name");
        check(
            br#"{"name": "a", "items": ["\u0000"]}"#,
            Code::InvalidValue,
            "/items/0",
        );
    }

    #[test]
    fn equal_json_has_an_equal_hash() {
        let hash = |text: &str| parse_json::<Sample>(text.as_bytes()).unwrap().1;
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

    #[test]
    fn an_unknown_or_mistyped_query_parameter_is_pointed_at() {
        #[derive(Debug, Deserialize)]
        #[serde(deny_unknown_fields)]
        #[expect(dead_code, reason = "only its shape matters")]
        struct Params {
            limit: Option<u32>,
        }
        for (query, pointer) in [
            ("limit=x", "/query/limit"),
            ("color=1", "/query/color"),
            ("limit=%00", "/query/limit"),
        ] {
            let error = parse_query::<Params>(query).unwrap_err();
            assert_eq!(error.errors[0].pointer, pointer, "{}", error.detail);
        }
        assert!(parse_query::<Params>("limit=5").is_ok());
    }
}
