//! Secrets that are known by their name: `password=…`, `"api_key": "…"`, `--token …`, `Authorization: …`.

use std::ops::Range;

/// The longest name that is looked for before a sign.
const MAX_NAME: usize = 64;
/// Further characters of a value do not change whether it is a secret.
const EXAMINED: usize = 256;

/// What a name says about its value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Name {
    /// The value is a secret, whatever it looks like.
    Secret,
    /// The value is a secret if it looks like one: the name is also a plain word.
    Token,
    /// The value is a scheme and a secret.
    Authorization,
}

/// Ends of names without `_` and `-`.
const NAMES: [(&str, Name); 18] = [
    ("password", Name::Secret),
    ("passwd", Name::Secret),
    ("passphrase", Name::Secret),
    ("passcode", Name::Secret),
    ("pwd", Name::Secret),
    ("apikey", Name::Secret),
    ("accesskey", Name::Secret),
    ("secretkey", Name::Secret),
    ("privatekey", Name::Secret),
    ("clientsecret", Name::Secret),
    ("accesstoken", Name::Secret),
    ("refreshtoken", Name::Secret),
    ("authtoken", Name::Secret),
    ("token", Name::Token),
    ("secret", Name::Token),
    ("credential", Name::Token),
    ("credentials", Name::Token),
    ("authorization", Name::Authorization),
];

/// Values that say that there is none.
const NO_VALUES: [&str; 7] = [
    "null",
    "none",
    "nil",
    "true",
    "false",
    "undefined",
    "required",
];

/// The beginnings of what stands in place of a value.
const NO_STARTS: [char; 6] = ['[', '<', '{', '$', '%', '('];

/// How a name and a value are joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sign {
    /// `name=value`
    Equals,
    /// `name = value`, mostly a program's text
    SpacedEquals,
    /// `name: value`, which can be prose
    Colon,
    /// `--name value`
    Flag,
}

#[derive(Debug, Clone, Copy)]
enum Quotes {
    With,
    Without,
}

pub(super) fn find(text: &str, secrets: &mut Vec<Range<usize>>) {
    let mut from = 0;
    for (index, c) in text.char_indices() {
        if index < from {
            continue;
        }
        let Some((name, sign, value_start)) = assignment(text, index, c) else {
            continue;
        };
        let (value, is_secret) = examine(text, name, sign, value_start);
        if is_secret || value.len() > EXAMINED {
            // What is long was examined as a whole, or the time would not be linear.
            from = value.end;
        }
        if is_secret {
            secrets.push(value);
        }
    }
}

/// The name, and the start of what may be its value, if `c` joins them.
fn assignment(text: &str, index: usize, c: char) -> Option<(Name, Sign, usize)> {
    let after = index + c.len_utf8();
    let next = text.as_bytes().get(after).copied().unwrap_or(b' ');
    let (before, sign, start) = match c {
        '=' if next == b'=' => return None,
        '=' => {
            let before = text[..index].strip_suffix(':').unwrap_or(&text[..index]);
            let is_spaced = before.ends_with(' ');
            let sign = if is_spaced {
                Sign::SpacedEquals
            } else {
                Sign::Equals
            };
            (before, sign, after + usize::from(next == b'>'))
        }
        ':' if matches!(next, b':' | b'=') => return None,
        ':' | '：' => (&text[..index], Sign::Colon, after),
        '＝' => (&text[..index], Sign::Equals, after),
        ' ' if next != b'-' => {
            let name = name_before(&text[..index]);
            let name = name.strip_prefix("--").unwrap_or_default();
            return Some((kind_of(name, "")?, Sign::Flag, after));
        }
        _ => return None,
    };
    // A line can have many signs: no more than a few spaces are passed over for each.
    let before = before.strip_suffix(' ').unwrap_or(before);
    let before = before.strip_suffix(['"', '\'', '`', '*']).unwrap_or(before);
    let before = before.strip_suffix('\\').unwrap_or(before);
    let before = before.strip_suffix('*').unwrap_or(before);
    let name = name_before(before);
    let earlier = &before[..before.len() - name.len()];
    let earlier = earlier
        .strip_suffix(' ')
        .map(name_before)
        .unwrap_or_default();
    Some((kind_of(name, earlier)?, sign, start))
}

/// The name at the end of a text.
fn name_before(text: &str) -> &str {
    let is_of_name = |byte: &&u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    let bytes = text.as_bytes().iter().rev();
    let length = bytes.take(MAX_NAME).take_while(is_of_name).count();
    &text[text.len() - length..]
}

/// `earlier` is the word before: an API key is written in one word and in two.
fn kind_of(name: &str, earlier: &str) -> Option<Name> {
    let is_second = name.eq_ignore_ascii_case("key") || name.eq_ignore_ascii_case("token");
    let letters = if is_second {
        earlier.bytes().chain(name.bytes())
    } else {
        "".bytes().chain(name.bytes())
    };
    let plain: Vec<u8> = letters
        .filter(|byte| !matches!(byte, b'_' | b'-'))
        .map(|byte| byte.to_ascii_lowercase())
        .collect();
    let named = |(end, _): &&(&str, Name)| plain.ends_with(end.as_bytes());
    NAMES.iter().find(named).map(|(_, kind)| *kind)
}

/// The value at `start`, and whether it is a secret.
fn examine(text: &str, name: Name, sign: Sign, start: usize) -> (Range<usize>, bool) {
    let start = if text[start..].starts_with("**") {
        start + 2
    } else {
        start
    };
    let start = start + spaces(text, start);
    if text[start..].starts_with(NO_STARTS) {
        return (start..start, false);
    }
    let (value, quotes) = value_at(text, start);
    if name == Name::Authorization {
        return examine_credentials(text, value);
    }
    let words = &text[value.clone()];
    let rest = &text[value.end..];
    let is_secret = !is_placeholder(words)
        && match (name, quotes, sign) {
            (Name::Secret, Quotes::With, _) => true,
            (Name::Secret, Quotes::Without, Sign::Equals | Sign::SpacedEquals | Sign::Flag) => {
                !is_call(words) && !words.starts_with('/')
            }
            (Name::Secret, Quotes::Without, Sign::Colon) => {
                !is_call(words) && (ends_statement(rest) || has_digit(words))
            }
            (Name::Token, Quotes::Without, Sign::Equals) => words.len() >= 4 && !is_call(words),
            (Name::Token, Quotes::With, Sign::Equals | Sign::SpacedEquals) => {
                words.len() >= 6 && !words.contains(' ')
            }
            (Name::Token, _, _) | (Name::Authorization, _, _) => is_like_token(words),
        };
    (value, is_secret)
}

/// The credentials of a header: after their scheme, if it is there.
fn examine_credentials(text: &str, value: Range<usize>) -> (Range<usize>, bool) {
    let scheme = scheme_length(&text[value.clone()]);
    let mut secret = value.start + scheme..value.end;
    if scheme == 0 && !is_like_token(&text[secret.clone()]) {
        (secret, _) = value_at(text, value.end + spaces(text, value.end));
    }
    let is_secret = is_like_token(&text[secret.clone()]);
    (secret, is_secret)
}

fn spaces(text: &str, at: usize) -> usize {
    let is_space = |byte: &&u8| matches!(byte, b' ' | b'\t');
    text.as_bytes()[at..].iter().take_while(is_space).count()
}

/// Whether it is a program's text.
fn is_call(word: &str) -> bool {
    let is_of_name = |byte: u8| byte.is_ascii_alphabetic() || matches!(byte, b'_' | b'.');
    word.split_once('(')
        .is_some_and(|(name, _)| name.bytes().all(is_of_name))
}

/// The scheme at the beginning of a quoted value, with the space after it.
fn scheme_length(value: &str) -> usize {
    let schemes = ["Basic ", "Bearer ", "Token ", "Digest ", "ApiKey "];
    let is_at_start = |scheme: &&str| {
        value
            .get(..scheme.len())
            .is_some_and(|start| start.eq_ignore_ascii_case(scheme))
    };
    schemes
        .iter()
        .find(|scheme| is_at_start(scheme))
        .map_or(0, |scheme| scheme.len())
}

/// The value at `start`: what is between quotes, or one word.
fn value_at(text: &str, start: usize) -> (Range<usize>, Quotes) {
    let rest = &text.as_bytes()[start..];
    let escapes = rest.iter().take_while(|byte| **byte == b'\\').count();
    if let Some(quote @ (b'"' | b'\'' | b'`')) = rest.get(escapes) {
        let inside = start + escapes + 1;
        if let Some(length) = quoted_length(&text.as_bytes()[inside..], *quote, escapes > 0) {
            return (inside..inside + length, Quotes::With);
        }
    }
    let is_end = |byte: &u8| byte.is_ascii_whitespace() || b"\"'`<>,;()]}&|\\".contains(byte);
    let length = rest.iter().position(is_end).unwrap_or(rest.len());
    let word = text[start..start + length].trim_end_matches(['.', '!', '?', '*', ':']);
    (start..start + word.len(), Quotes::Without)
}

/// The length of a quoted value in one line. In JSON inside JSON the quotes have backslashes themselves.
fn quoted_length(bytes: &[u8], quote: u8, is_escaped: bool) -> Option<usize> {
    let mut at = 0;
    loop {
        match bytes.get(at)? {
            b'\n' => return None,
            b'\\' if !is_escaped => at += 2,
            byte if *byte == quote => {
                let value = &bytes[..at];
                let escapes = value.iter().rev().take_while(|byte| **byte == b'\\');
                return Some(if is_escaped { at - escapes.count() } else { at });
            }
            _ => at += 1,
        }
    }
}

fn is_placeholder(value: &str) -> bool {
    let is_filler = |byte: u8| matches!(byte, b'*' | b'.' | b'x' | b'X' | b'-' | b'_');
    value.is_empty()
        || value.starts_with(NO_STARTS)
        || NO_VALUES
            .iter()
            .any(|none| value.eq_ignore_ascii_case(none))
        || value.len() <= EXAMINED && value.bytes().all(is_filler)
}

fn has_digit(value: &str) -> bool {
    value
        .bytes()
        .take(EXAMINED)
        .any(|byte| byte.is_ascii_digit())
}

fn is_like_token(value: &str) -> bool {
    let value = value.as_bytes();
    let examined = &value[..value.len().min(EXAMINED)];
    let is_word = !examined.contains(&b' ');
    let has_digit = examined.iter().any(u8::is_ascii_digit);
    is_word && (value.len() >= 8 && has_digit || value.len() >= 24)
}

/// Whether nothing follows in the sentence: a lone word after `password:` is one.
fn ends_statement(rest: &str) -> bool {
    let rest = rest.trim_start_matches(['.', '!', '"', '\'', '`', '*', ' ']);
    rest.is_empty() || rest.starts_with(['\n', '\r', ',', ';', '}', ')', ']', '|', '<', '\\'])
}
