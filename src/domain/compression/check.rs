//! Whether a model's answer is a summary. What is wrong in single lines is dropped or moved; an answer with
//! too much of it is refused, and the conversation stays as it was.

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};

use super::evidence::{Evidence, Origin};
use super::identifiers::{identifiers, normalise};
use super::redact::clean;
use super::sections::{Label, Line, Section, UNKNOWN, label, split_bullet, without_label};
use super::source::Author;
use crate::domain::turn::answer::Answer;
use crate::domain::turn::token_estimate::{tokens, weight_of_text};
use crate::domain::values::text_enum::text_enum;

/// One line of so many may be dropped.
const LINES_PER_DROPPED: usize = 5;
/// A text with fewer different pieces of `PIECE` characters repeats itself.
const PIECE: usize = 8;
const PIECES_PER_DIFFERENT: usize = 10;
const LONG: usize = 400;

text_enum!(
    /// Why an answer is no summary. The words are in metrics and in the state of a conversation.
    InvalidSummary {
        Empty = "empty",
        ToolCall = "tool_call",
        Refused = "refused",
        /// Its end is missing: files and open points would be lost.
        CutOff = "cut_off",
        /// It has no reason to end, or one that nobody knows.
        Unfinished = "unfinished",
        /// It repeats the request.
        Echo = "echo",
        Nonsense = "nonsense",
        TooLarge = "too_large",
        NotSmaller = "not_smaller",
        InventedIdentifiers = "invented_identifiers",
    }
);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    pub text: String,
    /// Lines with identifiers or authors that were not in the input.
    pub dropped_lines: usize,
}

impl Summary {
    pub fn tokens(&self) -> u64 {
        tokens(weight_of_text(&self.text))
    }
}

/// Checks the answer to a request that `evidence` is of. A summary has at most `largest` tokens.
pub fn check(
    answer: &Answer,
    evidence: &Evidence,
    largest: u32,
) -> Result<Summary, InvalidSummary> {
    check_end(answer)?;
    let text = clean(&answer.text);
    let text = plain_text(without_wrapping(&text));
    let text = text.trim();
    if !text.contains(char::is_alphanumeric) {
        return Err(InvalidSummary::Empty);
    }
    if text.contains(evidence.mark()) {
        return Err(InvalidSummary::Echo);
    }
    check_size(text, evidence, largest)?;
    if is_nonsense(text) {
        return Err(InvalidSummary::Nonsense);
    }
    let summary = check_lines(text, evidence)?;
    check_size(&summary.text, evidence, largest)?;
    Ok(summary)
}

/// An answer that was cut off is no summary. Its last sections are missing, and the next summary would take
/// them for settled.
fn check_end(answer: &Answer) -> Result<(), InvalidSummary> {
    if !answer.tool_calls().is_empty() {
        return Err(InvalidSummary::ToolCall);
    }
    if !answer.refusal.is_empty() {
        return Err(InvalidSummary::Refused);
    }
    let reason = answer.finish_reason.as_deref().unwrap_or_default();
    match reason.to_ascii_lowercase().as_str() {
        "stop" | "end_turn" | "stop_sequence" | "eos" | "eos_token" => Ok(()),
        "tool_calls" | "function_call" | "tool_use" => Err(InvalidSummary::ToolCall),
        "length" | "max_tokens" => Err(InvalidSummary::CutOff),
        "content_filter" | "refusal" | "safety" => Err(InvalidSummary::Refused),
        _ => Err(InvalidSummary::Unfinished),
    }
}

fn check_size(text: &str, evidence: &Evidence, largest: u32) -> Result<(), InvalidSummary> {
    let size = tokens(weight_of_text(text));
    if size > u64::from(largest) {
        Err(InvalidSummary::TooLarge)
    } else if size >= evidence.tokens() {
        Err(InvalidSummary::NotSmaller)
    } else {
        Ok(())
    }
}

/// Without thoughts before the answer, and without a fence around it.
fn without_wrapping(text: &str) -> &str {
    let mut text = text.trim();
    for (open, close) in [("<think>", "</think>"), ("<thinking>", "</thinking>")] {
        if let Some(thoughts) = text.strip_prefix(open) {
            text = thoughts
                .split_once(close)
                .map_or("", |(_, answer)| answer.trim());
        }
    }
    let fenced = text
        .strip_prefix("```")
        .and_then(|text| text.strip_suffix("```"));
    let inside = fenced.and_then(|text| text.split_once('\n'));
    match inside {
        Some((language, inside)) if !inside.contains("```") && language.len() < 16 => inside,
        Some(_) | None => text,
    }
}

/// All line ends are the same, and control characters are gone.
fn plain_text(text: &str) -> String {
    let text = text
        .replace("\r\n", "\n")
        .replace(['\r', '\u{2028}', '\u{2029}', '\u{85}'], "\n");
    text.chars()
        .filter(|c| !c.is_control() || matches!(c, '\n' | '\t'))
        .collect()
}

fn is_nonsense(text: &str) -> bool {
    let chars: Vec<char> = text.chars().collect();
    let replaced = chars.iter().filter(|c| **c == '\u{FFFD}').count();
    if replaced * 10 > chars.len() {
        return true;
    }
    let hasher = RandomState::new();
    let pieces = chars.windows(PIECE).map(|piece| hasher.hash_one(piece));
    let different: HashSet<u64> = pieces.collect();
    chars.len() >= LONG && different.len() * PIECES_PER_DIFFERENT < chars.len()
}

/// What becomes of a line.
enum Verdict {
    Keep,
    /// In front of its text: who said it is not known.
    KeepUnknown,
    /// It is what a tool wrote, and no constraint.
    Report,
    Drop,
}

fn check_lines(text: &str, evidence: &Evidence) -> Result<Summary, InvalidSummary> {
    let mut lines: Vec<String> = Vec::new();
    let mut reported: Vec<String> = Vec::new();
    let mut section = None;
    let mut dropped_lines = 0;
    let mut all_lines = 0;
    for line in text.lines() {
        match Line::of(line) {
            Line::Blank => {
                lines.push(String::new());
                continue;
            }
            Line::Heading(next) => {
                section = next;
                // A heading of nothing that is known is checked like a line.
                let is_kept = next.is_some() || is_supported(line, evidence);
                if is_kept && next != Some(Section::Reported) {
                    lines.push(line.trim_end().to_owned());
                }
                continue;
            }
            Line::Content => all_lines += 1,
        }
        match verdict(line, section, evidence) {
            Verdict::Keep => lines.push(line.trim_end().to_owned()),
            Verdict::KeepUnknown => {
                let (bullet, text) = split_bullet(line);
                lines.push(format!("{bullet}{UNKNOWN} {}", text.trim_end()));
            }
            Verdict::Report => {
                reported.push(format!("- [tool] {}", without_label(line).trim_end()))
            }
            Verdict::Drop => dropped_lines += 1,
        }
    }
    if dropped_lines * LINES_PER_DROPPED > all_lines {
        return Err(InvalidSummary::InventedIdentifiers);
    }
    let mut text = lines.join("\n").trim().to_owned();
    if !reported.is_empty() {
        let heading = format!("\n\n## {}\n", Section::Reported.title());
        text.push_str(&heading);
        text.push_str(&reported.join("\n"));
    }
    if all_lines == dropped_lines {
        return Err(InvalidSummary::Empty);
    }
    Ok(Summary {
        text: text.trim().to_owned(),
        dropped_lines,
    })
}

fn is_supported(line: &str, evidence: &Evidence) -> bool {
    let normal = normalise(line);
    identifiers(&normal).all(|identifier| evidence.origin(identifier) != Origin::Nowhere)
}

fn verdict(line: &str, section: Option<Section>, evidence: &Evidence) -> Verdict {
    let normal = normalise(line);
    let mut is_of_tools = false;
    for identifier in identifiers(&normal) {
        match evidence.origin(identifier) {
            Origin::Conversation => {}
            Origin::Tools => is_of_tools = true,
            Origin::Nowhere => return Verdict::Drop,
        }
    }
    let Some(section) = section else {
        return Verdict::Keep;
    };
    if section == Section::Reported {
        return Verdict::Report;
    }
    if !section.names_authors() {
        return Verdict::Keep;
    }
    let label = label(line);
    let is_constraint = section == Section::Constraints;
    match label {
        Some(Label::Author(Author::Tool | Author::Service)) if is_constraint => Verdict::Report,
        Some(Label::Author(author)) if !evidence.has_author(author) => Verdict::Drop,
        Some(_) | None if is_constraint && is_of_tools => Verdict::Report,
        Some(_) => Verdict::Keep,
        None => Verdict::KeepUnknown,
    }
}

#[cfg(test)]
#[path = "check_tests.rs"]
mod tests;
