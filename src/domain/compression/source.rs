//! A message as the request for a summary quotes it: its author, and its text without secrets. The fields are
//! private, so no text reaches a request that was not redacted.

use serde_json::Value;

use super::redact::clean;
use crate::domain::conversation::message::{MessageKind, Role, ToolCall};
use crate::domain::turn::token_estimate::{tokens, weight_of_text};
use crate::domain::values::outside_text::normalise_json;

/// The tokens of a message's mark in a request.
const MARK_TOKENS: u64 = 16;
const MAX_NAME_CHARS: usize = 60;
const MAX_PART_CHARS: usize = 40;

/// Who said something. A summary names it in each decision and constraint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Author {
    /// The owner of the conversation.
    User,
    /// Another user in a group, or a guest.
    Member,
    Assistant,
    Tool,
    System,
    /// A notice or another text of the service.
    Service,
}

impl Author {
    const ALL: [Self; 6] = [
        Self::User,
        Self::Member,
        Self::Assistant,
        Self::Tool,
        Self::System,
        Self::Service,
    ];

    /// The author of a stored message, where no member speaks. The caller knows who is one.
    pub fn of(role: Role, kind: MessageKind) -> Self {
        match (kind, role) {
            (MessageKind::Summary | MessageKind::Handoff | MessageKind::Notice, _) => Self::Service,
            (MessageKind::Normal, Role::User) => Self::User,
            (MessageKind::Normal, Role::Assistant) => Self::Assistant,
            (MessageKind::Normal, Role::Tool) => Self::Tool,
            (MessageKind::Normal, Role::System) => Self::System,
        }
    }

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Member => "member",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
            Self::System => "system",
            Self::Service => "service",
        }
    }

    pub(super) fn from_label(label: &str) -> Option<Self> {
        let is_named = |author: &Self| label.eq_ignore_ascii_case(author.as_str());
        Self::ALL.into_iter().find(is_named)
    }
}

/// A message as it is stored: its members are JSON.
#[derive(Debug, Clone, Copy)]
pub struct StoredMessage<'a> {
    pub seq: i64,
    pub author: Author,
    /// The name of a member.
    pub name: Option<&'a str>,
    pub content: Option<&'a [u8]>,
    pub tool_calls: Option<&'a [u8]>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceMessage {
    seq: i64,
    author: Author,
    name: Option<String>,
    text: String,
    calls_tools: bool,
}

impl SourceMessage {
    pub fn read(stored: StoredMessage) -> Self {
        let mut text = stored.content.map(content_text).unwrap_or_default();
        let calls = stored.tool_calls.map(read_calls).unwrap_or_default();
        for call in &calls {
            if !text.is_empty() {
                text.push('\n');
            }
            let function = &call.function;
            text.push_str(&format!("calls {}: {}", function.name, function.arguments));
        }
        Self {
            seq: stored.seq,
            author: stored.author,
            name: stored.name.map(plain_name).filter(|name| !name.is_empty()),
            text: clean(&text).into_owned(),
            calls_tools: !calls.is_empty(),
        }
    }

    pub fn seq(&self) -> i64 {
        self.seq
    }

    pub fn author(&self) -> Author {
        self.author
    }

    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    pub fn text(&self) -> &str {
        &self.text
    }

    pub fn calls_tools(&self) -> bool {
        self.calls_tools
    }

    /// The tokens of the message in a request.
    pub fn tokens(&self) -> u64 {
        MARK_TOKENS + tokens(weight_of_text(&self.text))
    }

    /// Leaves out the middle of a text that makes the message larger than `most` tokens.
    pub(super) fn shorten(&mut self, most: u64) {
        if self.tokens() > most {
            self.text = without_middle(&self.text, most.saturating_sub(MARK_TOKENS));
        }
    }
}

/// The beginning and the end of a text, at most so many tokens, with a note of what is missing.
pub(super) fn without_middle(text: &str, most: u64) -> String {
    /// What the note weighs, with any number in it.
    const NOTE: u64 = 72;
    let weight = most.saturating_mul(4);
    let room = weight.saturating_sub(NOTE);
    let head_end = prefix_end(text.char_indices(), room / 3 * 2).unwrap_or(text.len());
    let mut tail_start = text.len();
    let mut used = 0;
    for (index, c) in text.char_indices().rev() {
        used += weight_of_char(c);
        if used > room / 3 || index < head_end {
            break;
        }
        tail_start = index;
    }
    let head = &text[..head_end];
    let missing = text[head_end..tail_start].chars().count();
    if weight < NOTE || missing == 0 {
        let end = prefix_end(text.char_indices(), weight).unwrap_or(text.len());
        return text[..end].to_owned();
    }
    let tail = &text[tail_start..];
    format!("{head}\n[… {missing} characters left out …]\n{tail}")
}

/// Where the characters end that weigh at most so much; `None` if all do.
fn prefix_end(chars: impl Iterator<Item = (usize, char)>, weight: u64) -> Option<usize> {
    let mut used = 0;
    for (index, c) in chars {
        used += weight_of_char(c);
        if used > weight {
            return Some(index);
        }
    }
    None
}

fn weight_of_char(c: char) -> u64 {
    weight_of_text(c.encode_utf8(&mut [0; 4]))
}

fn read_calls(json: &[u8]) -> Vec<ToolCall> {
    serde_json::from_slice(&normalise_json(json)).unwrap_or_default()
}

/// The text of stored content. What is no text is only named.
fn content_text(json: &[u8]) -> String {
    let json = normalise_json(json);
    match serde_json::from_slice(&json) {
        Ok(Value::Null) => String::new(),
        Ok(Value::String(text)) => text,
        Ok(Value::Array(parts)) => {
            let texts: Vec<String> = parts.iter().map(part_text).collect();
            texts.join("\n")
        }
        Ok(other @ (Value::Bool(_) | Value::Number(_) | Value::Object(_))) => other.to_string(),
        Err(_) => String::from_utf8_lossy(&json).into_owned(),
    }
}

fn part_text(part: &Value) -> String {
    let text = part["text"].as_str().or(part["refusal"].as_str());
    if let Some(text) = text {
        return text.to_owned();
    }
    let kind = part["type"].as_str().unwrap_or("part");
    let kind: String = kind.chars().take(MAX_PART_CHARS).collect();
    match kind.as_str() {
        "image_url" | "input_image" | "image" => "[image]".to_owned(),
        _ => format!("[{}]", plain_name(&kind)),
    }
}

/// A name that can stand inside a mark.
fn plain_name(name: &str) -> String {
    let is_plain = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '.' | '_' | '-');
    let plain = name.chars().filter(is_plain).take(MAX_NAME_CHARS);
    plain.collect::<String>().trim().to_owned()
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    pub fn source(seq: i64, author: Author, text: &str) -> SourceMessage {
        SourceMessage::read(StoredMessage {
            seq,
            author,
            name: None,
            content: Some(json!(text).to_string().as_bytes()),
            tool_calls: None,
        })
    }

    fn text_of(content: &str) -> String {
        SourceMessage::read(StoredMessage {
            seq: 1,
            author: Author::User,
            name: None,
            content: Some(content.as_bytes()),
            tool_calls: None,
        })
        .text
    }

    #[test]
    fn content_of_any_form_becomes_text() {
        for (content, expected) in [
            (r#""hi""#, "hi"),
            ("null", ""),
            (
                r#"[{"type":"text","text":"a"},{"type":"refusal","refusal":"b"}]"#,
                "a\nb",
            ),
            (
                r#"[{"type":"image_url","image_url":{"url":"data:AAAA"}}]"#,
                "[image]",
            ),
            (
                r#"[{"type":"input_audio","input_audio":{"data":"AAAA"}}]"#,
                "[input_audio]",
            ),
            (r#"[{"type":"<x]\n"}, 7]"#, "[x]\n[part]"),
            // What no column and no model takes.
            (r#""a\u0000b\ud800c""#, "a\u{FFFD}b\u{FFFD}c"),
            ("not json \u{0}", "not json \u{FFFD}"),
        ] {
            assert_eq!(text_of(content), expected, "{content}");
        }
    }

    #[test]
    fn calls_are_quoted_and_secrets_are_not() {
        let calls = json!([{"id": "c1", "type": "function", "function": {
            "name": "login", "arguments": "{\"user\":\"ann\",\"password\":\"hunter2\"}"}}]);
        let message = SourceMessage::read(StoredMessage {
            seq: 7,
            author: Author::Assistant,
            name: Some("A\n\"<b>\""),
            content: Some(br#""Logging in.""#),
            tool_calls: Some(calls.to_string().as_bytes()),
        });
        let expected = "Logging in.\ncalls login: {\"user\":\"ann\",\"password\":\"[redacted]\"}";
        assert_eq!(message.text(), expected);
        assert!(message.calls_tools());
        assert_eq!(message.name(), Some("Ab"));
    }

    #[test]
    fn a_long_text_keeps_its_beginning_and_its_end() {
        let text = format!("begin {} end", "x".repeat(10_000));
        let short = without_middle(&text, 100);
        assert!(short.starts_with("begin xxx") && short.ends_with("xxx end"));
        assert!(short.contains("characters left out"));
        assert!(without_middle(&"日本".repeat(5000), 100).starts_with("日本"));
    }

    proptest! {
        #[test]
        fn a_shortened_message_has_at_most_so_many_tokens(text in ".{0,400}", most in 0_u64..200) {
            let mut message = source(1, Author::Tool, &text);
            let before = message.clone();
            message.shorten(most);
            if before.tokens() <= most {
                prop_assert_eq!(message, before);
            } else {
                prop_assert!(message.tokens() <= most.max(MARK_TOKENS));
            }
        }
    }
}
