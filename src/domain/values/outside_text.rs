//! Normalises text from outside for storage: U+0000, which Postgres cannot store, and unpaired surrogates, which
//! UTF-8 cannot encode, become U+FFFD. Applied once, at the input: to request bodies and documents, to responses
//! of models, to key sets. Not to tokens: a subject with one is refused, so it never equals another subject.

use std::borrow::Cow;

use memchr::memmem;

const REPLACEMENT: &[u8] = br"\ufffd";
/// The length of `\u0000`.
const ESCAPE_LEN: usize = 6;

/// Normalises JSON of a server or a client. In JSON both can only occur as escapes; malformed text stays
/// malformed.
pub fn normalise_json(json: &[u8]) -> Cow<'_, [u8]> {
    if memmem::find(json, br"\u").is_none() {
        return Cow::Borrowed(json);
    }
    let mut normal: Vec<u8> = Vec::new();
    let mut copied = 0;
    let mut at = 0;
    while let Some(found) = memchr::memchr(b'\\', &json[at..]) {
        let start = at + found;
        at = match unit_at(json, start) {
            Some(unit) if is_pair(unit, json, start) => start + 2 * ESCAPE_LEN,
            Some(0 | 0xD800..=0xDFFF) => {
                normal.extend_from_slice(&json[copied..start]);
                normal.extend_from_slice(REPLACEMENT);
                copied = start + ESCAPE_LEN;
                copied
            }
            Some(_) => start + ESCAPE_LEN,
            // Another escape, of one character, which may be a backslash.
            None => (start + 2).min(json.len()),
        };
    }
    if copied == 0 {
        return Cow::Borrowed(json);
    }
    normal.extend_from_slice(&json[copied..]);
    Cow::Owned(normal)
}

/// Normalises a text that is not JSON.
pub fn normalise_text(text: &str) -> Cow<'_, str> {
    if text.contains('\0') {
        Cow::Owned(text.replace('\0', "\u{FFFD}"))
    } else {
        Cow::Borrowed(text)
    }
}

/// The UTF-16 unit of the escape at `start`.
fn unit_at(json: &[u8], start: usize) -> Option<u16> {
    let digits = json.get(start..)?.strip_prefix(br"\u")?.get(..4)?;
    let is_hex = digits.iter().all(u8::is_ascii_hexdigit);
    let digits = std::str::from_utf8(digits).ok().filter(|_| is_hex)?;
    u16::from_str_radix(digits, 16).ok()
}

/// Whether the unit at `start` is the first half of a surrogate pair.
fn is_pair(unit: u16, json: &[u8], start: usize) -> bool {
    let second = unit_at(json, start + ESCAPE_LEN);
    matches!((unit, second), (0xD800..=0xDBFF, Some(0xDC00..=0xDFFF)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn normal(json: &str) -> String {
        String::from_utf8(normalise_json(json.as_bytes()).into_owned()).unwrap()
    }

    #[test]
    fn only_characters_that_cannot_be_stored_are_replaced() {
        for (json, expected) in [
            (r#""plain""#, r#""plain""#),
            (r#""\u0000""#, r#""\ufffd""#),
            (r#""a\u0000b\u0000""#, r#""a\ufffdb\ufffd""#),
            (r#""\u0001\u001f\n""#, r#""\u0001\u001f\n""#),
            // An escaped backslash, followed by plain digits.
            (r#""\\u0000""#, r#""\\u0000""#),
            (r#""\\\u0000""#, r#""\\\ufffd""#),
            (r#""\ud83d\ude00""#, r#""\ud83d\ude00""#),
            (r#""\ud83d""#, r#""\ufffd""#),
            (r#""\uDE00\uD83D""#, r#""\ufffd\ufffd""#),
            (r#""\ud83d\ud83d\ude00""#, r#""\ufffd\ud83d\ude00""#),
            (r#""\ud83d\u0000""#, r#""\ufffd\ufffd""#),
            (r#""\ud83dx""#, r#""\ufffdx""#),
            (r#"{"\u0000": 1}"#, r#"{"\ufffd": 1}"#),
            // Malformed JSON.
            (r#""\u00"#, r#""\u00"#),
            (r#""\u+000""#, r#""\u+000""#),
            (r#"\"#, r#"\"#),
        ] {
            assert_eq!(normal(json), expected);
        }
        assert_eq!(normalise_text("a\0b"), "a\u{FFFD}b");
    }

    proptest! {
        /// The result for any UTF-16 is that of a lossy decoder.
        #[test]
        fn any_escaped_units_become_text_without_nul(units in prop::collection::vec(
            prop_oneof![Just(0_u16), 0xD7FE..0xE002_u16, 0_u16..0x80, any::<u16>()], 0..20)) {
            let escaped: String = units.iter().map(|unit| format!("\\u{unit:04x}")).collect();
            let read: String = serde_json::from_str(&normal(&format!("\"{escaped}\""))).unwrap();
            let expected = String::from_utf16_lossy(&units).replace('\0', "\u{FFFD}");
            prop_assert_eq!(read, expected);
        }
    }
}
