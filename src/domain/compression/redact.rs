//! Takes secrets out of texts that go to a summary's model, and out of what comes back. It knows forms of
//! secrets, not secrets: what looks like prose, a hash or an id stays as it is. Linear in the text.

use std::borrow::Cow;
use std::ops::Range;

use memchr::memmem;

use super::{secret_assignments, secret_tokens};
use crate::domain::values::outside_text::normalise_text;

/// What stands in place of a secret.
pub const REDACTED: &str = "[redacted]";

/// A text that can be stored and sent: without U+0000, and without secrets.
pub fn clean(text: &str) -> Cow<'_, str> {
    match normalise_text(text) {
        Cow::Borrowed(text) => redact(text),
        Cow::Owned(text) => Cow::Owned(redact(&text).into_owned()),
    }
}

pub fn redact(text: &str) -> Cow<'_, str> {
    let mut secrets = Vec::new();
    secret_tokens::find(text, &mut secrets);
    secret_assignments::find(text, &mut secrets);
    find_private_keys(text, &mut secrets);
    find_url_passwords(text, &mut secrets);
    if secrets.is_empty() {
        return Cow::Borrowed(text);
    }
    secrets.sort_unstable_by_key(|range: &Range<usize>| range.start);
    let mut redacted = String::with_capacity(text.len());
    let mut copied = 0;
    for secret in secrets {
        if secret.start >= copied {
            redacted.push_str(&text[copied..secret.start]);
            redacted.push_str(REDACTED);
        }
        copied = copied.max(secret.end);
    }
    redacted.push_str(&text[copied..]);
    Cow::Owned(redacted)
}

/// Private keys in PEM form. One without an end is a secret as far as it looks like a key.
fn find_private_keys(text: &str, secrets: &mut Vec<Range<usize>>) {
    const BEGIN: &[u8] = b"-----BEGIN ";
    const END: &[u8] = b"-----END ";
    const DASHES: &[u8] = b"-----";
    /// The longest label of a key, and the longest key.
    const LABEL: usize = 64;
    const KEY: usize = 16 * 1024;
    let bytes = text.as_bytes();
    let label_end = |start: usize| {
        let label = &bytes[start..bytes.len().min(start + LABEL)];
        let end = memmem::find(label, DASHES)?;
        let is_private = memmem::find(&label[..end], b"PRIVATE KEY").is_some();
        is_private.then_some(start + end + DASHES.len())
    };
    let mut ends = memmem::find_iter(bytes, END).peekable();
    let mut searched = 0;
    for begin in memmem::find_iter(bytes, BEGIN) {
        let body = match label_end(begin + BEGIN.len()) {
            Some(body) if begin >= searched => body,
            Some(_) | None => continue,
        };
        let is_of_key = |byte: &u8| {
            byte.is_ascii_alphanumeric() || byte.is_ascii_whitespace() || b"+/=\\:,-".contains(byte)
        };
        while ends.next_if(|end| *end < body).is_some() {}
        let end = match ends.peek().copied() {
            Some(end) if end - body <= KEY => label_end(end + END.len()),
            Some(_) | None => None,
        };
        let end = end.unwrap_or_else(|| {
            let length = bytes[body..].iter().take_while(|byte| is_of_key(byte));
            body + length.count()
        });
        secrets.push(begin..end);
        searched = end;
    }
}

/// The password in `scheme://user:password@host`.
fn find_url_passwords(text: &str, secrets: &mut Vec<Range<usize>>) {
    let bytes = text.as_bytes();
    for found in memmem::find_iter(bytes, b"://") {
        let start = found + 3;
        let is_end = |byte: &u8| byte.is_ascii_whitespace() || b"/?#\"'`<>\\".contains(byte);
        let length = bytes[start..].iter().position(is_end);
        let authority = &bytes[start..length.map_or(bytes.len(), |length| start + length)];
        let Some(at) = memchr::memrchr(b'@', authority) else {
            continue;
        };
        let Some(colon) = memchr::memchr(b':', &authority[..at]) else {
            continue;
        };
        let password = start + colon + 1..start + at;
        if !password.is_empty() && &text[password.clone()] != REDACTED {
            secrets.push(password);
        }
    }
}

#[cfg(test)]
#[path = "redact_tests.rs"]
mod tests;
