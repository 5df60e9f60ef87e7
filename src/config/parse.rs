//! Parsers of values. A message says what is expected and never repeats the value.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use ipnet::IpNet;
use secrecy::SecretString;
use url::Url;

use super::{LogFormat, McpIsolation, PrivateUpstreams};

/// Shorter keys can be guessed.
const MIN_SECRET_CHARS: usize = 32;

pub type Parse<T> = Result<T, String>;

fn url_of(text: &str, schemes: &[&str], example: &str) -> Parse<Url> {
    let wrong = || format!("must be a URL like {example}");
    let url = Url::parse(text).map_err(|_| wrong())?;
    if schemes.contains(&url.scheme()) && url.has_host() {
        Ok(url)
    } else {
        Err(wrong())
    }
}

pub fn postgres_url(text: &str) -> Parse<SecretString> {
    let example = "postgres://user:password@host:5432/database";
    let url = url_of(text, &["postgres", "postgresql"], example)?;
    if url.username().is_empty() {
        return Err(format!("names no user; must be a URL like {example}"));
    }
    Ok(text.into())
}

pub fn redis_url(text: &str) -> Parse<SecretString> {
    url_of(text, &["redis"], "redis://:password@host:6379/0").map(|_| text.into())
}

pub fn http_url(text: &str) -> Parse<Url> {
    url_of(text, &["http", "https"], "http://10.0.0.5:8081")
}

pub fn address(text: &str) -> Parse<SocketAddr> {
    text.parse()
        .map_err(|_| "must be an address and port like 127.0.0.1:8080".to_owned())
}

fn bounded(text: &str, least: u32, most: u32) -> Parse<u32> {
    text.parse()
        .ok()
        .filter(|number| (least..=most).contains(number))
        .ok_or_else(|| format!("must be a whole number from {least} to {most}"))
}

pub fn threads(text: &str) -> Parse<usize> {
    bounded(text, 1, 256).map(|threads| threads as usize)
}

pub fn connections(text: &str) -> Parse<u32> {
    bounded(text, 1, 1000)
}

pub fn lease(text: &str) -> Parse<Duration> {
    bounded(text, 500, 600_000).map(|ms| Duration::from_millis(ms.into()))
}

pub fn grace(text: &str) -> Parse<Duration> {
    bounded(text, 0, 600_000).map(|ms| Duration::from_millis(ms.into()))
}

pub fn secrets(text: &str) -> Parse<Vec<SecretString>> {
    let parts: Vec<&str> = text.split(',').map(str::trim).collect();
    if parts
        .iter()
        .any(|part| part.chars().count() < MIN_SECRET_CHARS)
    {
        return Err(format!(
            "each key must have {MIN_SECRET_CHARS} characters or more (several are separated by commas)"
        ));
    }
    Ok(parts.into_iter().map(SecretString::from).collect())
}

pub fn private_upstreams(text: &str) -> Parse<PrivateUpstreams> {
    match text {
        "false" => Ok(PrivateUpstreams::Refused),
        "true" => Ok(PrivateUpstreams::Allowed),
        list => list
            .split(',')
            .map(|part| part.trim().parse())
            .collect::<Result<Vec<IpNet>, _>>()
            .map(PrivateUpstreams::Only)
            .map_err(|_| "must be false, true, or networks like 10.0.0.0/8,fd00::/8".to_owned()),
    }
}

pub fn isolation(text: &str) -> Parse<McpIsolation> {
    match text {
        "bubblewrap" => Ok(McpIsolation::Bubblewrap),
        "uid" => Ok(McpIsolation::Uid),
        "none" => Ok(McpIsolation::None),
        _ => Err("must be bubblewrap, uid or none".to_owned()),
    }
}

pub fn directories(text: &str) -> Parse<Vec<PathBuf>> {
    let dirs: Vec<PathBuf> = text.split(':').map(PathBuf::from).collect();
    if dirs.iter().all(|dir| dir.is_absolute()) {
        Ok(dirs)
    } else {
        Err("must be absolute directories separated by colons".to_owned())
    }
}

pub fn log_format(text: &str) -> Parse<LogFormat> {
    match text {
        "auto" => Ok(LogFormat::Auto),
        "json" => Ok(LogFormat::Json),
        "text" => Ok(LogFormat::Text),
        _ => Err("must be auto, json or text".to_owned()),
    }
}

pub fn any_text(text: &str) -> Parse<String> {
    Ok(text.to_owned())
}
