//! Secrets that are known by their own form, wherever they stand: keys with the prefix of their provider,
//! tokens of a bearer, JSON web tokens.

use std::ops::Range;

/// Further characters of a token do not change whether it is one.
const EXAMINED: usize = 256;
/// The longest header of a JSON web token.
const MAX_HEADER: usize = 2048;
/// What a random key has in one stretch, and compound words mostly have not.
const STRETCH: usize = 10;

/// Prefixes of keys, and the fewest characters after them.
const PREFIXES: [(&str, usize); 39] = [
    // This service's own.
    ("tl_", 40),
    ("sk-", 16),
    ("sk_live_", 16),
    ("sk_test_", 16),
    ("rk_live_", 16),
    ("rk_test_", 16),
    ("whsec_", 16),
    ("ghp_", 20),
    ("gho_", 20),
    ("ghu_", 20),
    ("ghs_", 20),
    ("ghr_", 20),
    ("github_pat_", 20),
    ("glpat-", 16),
    ("xoxa-", 10),
    ("xoxb-", 10),
    ("xoxc-", 10),
    ("xoxd-", 10),
    ("xoxe-", 10),
    ("xoxe.", 10),
    ("xoxo-", 10),
    ("xoxp-", 10),
    ("xoxr-", 10),
    ("xoxs-", 10),
    ("xapp-", 10),
    ("AIza", 30),
    ("ya29.", 20),
    ("GOCSPX-", 20),
    ("npm_", 30),
    ("pypi-", 30),
    ("hf_", 20),
    ("gsk_", 20),
    ("xai-", 20),
    ("pplx-", 20),
    ("r8_", 30),
    ("dop_v1_", 30),
    ("shpat_", 20),
    ("SG.", 30),
    ("lin_api_", 20),
];

pub(super) fn find(text: &str, secrets: &mut Vec<Range<usize>>) {
    let bytes = text.as_bytes();
    let mut at = 0;
    while let Some(skipped) = bytes[at..].iter().position(|byte| is_of_token(*byte)) {
        let start = at + skipped;
        let length = bytes[start..].iter().position(|byte| !is_of_token(*byte));
        let end = length.map_or(bytes.len(), |length| start + length);
        at = end;
        let run = &text[start..end];
        if run.eq_ignore_ascii_case("bearer") {
            if let Some(token) = bearer_token(bytes, end) {
                at = token.end;
                secrets.push(token);
            }
        } else if let Some(offset) = key_offset(run) {
            let key = run.trim_end_matches(['.', '-']);
            secrets.push(start + offset..start + key.len());
        } else if let Some(token) = bot_token(bytes, start, end) {
            at = token.end;
            secrets.push(token);
        }
    }
}

fn is_of_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.')
}

/// Where in a run of token characters a key begins.
fn key_offset(run: &str) -> Option<usize> {
    let bytes = run.as_bytes();
    let is_start = |index: usize| {
        bytes[index].is_ascii_alphanumeric()
            && (index == 0 || !bytes[index - 1].is_ascii_alphanumeric())
    };
    let is_key = |index: usize| {
        let rest = &run[index..];
        let has_prefix = |(prefix, least): &(&str, usize)| {
            rest.strip_prefix(prefix)
                .is_some_and(|key| key.len() >= *least && is_random(key.as_bytes()))
        };
        PREFIXES.iter().any(has_prefix) || is_aws_key(rest.as_bytes()) || is_jwt(rest.as_bytes())
    };
    (0..bytes.len()).find(|index| is_start(*index) && is_key(*index))
}

/// Whether it looks like the random part of a key: digits, and one long stretch.
fn is_random(key: &[u8]) -> bool {
    let key = &key[..key.len().min(EXAMINED)];
    let has_digit = key.iter().any(u8::is_ascii_digit);
    let mut stretches = key.split(|byte| !byte.is_ascii_alphanumeric());
    has_digit && stretches.any(|stretch| stretch.len() >= STRETCH)
}

/// An access key id of AWS: four letters of its kind and sixteen characters.
fn is_aws_key(rest: &[u8]) -> bool {
    let is_upper = |byte: &u8| byte.is_ascii_uppercase() || byte.is_ascii_digit();
    let ends = rest
        .get(20)
        .is_none_or(|byte| !byte.is_ascii_alphanumeric());
    (rest.starts_with(b"AKIA") || rest.starts_with(b"ASIA"))
        && ends
        && rest.get(4..20).is_some_and(|key| key.iter().all(is_upper))
}

/// A header and claims in base64, `{"` at the beginning of both.
fn is_jwt(rest: &[u8]) -> bool {
    if !rest.starts_with(b"eyJ") {
        return false;
    }
    let header = &rest[..rest.len().min(MAX_HEADER)];
    memchr::memchr(b'.', header)
        .is_some_and(|dot| dot >= 10 && rest.len() - dot > 10 && rest[dot + 1..].starts_with(b"ey"))
}

/// The token after the word.
fn bearer_token(bytes: &[u8], word_end: usize) -> Option<Range<usize>> {
    let space = bytes[word_end..]
        .iter()
        .position(|byte| !matches!(byte, b' ' | b'\t'))?;
    let start = word_end + space;
    let is_part = |byte: &&u8| is_of_token(**byte) || b"~+/=".contains(*byte);
    let length = bytes[start..].iter().take_while(is_part).count();
    let token = &bytes[start..start + length];
    let has_digit = token.iter().any(u8::is_ascii_digit);
    let is_secret = token.len() >= 8 && has_digit || token.len() >= 32;
    (space > 0 && is_secret).then_some(start..start + length)
}

/// The token of a Telegram bot: its number, a colon, and the secret, which begins with `AA`.
fn bot_token(bytes: &[u8], start: usize, end: usize) -> Option<Range<usize>> {
    let digits = bytes[start..end]
        .iter()
        .rev()
        .take_while(|byte| byte.is_ascii_digit());
    let secret = bytes.get(end + 1..)?;
    if bytes[end] != b':' || digits.take(8).count() < 8 || !secret.starts_with(b"AA") {
        return None;
    }
    let length = secret.iter().take_while(|byte| is_of_token(**byte)).count();
    (length >= 30).then_some(end + 1..end + 1 + length)
}
