//! Strict parsing of queries and paths: a mistyped or unknown value is refused here with a pointer, so that no
//! handler receives it and nothing becomes a 500.

use std::future::{Ready, ready};
use std::str::FromStr;

use actix_web::dev::Payload;
use actix_web::{FromRequest, HttpRequest};
use percent_encoding::percent_decode_str;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};

use crate::domain::conversation::session_name::{SessionKey, SessionRef};
use crate::domain::people::platform::{InvalidPlatform, PlatformScope};
use crate::domain::values::resource_name::{InvalidResourceName, ResourceName};
use crate::error::{Code, Error, FieldError, Result, escape_pointer};

/// A JSON pointer (RFC 6901).
pub(in crate::http) fn pointer(path: &serde_path_to_error::Path) -> String {
    use serde_path_to_error::Segment;
    path.iter()
        .map(|segment| match segment {
            Segment::Seq { index } => format!("/{index}"),
            Segment::Map { key } => format!("/{}", escape_pointer(key)),
            Segment::Enum { .. } | Segment::Unknown => String::new(),
        })
        .collect()
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
        let pointer = format!("/query{}", pointer(error.path()));
        wrong(&pointer, error.into_inner().to_string())
    })
}

/// The `{id}` of a path. A text that cannot be an id is 404, like an id that does not exist.
pub struct PathId<T>(pub T);

impl<T: FromStr> FromRequest for PathId<T> {
    type Error = Error;
    type Future = Ready<Result<Self>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        let id = request.match_info().get("id").unwrap_or_default();
        ready(
            id.parse()
                .map(Self)
                .map_err(|_| Error::new(Code::NotFound, "no such resource")),
        )
    }
}

/// The `{id}` of a session, which is the service's id or the client's own.
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

/// A decoded part of the path. The router leaves `%25`, `%2B` and `%2F` encoded, and only these. Text that is not
/// UTF-8 then breaks the rule of any name.
fn decoded(request: &HttpRequest, part: &str) -> String {
    let text = request.match_info().get(part).unwrap_or_default();
    percent_decode_str(text).decode_utf8_lossy().into_owned()
}

/// For a member of a body: distinguishes null from absent.
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
    /// For a read: an invalid name is not found.
    pub fn or_missing(self) -> Result<ResourceName> {
        self.0
            .ok_or_else(|| Error::new(Code::NotFound, "no such resource"))
    }

    /// For a write: an invalid name is refused with its rule.
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
