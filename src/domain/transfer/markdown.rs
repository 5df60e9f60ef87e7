//! A conversation as Markdown, for reading. Texts appear as they were written, but no text can pass for a
//! heading of the document, continue into the next message, or become HTML.

use serde_json::Value;
use serde_json::value::RawValue;

use crate::domain::conversation::message::{Message, MessageKind, Role};
use crate::domain::transfer::export::{Head, Piece};
use crate::error::{Error, Result};

pub fn write_head(head: &Head, out: &mut String) {
    let title = head.title.as_deref().unwrap_or("Conversation");
    let title = without_html(title, &mut true);
    out.push_str(&format!(
        "# {title}\n\n{} · agent {} · begun {} · exported {}\n",
        head.id,
        head.agent,
        head.created_at.format(TIME),
        head.exported_at.format(TIME),
    ));
}

const TIME: &str = "%Y-%m-%dT%H:%M:%SZ";

/// Writes an original message. Links and copies are omitted: only an import needs them.
pub fn write_piece(piece: &Piece, out: &mut String) -> Result<()> {
    match piece {
        Piece::Link(_) | Piece::Copy { .. } => Ok(()),
        Piece::Original(message) => write_message(message, out),
    }
}

fn write_message(message: &Message, out: &mut String) -> Result<()> {
    let time = message.created_at.format(TIME);
    let role = message.role.as_str();
    let mut blocks = Vec::new();
    match message.kind {
        MessageKind::Normal => blocks.push(format!("### {role} · {time}")),
        MessageKind::Handoff | MessageKind::Notice => {
            blocks.push(format!("### {role} · {time} · {}", message.kind.as_str()));
        }
        MessageKind::Summary => {
            blocks.push(format!("**Summary of what came before** · {time}"));
        }
    }
    if let Some(content) = read(&message.content)? {
        add_content(&content, message.role, &mut blocks)?;
    }
    if let Some(calls) = read(&message.tool_calls)? {
        blocks.push(fenced("json", &pretty(&calls)?));
    }
    let text = blocks.join("\n\n");
    out.push('\n');
    match message.kind {
        MessageKind::Summary => out.push_str(&quoted(&text)),
        MessageKind::Normal | MessageKind::Handoff | MessageKind::Notice => out.push_str(&text),
    }
    out.push('\n');
    Ok(())
}

fn read(raw: &Option<Box<RawValue>>) -> Result<Option<Value>> {
    raw.as_ref()
        .map(|raw| serde_json::from_str(raw.get()).map_err(Error::internal))
        .transpose()
}

fn pretty(value: &Value) -> Result<String> {
    serde_json::to_string_pretty(value).map_err(Error::internal)
}

fn add_content(content: &Value, role: Role, blocks: &mut Vec<String>) -> Result<()> {
    let block = |text: &str| match role {
        Role::Tool => fenced("", text),
        Role::System | Role::User | Role::Assistant => confined(text),
    };
    if let Value::String(text) = content {
        blocks.push(block(text));
    }
    for part in content.as_array().into_iter().flatten() {
        blocks.push(match text_of(part) {
            Some(text) => block(text),
            None => fenced("json", &pretty(part)?),
        });
    }
    blocks.retain(|block| !block.is_empty());
    Ok(())
}

fn text_of(part: &Value) -> Option<&str> {
    let kind = part.get("type").and_then(Value::as_str);
    let is_text = matches!(kind, Some("text" | "input_text" | "output_text"));
    part.get("text").filter(|_| is_text).and_then(Value::as_str)
}

/// A code block that no text in it can end.
fn fenced(language: &str, text: &str) -> String {
    let text = with_plain_line_ends(text);
    let longest = text.split(|c| c != '`').map(str::len).max().unwrap_or(0);
    let fence = "`".repeat((longest + 1).max(3));
    let end = if text.ends_with('\n') { "" } else { "\n" };
    format!("{fence}{language}\n{text}{end}{fence}")
}

fn quoted(text: &str) -> String {
    let line = |line: &str| format!("> {line}").trim_end().to_owned();
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

/// In Markdown, a carriage return alone ends a line.
fn with_plain_line_ends(text: &str) -> String {
    text.replace("\r\n", "\n").replace('\r', "\n")
}

/// Markdown of a message, confined to its section.
fn confined(text: &str) -> String {
    let mut lines: Vec<String> = Vec::new();
    let mut fence: Option<(char, usize)> = None;
    // Whether a code span may have started on an earlier line of the paragraph.
    let mut in_open_span = false;
    for line in with_plain_line_ends(text).lines() {
        let rest = line.trim_start_matches(' ');
        let in_margin = line.len() - rest.len() <= 3;
        if let Some((mark, length)) = fence {
            let (run, after) = run_of(rest, mark);
            if in_margin && run >= length && after.trim().is_empty() {
                fence = None;
            }
            lines.push(line.to_owned());
        } else if let Some(opened) = opens_fence(rest).filter(|_| in_margin) {
            fence = Some(opened);
            // Without its indentation, so that it is no part of a list and ends only where this function finds it.
            lines.push(rest.to_owned());
        } else {
            in_open_span &= !rest.is_empty();
            let text = without_html(line, &mut in_open_span);
            let escape = in_margin && (rest.starts_with('#') || is_underline(rest));
            lines.push(if escape {
                text.replacen(&rest[..1], &format!("\\{}", &rest[..1]), 1)
            } else {
                text
            });
        }
    }
    if let Some((mark, length)) = fence {
        lines.push(mark.to_string().repeat(length));
    }
    lines.join("\n")
}

/// The number of `mark`s at the beginning of `text`, and the rest.
fn run_of(text: &str, mark: char) -> (usize, &str) {
    let after = text.trim_start_matches(mark);
    (text.len() - after.len(), after)
}

fn opens_fence(text: &str) -> Option<(char, usize)> {
    ['`', '~'].into_iter().find_map(|mark| {
        let (run, info) = run_of(text, mark);
        (run >= 3 && (mark == '~' || !info.contains('`'))).then_some((mark, run))
    })
}

/// Whether the line turns the previous one into a heading.
fn is_underline(text: &str) -> bool {
    let text = text.trim_end();
    let consists_of = |mark: char| !text.is_empty() && text.chars().all(|c| c == mark);
    consists_of('=') || consists_of('-')
}

/// Escapes each `<` that could start a tag, except in code.
fn without_html(line: &str, in_open_span: &mut bool) -> String {
    // Some constructs end a code span early. A line with one of them has no code spans.
    let spans = !*in_open_span && !line.contains("\\`") && !line.contains('|');
    let mut out = String::with_capacity(line.len());
    let mut rest = line;
    while let Some(index) = rest.find(['<', '`']) {
        out.push_str(&rest[..index]);
        rest = &rest[index..];
        let (run, after) = run_of(rest, '`');
        if run == 0 {
            let begins_tag = |c: char| c.is_ascii_alphabetic() || matches!(c, '/' | '!' | '?');
            let tag = rest[1..].starts_with(begins_tag);
            out.push_str(if tag { "&lt;" } else { "<" });
            rest = &rest[1..];
            continue;
        }
        let end = end_of_span(after, run).filter(|_| spans);
        *in_open_span |= end.is_none();
        let length = run + end.unwrap_or(0);
        out.push_str(&rest[..length]);
        rest = &rest[length..];
    }
    out.push_str(rest);
    out
}

/// The end of the code span that a run of backticks before `text` started.
fn end_of_span(text: &str, length: usize) -> Option<usize> {
    let mut end = 0;
    while let Some(found) = text[end..].find('`') {
        let (run, _) = run_of(&text[end + found..], '`');
        end += found + run;
        if run == length {
            return Some(end);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_becomes_a_heading_or_html_or_leaves_its_section() {
        for (text, expected) in [
            ("plain *text*", "plain *text*"),
            ("# a\n### user · 2026", "\\# a\n\\### user · 2026"),
            ("   ## a\n    # code", "   \\## a\n    # code"),
            ("a\n===\nb\n ---", "a\n\\===\nb\n \\---"),
            ("a\r### b\r\nc", "a\n\\### b\nc"),
            ("- item\n- [ ] b", "- item\n- [ ] b"),
            ("```rust\n# <b>\n```\n# c", "```rust\n# <b>\n```\n\\# c"),
            ("```\nopen", "```\nopen\n```"),
            ("~~~~ x\n~~~\n```", "~~~~ x\n~~~\n```\n~~~~"),
            ("````\n```\n# a", "````\n```\n# a\n````"),
            (
                "1. a\n   ```\n   x\n   ```\n# b",
                "1. a\n```\n   x\n   ```\n\\# b",
            ),
            ("<b>x</b> <!-- y", "&lt;b>x&lt;/b> &lt;!-- y"),
            ("1 < 2 <- 3", "1 < 2 <- 3"),
            ("`Vec<u8>` <b>", "`Vec<u8>` &lt;b>"),
            ("``a`<b>`` <i>", "``a`<b>`` &lt;i>"),
            ("`a\nb` <b> `", "`a\nb` &lt;b> `"),
            ("`a\n\n`<b>`", "`a\n\n`<b>`"),
            ("\\` <b> `", "\\` &lt;b> `"),
            ("| ` | <b> ` |", "| ` | &lt;b> ` |"),
            ("\\<b>", "\\&lt;b>"),
            ("", ""),
        ] {
            assert_eq!(confined(text), expected, "{text:?}");
        }
    }

    #[test]
    fn a_fence_is_longer_than_any_run_inside() {
        assert_eq!(fenced("json", "{}"), "```json\n{}\n```");
        assert_eq!(fenced("", "a\n"), "```\na\n```");
        assert_eq!(fenced("", "```\n````x"), "`````\n```\n````x\n`````");
    }

    #[test]
    fn a_quote_has_a_mark_on_every_line() {
        assert_eq!(quoted("a\n\nb"), "> a\n>\n> b");
    }
}
