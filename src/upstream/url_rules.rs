//! What a URL alone shows, before any name is resolved; and every reason to refuse one. The
//! messages are for the tenant who gave the URL: they never repeat it, nor tell what a name resolves to.

use std::net::IpAddr;

use url::{Host, Url};

use crate::config::PrivateUpstreams;

const MAX_CHARS: usize = 2048;

/// Why a URL, or the address it leads to, is not dialled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UrlRefused {
    #[error("must be a URL like https://api.example.com/v1")]
    NotAUrl,
    #[error("must have {MAX_CHARS} characters or fewer")]
    TooLong,
    #[error("must begin with https://")]
    Scheme,
    #[error("must not hold a user name or a password")]
    Userinfo,
    #[error("must not name port 0")]
    PortZero,
    #[error("must have a host that does not end in a dot")]
    TrailingDot,
    #[error(
        "leads to a local name; this node does not call those. Ask its operator to allow private addresses."
    )]
    LocalName,
    #[error(
        "leads to a private address; this node does not call those. Ask its operator to allow it."
    )]
    PrivateAddress,
    #[error(
        "leads to an address that is never dialled: link-local, metadata, multicast or reserved"
    )]
    ReservedAddress,
    #[error("must begin with https://: http is only for private addresses that are allowed here")]
    PlainHttp,
    #[error("leads to a port of this service")]
    OwnPort,
    #[error("cannot be dialled from this node")]
    NoClient,
}

/// Where a URL leads: an address to check now, or a name to check by what it resolves to.
pub(super) struct Destination {
    pub https: bool,
    pub port: u16,
    /// `None` for a name.
    pub address: Option<IpAddr>,
}

pub(super) fn parse(text: &str) -> Result<Url, UrlRefused> {
    if text.len() > MAX_CHARS {
        return Err(UrlRefused::TooLong);
    }
    // The parser drops tabs and line ends and turns backslashes: what a person reads must be what is
    // dialled.
    let misleading = |c: char| c.is_control() || c.is_whitespace() || c == '\\';
    if text.contains(misleading) {
        return Err(UrlRefused::NotAUrl);
    }
    Url::parse(text).map_err(|_| UrlRefused::NotAUrl)
}

/// Judges the parsed form, in which every way to write an IPv4 address has become one.
pub(super) fn destination(policy: &PrivateUpstreams, url: &Url) -> Result<Destination, UrlRefused> {
    let https = match url.scheme() {
        "https" => true,
        "http" => false,
        _ => return Err(UrlRefused::Scheme),
    };
    if !url.username().is_empty() || url.password().is_some() {
        return Err(UrlRefused::Userinfo);
    }
    let port = url.port_or_known_default().ok_or(UrlRefused::NotAUrl)?;
    if port == 0 {
        return Err(UrlRefused::PortZero);
    }
    let address = match url.host().ok_or(UrlRefused::NotAUrl)? {
        Host::Ipv4(address) => Some(IpAddr::V4(address)),
        Host::Ipv6(address) => Some(IpAddr::V6(address)),
        Host::Domain(name) if name.ends_with('.') => return Err(UrlRefused::TrailingDot),
        Host::Domain(name) if *policy == PrivateUpstreams::Refused && is_local(name) => {
            return Err(UrlRefused::LocalName);
        }
        // Of a literal address the caller learns whether it is private, and not that https is missing.
        Host::Domain(_) if *policy == PrivateUpstreams::Refused && !https => {
            return Err(UrlRefused::PlainHttp);
        }
        Host::Domain(_) => None,
    };
    Ok(Destination {
        https,
        port,
        address,
    })
}

/// Names that mean something only inside a network. The parser has made them lower case.
fn is_local(name: &str) -> bool {
    match name.rsplit_once('.') {
        None => true,
        Some((rest, "arpa")) => rest == "home" || rest.ends_with(".home"),
        Some((_, last)) => matches!(last, "localhost" | "internal" | "local"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(policy: &PrivateUpstreams, text: &str) -> Option<UrlRefused> {
        parse(text).and_then(|url| destination(policy, &url)).err()
    }

    #[test]
    fn each_fault_of_a_url_has_its_reason() {
        for (text, reason) in [
            ("", UrlRefused::NotAUrl),
            ("api.example.com", UrlRefused::NotAUrl),
            ("https://", UrlRefused::NotAUrl),
            ("https://exa\tmple.com/", UrlRefused::NotAUrl),
            (" https://example.com/", UrlRefused::NotAUrl),
            (r"https:\\example.com", UrlRefused::NotAUrl),
            ("ftp://example.com/", UrlRefused::Scheme),
            ("http://example.com/", UrlRefused::PlainHttp),
            ("http://localhost:11434/v1", UrlRefused::LocalName),
            ("https://me@example.com/", UrlRefused::Userinfo),
            ("https://:pw@example.com/", UrlRefused::Userinfo),
            ("https://example.com:0/", UrlRefused::PortZero),
            ("https://example.com./", UrlRefused::TrailingDot),
            ("https://LOCALHOST/", UrlRefused::LocalName),
            ("https://kubernetes/", UrlRefused::LocalName),
            ("https://router.home.arpa/", UrlRefused::LocalName),
        ] {
            let answer = check(&PrivateUpstreams::Refused, text);
            assert_eq!(answer, Some(reason), "{text}");
        }
        let long = format!("https://example.com/{}", "a".repeat(MAX_CHARS));
        assert_eq!(
            check(&PrivateUpstreams::Refused, &long),
            Some(UrlRefused::TooLong)
        );
    }

    #[test]
    fn ordinary_urls_pass_and_local_names_too_once_private_is_allowed() {
        for text in [
            "https://api.openai.com/v1",
            "https://bücher.example/v1",
            "https://arpa.example.com:8443/v1?version=2",
            "https://internal.example.com/",
        ] {
            assert_eq!(check(&PrivateUpstreams::Refused, text), None, "{text}");
        }
        for text in [
            "http://localhost:11434/v1",
            "http://ollama/",
            "https://a.internal/",
        ] {
            assert_eq!(check(&PrivateUpstreams::Allowed, text), None, "{text}");
        }
    }
}
