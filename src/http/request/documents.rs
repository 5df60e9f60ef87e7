//! Bodies that users keep as files, in JSON or in YAML: both are parsed into one tree. The content is checked
//! elsewhere; this module only checks that it is a document, and that YAML's aliases do not multiply it.

use std::future::Future;
use std::pin::Pin;

use actix_web::dev::Payload;
use actix_web::{FromRequest, HttpMessage, HttpRequest};
use serde::de::DeserializeSeed;
use serde_saphyr::options::NonFiniteFloatPolicy;

use super::json_body::{
    BODY_DEADLINE, Incoming, MAX_JSON_BYTES, check_length, holder_of, off_this_thread, shares_of,
};
use crate::domain::conversation::tree::{MAX_COST, SizeBudget, Tree, TreeSeed};
use crate::domain::values::outside_text::normalise_json;
use crate::error::{Code, Error, FieldError, Result};
use crate::limits::Memory;

const YAML_TYPES: [&str; 4] = [
    "application/yaml",
    "application/x-yaml",
    "text/yaml",
    "text/x-yaml",
];

/// How often a YAML document may use aliases, and how many values they may expand to.
const MAX_ALIASES: usize = 1000;
const MAX_REPEATED: usize = 20_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Json,
    Yaml,
}

/// A document in the format of its `Content-Type`.
pub struct DocumentBody {
    pub tree: Tree,
    /// Held as long as the tree is used.
    _memory: Memory,
}

impl FromRequest for DocumentBody {
    type Error = Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self>>>>;

    fn from_request(request: &HttpRequest, payload: &mut Payload) -> Self::Future {
        let checked = format_of(request).and_then(|format| {
            let content_length = check_length(request, MAX_JSON_BYTES)?;
            Ok((format, content_length, shares_of(request)?))
        });
        let holder = holder_of(request);
        let mut payload = payload.take();
        Box::pin(async move {
            let (format, content_length, shares) = checked?;
            let incoming = Incoming {
                content_length,
                max_bytes: MAX_JSON_BYTES,
                deadline: BODY_DEADLINE,
                shares: &shares,
                holder,
            };
            let (bytes, _bytes_memory) = incoming.read(&mut payload).await?;
            // With aliases a short text expands to as much as a long one.
            let memory = shares.values(holder, MAX_COST).await?;
            let parser = shares.parser(holder).await?;
            // YAML takes long enough to delay the other requests of this thread.
            let tree = off_this_thread(parser, move || parse(&bytes, format)).await?;
            Ok(Self {
                tree,
                _memory: memory,
            })
        })
    }
}

fn format_of(request: &HttpRequest) -> Result<Format> {
    let mime = request.mime_type().ok().flatten();
    match mime.as_ref().map(|mime| mime.essence_str()) {
        Some("application/json") => Ok(Format::Json),
        Some(other) if YAML_TYPES.contains(&other) => Ok(Format::Yaml),
        Some(_) | None => Err(Error::new(
            Code::UnsupportedMediaType,
            "send the body as Content-Type: application/json or application/yaml",
        )),
    }
}

fn parse(bytes: &[u8], format: Format) -> Result<Tree> {
    let code = match format {
        Format::Json => Code::InvalidJson,
        Format::Yaml => Code::InvalidYaml,
    };
    let bytes = match format {
        Format::Json => normalise_json(bytes),
        // Its texts are normalised one by one.
        Format::Yaml => bytes.into(),
    };
    let text = std::str::from_utf8(&bytes).map_err(|error| {
        let detail = format!("not UTF-8 at byte {}", error.valid_up_to());
        Error::new(code, detail)
    })?;
    let tree = match format {
        Format::Json => parse_json(text),
        Format::Yaml => parse_yaml(text),
    };
    tree.map_err(|detail| Error::fields(code, vec![FieldError::new("", detail)]))
}

fn parse_json(text: &str) -> std::result::Result<Tree, String> {
    let allowance = SizeBudget::default();
    let mut json = serde_json::Deserializer::from_str(text);
    let tree = TreeSeed(&allowance).deserialize(&mut json);
    tree.and_then(|tree| json.end().map(|()| tree))
        .map_err(|error| error.to_string())
}

fn parse_yaml(text: &str) -> std::result::Result<Tree, String> {
    let options = serde_saphyr::options! {
        // `no` and `on` are ordinary names.
        strict_booleans: true,
        non_finite_float_policy: NonFiniteFloatPolicy::PassThrough,
        with_snippet: false,
        budget: serde_saphyr::budget! { max_aliases: MAX_ALIASES },
        alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: MAX_REPEATED },
    };
    let allowance = SizeBudget::default();
    serde_saphyr::with_deserializer_from_str_with_options(text, options, |yaml| {
        TreeSeed(&allowance).deserialize(yaml)
    })
    .map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn yaml(text: &str) -> Result<Tree> {
        parse(text.as_bytes(), Format::Yaml)
    }

    #[test]
    fn yaml_says_the_same_as_json() {
        let json = r#"{"session": {"dmScope": "main", "identityLinks": {"no": ["telegram:123", 5, 1.5],
                       "7": ["web:a b", null, true], "x": []}}, "y": {"telegram": 5}}"#;
        let from_json = parse(json.as_bytes(), Format::Json).unwrap();
        for text in [
            json,
            "# a comment\nsession:\n  dmScope: main\n  identityLinks:\n    no: [telegram:123, 5, 1.5]\n    \
             7:\n      - web:a b\n      - ~\n      - true\n    x: []\ny: {telegram: 5}\n",
            "session: &s\n  dmScope: main\n  identityLinks:\n    no: ['telegram:123', 5, 1.5]\n    \
             \"7\": [web:a b, null, true]\n    x: []\ny: {telegram: 5}\n",
        ] {
            assert_eq!(yaml(text).unwrap(), from_json, "{text}");
        }
    }

    #[test]
    fn what_is_no_document_is_refused() {
        for text in [
            "a: [",
            "a: 1\na: 2",
            "a: *b",
            "{a: 1} x",
            "---\na: 1\n---\nb: 2\n",
            "? [a]\n: 1",
        ] {
            let error = yaml(text).unwrap_err();
            assert_eq!(error.code, Code::InvalidYaml, "{text}");
        }
        let deep = "[".repeat(100_000);
        assert_eq!(yaml(&deep).unwrap_err().code, Code::InvalidYaml);
        for bytes in [b"".as_slice(), b"{", b"{} {}", b"\xff", deep.as_bytes()] {
            let error = parse(bytes, Format::Json).unwrap_err();
            assert_eq!(error.code, Code::InvalidJson);
        }
    }

    #[test]
    fn aliases_do_not_multiply_a_document_without_end() {
        let mut laughs = String::from("a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]\n");
        for n in 1..30 {
            let before = format!("*a{}, ", n - 1).repeat(9);
            laughs.push_str(&format!("a{n}: &a{n} [{before}]\n"));
        }
        let long = "x".repeat(500_000);
        let aliases = "*a, ".repeat(10_000);
        for text in [
            laughs,
            format!("a: &a {long}\nb: [{aliases}]\n"),
            format!("a: &a [{}]\nb: [{aliases}]\n", "x, ".repeat(10_000)),
            format!("a: &a {{k: {long}}}\nb: [{}]\n", "{<<: *a}, ".repeat(1000)),
        ] {
            let error = yaml(&text).unwrap_err();
            assert_eq!(error.code, Code::InvalidYaml);
            assert!(error.detail.len() < 500, "{}", error.detail);
        }
    }
}
