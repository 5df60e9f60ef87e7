//! Strict parsing of JSON bodies: a malformed, mistyped, unknown, too large or too deep one is refused here with a
//! pointer, so that no handler receives it and nothing becomes a 500.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use actix_web::dev::Payload;
use actix_web::http::header;
use actix_web::web::{self, BytesMut};
use actix_web::{FromRequest, HttpMessage, HttpRequest};
use futures_util::StreamExt;
use serde::de::DeserializeOwned;
use tokio::task::yield_now;
use tokio::time::timeout;

use super::extract::pointer;
use super::idempotency_key;
use super::objects::Objects;
use crate::app::App;
use crate::crypto;
use crate::domain::values::json_text::{self, JsonError, Measurement};
use crate::domain::values::outside_text::normalise_json;
use crate::error::{Code, Error, FieldError, Result};
use crate::fair_queue::{Holder, Permit};
use crate::http::auth::middleware::Authenticated;
use crate::limits::{MAX_VALUES_COST, Memory, NodeShares};

pub const MAX_JSON_BYTES: usize = 1024 * 1024;
/// For the few routes whose bodies hold the results of many calls.
pub const MAX_LARGE_JSON_BYTES: usize = 16 * MAX_JSON_BYTES;
/// A larger body takes long enough to parse to delay the other requests of its thread.
pub const SMALL_BYTES: usize = 64 * 1024;
const SMALL_COST: usize = 1024 * 1024;
/// A body that takes longer to arrive holds a connection for nothing.
pub(in crate::http) const BODY_DEADLINE: Duration = Duration::from_secs(20);
const LARGE_BODY_DEADLINE: Duration = Duration::from_secs(50);
/// Between two chunks of a body.
const PIECE_DEADLINE: Duration = Duration::from_secs(10);

/// A JSON body of the documented shape.
pub struct JsonBody<T, const MAX_BYTES: usize = MAX_JSON_BYTES> {
    pub value: T,
    pub hash: BodyHash,
    /// Held as long as the value is used.
    pub memory: Memory,
}

pub type LargeJsonBody<T> = JsonBody<T, MAX_LARGE_JSON_BYTES>;

/// A type that is parsed from a JSON text; a large text is parsed off the threads that serve requests.
pub trait FromJsonText: Sized + Send + 'static {
    fn from_json_text(text: &str) -> Result<Self>;
}

/// A large JSON body that its type parses itself, and that may be forwarded.
pub struct LargeJsonText<T> {
    pub value: T,
    pub hash: BodyHash,
    /// For its bytes, held as long as they are forwarded.
    pub bytes_memory: Memory,
    /// Held as long as the value is used.
    pub memory: Memory,
}

/// Equal for equal JSON. Only a request with an `Idempotency-Key` has one: nothing else needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BodyHash(Option<[u8; 32]>);

impl BodyHash {
    pub fn empty() -> Self {
        Self(Some(crypto::sha256(&[])))
    }

    /// Combined with the rest of the request.
    pub fn with(self, more: &[u8]) -> Self {
        let combine = |hash: [u8; 32]| crypto::sha256(&[&hash[..], more].concat());
        Self(self.0.map(combine))
    }

    pub fn get(self) -> Option<[u8; 32]> {
        self.0
    }
}

impl<T, const MAX_BYTES: usize> FromRequest for JsonBody<T, MAX_BYTES>
where
    T: DeserializeOwned + Send + 'static,
{
    type Error = Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self>>>>;

    fn from_request(request: &HttpRequest, payload: &mut Payload) -> Self::Future {
        let reading = PendingBody::new(request, payload, MAX_BYTES, parse_typed);
        Box::pin(async move {
            let read = reading?.read().await?;
            Ok(Self {
                value: read.value,
                hash: read.hash,
                memory: read.memory,
            })
        })
    }
}

/// An optional JSON body.
pub struct OptionalJsonBody<T>(pub Option<JsonBody<T>>);

impl<T> OptionalJsonBody<T> {
    pub fn hash(&self) -> BodyHash {
        self.0
            .as_ref()
            .map_or_else(BodyHash::empty, |body| body.hash)
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

impl<T: FromJsonText> FromRequest for LargeJsonText<T> {
    type Error = Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self>>>>;

    fn from_request(request: &HttpRequest, payload: &mut Payload) -> Self::Future {
        let reading = PendingBody::new(request, payload, MAX_LARGE_JSON_BYTES, T::from_json_text);
        Box::pin(async move {
            let read = reading?.read().await?;
            Ok(Self {
                value: read.value,
                hash: read.hash,
                bytes_memory: read.bytes_memory,
                memory: read.memory,
            })
        })
    }
}

/// A body that is about to be read.
struct PendingBody<T> {
    payload: Payload,
    max_bytes: usize,
    /// Its `Content-Length`.
    content_length: Option<usize>,
    /// Whether the hash is needed.
    hashed: bool,
    shares: NodeShares,
    holder: Holder,
    parse: fn(&str) -> Result<T>,
}

struct ReadBody<T> {
    value: T,
    hash: BodyHash,
    bytes_memory: Memory,
    memory: Memory,
}

impl<T: Send + 'static> PendingBody<T> {
    fn new(
        request: &HttpRequest,
        payload: &mut Payload,
        max_bytes: usize,
        parse: fn(&str) -> Result<T>,
    ) -> Result<Self> {
        Ok(Self {
            content_length: check_head(request, max_bytes)?,
            payload: payload.take(),
            max_bytes,
            hashed: request.headers().contains_key(idempotency_key::HEADER),
            shares: shares_of(request)?,
            holder: holder_of(request),
            parse,
        })
    }

    async fn read(mut self) -> Result<ReadBody<T>> {
        let deadline = if self.max_bytes > MAX_JSON_BYTES {
            LARGE_BODY_DEADLINE
        } else {
            BODY_DEADLINE
        };
        let incoming = Incoming {
            content_length: self.content_length,
            max_bytes: self.max_bytes,
            deadline,
            shares: &self.shares,
            holder: self.holder,
        };
        let (bytes, bytes_memory) = incoming.read(&mut self.payload).await?;
        let hashed = self.hashed;
        let is_small = bytes.len() <= SMALL_BYTES;
        let (text, measured) = if is_small {
            prepare(&bytes, hashed)?
        } else {
            let parser = self.shares.parser(self.holder).await?;
            off_this_thread(parser, move || prepare(&bytes, hashed)).await?
        };
        let cost = measured.cost;
        if cost > MAX_VALUES_COST {
            let detail = "the body has too many objects and values";
            return Err(Error::new(Code::PayloadTooLarge, detail));
        }
        let memory = self.shares.values(self.holder, cost).await?;
        let parse = self.parse;
        let value = if is_small && cost <= SMALL_COST {
            parse(&text)?
        } else {
            let parser = self.shares.parser(self.holder).await?;
            off_this_thread(parser, move || parse(&text)).await?
        };
        Ok(ReadBody {
            value,
            hash: BodyHash(measured.hash),
            bytes_memory,
            memory,
        })
    }
}

pub async fn off_this_thread<T: Send + 'static>(
    parser: Permit,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let outcome = web::block(move || {
        let outcome = work();
        drop(parser);
        outcome
    });
    outcome.await.map_err(Error::internal)?
}

pub(in crate::http) fn shares_of(request: &HttpRequest) -> Result<NodeShares> {
    let app = request.app_data::<web::Data<App>>();
    let app = app.ok_or_else(|| Error::internal(anyhow::anyhow!("no app serves this request")))?;
    Ok(app.shares.clone())
}

/// The holder whose share a request uses.
pub(in crate::http) fn holder_of(request: &HttpRequest) -> Holder {
    let extensions = request.extensions();
    let authenticated = extensions.get::<Authenticated>();
    Holder::from(authenticated.and_then(Authenticated::tenant_id))
}

/// Checks the headers. Returns the `Content-Length`.
fn check_head(request: &HttpRequest, max_bytes: usize) -> Result<Option<usize>> {
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

pub(in crate::http) fn check_length(
    request: &HttpRequest,
    max_bytes: usize,
) -> Result<Option<usize>> {
    let content_length = request
        .headers()
        .get(header::CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok())
        .and_then(|text| text.parse::<usize>().ok());
    if content_length.is_some_and(|length| length > max_bytes) {
        return Err(too_large(max_bytes));
    }
    Ok(content_length)
}

fn too_large(max_bytes: usize) -> Error {
    let detail = format!("a body has at most {max_bytes} bytes");
    Error::new(Code::PayloadTooLarge, detail)
}

/// A body that is being received.
pub(in crate::http) struct Incoming<'a> {
    /// Its `Content-Length`, if the client sends one.
    pub content_length: Option<usize>,
    pub max_bytes: usize,
    pub deadline: Duration,
    pub shares: &'a NodeShares,
    pub holder: Holder,
}

impl Incoming<'_> {
    /// The bytes, and the memory reserved for them.
    pub async fn read(&self, payload: &mut Payload) -> Result<(BytesMut, Memory)> {
        tokio::time::timeout(self.deadline, self.read_all(payload))
            .await
            .map_err(|_| late())?
    }

    async fn read_all(&self, payload: &mut Payload) -> Result<(BytesMut, Memory)> {
        let mut memory = Memory::default();
        // Memory is reserved as bytes arrive: a client that announces many and sends none holds little.
        let mut room = SMALL_BYTES;
        let mut bytes = BytesMut::with_capacity(self.content_length.unwrap_or_default().min(room));
        while let Some(chunk) = timeout(PIECE_DEADLINE, payload.next())
            .await
            .map_err(|_| late())?
        {
            let chunk =
                chunk.map_err(|_| Error::new(Code::InvalidRequest, "the body broke off"))?;
            let length = bytes.len() + chunk.len();
            if length > self.max_bytes {
                return Err(too_large(self.max_bytes));
            }
            if length > room {
                // Doubles the reserved memory, up to the size of the body.
                let max = self.content_length.unwrap_or(self.max_bytes);
                let more = room.min(max.saturating_sub(room)).max(length - room);
                self.shares
                    .more_of_body(self.holder, &mut memory, more)
                    .await?;
                room += more;
                bytes.reserve(room - bytes.len());
            }
            bytes.extend_from_slice(&chunk);
            if length > SMALL_BYTES {
                // The connection continues when this does: few connections of a tenant read at one time.
                let _permit = self.shares.turn_to_read(self.holder).await?;
                yield_now().await;
            }
        }
        Ok((bytes, memory))
    }
}

fn late() -> Error {
    Error::new(Code::RequestTimeout, "the body did not arrive in time")
}

/// The body as text that can be stored, and its measures.
fn prepare(bytes: &[u8], hashed: bool) -> Result<(String, Measurement)> {
    let bytes = normalise_json(bytes).into_owned();
    let text = String::from_utf8(bytes).map_err(|error| {
        let detail = format!("not UTF-8 at byte {}", error.utf8_error().valid_up_to());
        Error::new(Code::InvalidJson, detail)
    })?;
    let measured = json_text::measure(&text, hashed).map_err(|refused| {
        let detail = refused.to_string();
        match refused {
            JsonError::TooManyValues => Error::new(Code::PayloadTooLarge, detail),
            JsonError::ReservedName | JsonError::Malformed(_) => {
                Error::fields(Code::InvalidJson, vec![FieldError::new("", detail)])
            }
        }
    })?;
    Ok((text, measured))
}

/// Parses valid JSON as the type.
fn parse_typed<T: DeserializeOwned>(text: &str) -> Result<T> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    serde_path_to_error::deserialize(Objects(&mut deserializer)).map_err(|error| {
        let pointer = pointer(error.path());
        let detail = without_position(&error.into_inner().to_string());
        Error::fields(Code::InvalidRequest, vec![FieldError::new(pointer, detail)])
    })
}

/// The pointer shows the position; line and column would repeat it.
fn without_position(message: &str) -> String {
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
        let parsed = prepare(body, true).and_then(|(text, _)| parse_typed::<Sample>(&text));
        let error = match parsed {
            Ok(value) => panic!("{shown} was taken as {value:?}"),
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
}
