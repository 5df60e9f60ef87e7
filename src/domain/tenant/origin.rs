//! Web origins (`https://app.example`) of the pages that may call with a tenant's credentials.

use std::str::FromStr;

use serde::Serialize;
use url::Url;

const MAX_CHARS: usize = 300;

/// Scheme, host and a port other than the scheme's default, as browsers write it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Origin(String);

wire_text!(Origin, r"^https?://[a-z0-9.:\[\]-]+$", 8, MAX_CHARS);

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must be an origin as browsers send it, like https://app.example or http://localhost:3000")]
pub struct InvalidOrigin;

impl Origin {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The `Host` header of a request to the page's own server.
    pub fn authority(&self) -> &str {
        self.0.split_once("://").map_or("", |(_, rest)| rest)
    }
}

impl FromStr for Origin {
    type Err = InvalidOrigin;

    fn from_str(text: &str) -> Result<Self, InvalidOrigin> {
        let url = Url::parse(text).map_err(|_| InvalidOrigin)?;
        let is_web = matches!(url.scheme(), "http" | "https");
        // Only an origin is its own origin: this refuses a path, a user, a default port and a capital letter.
        let is_origin = text.len() <= MAX_CHARS && url.origin().ascii_serialization() == text;
        let origin = Self(text.to_owned());
        // The parser accepts more in a host, such as `*`, which would look like a wildcard.
        let is_plain =
            |b: u8| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'.' | b':' | b'[' | b']' | b'-');
        if is_web && is_origin && origin.authority().bytes().all(is_plain) {
            Ok(origin)
        } else {
            Err(InvalidOrigin)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_has_one_spelling() {
        for good in [
            "https://app.example",
            "http://localhost:3000",
            "http://[::1]:8080",
        ] {
            assert!(good.parse::<Origin>().is_ok(), "{good}");
        }
        for bad in [
            "",
            "*",
            "null",
            "app.example",
            "https://*.example",
            "https://app.example/",
            "https://app.example/x",
            "https://APP.example",
            "https://app.example:443",
            "https://u@app.example",
            "ftp://app.example",
            "https://",
            "https://app.example?x",
            "https://app.example#x",
            "file:///x",
        ] {
            assert!(bad.parse::<Origin>().is_err(), "{bad}");
        }
    }
}
