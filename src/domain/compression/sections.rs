//! The parts of a summary, and who is named in a line of it. Headings and labels are English words in every
//! language, so that the service can read them.

use super::source::Author;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Section {
    Goal,
    Constraints,
    Done,
    State,
    Decisions,
    Files,
    OpenPoints,
    /// Made by the check: what tools claimed to be a constraint.
    Reported,
}

impl Section {
    const ALL: [Self; 8] = [
        Self::Goal,
        Self::Constraints,
        Self::Done,
        Self::State,
        Self::Decisions,
        Self::Files,
        Self::OpenPoints,
        Self::Reported,
    ];

    pub const fn title(self) -> &'static str {
        match self {
            Self::Goal => "Goal",
            Self::Constraints => "Constraints",
            Self::Done => "Done",
            Self::State => "State",
            Self::Decisions => "Decisions",
            Self::Files => "Files and commands",
            Self::OpenPoints => "Open points",
            Self::Reported => "Reported by tools",
        }
    }

    /// Whether each line names who said it.
    pub const fn names_authors(self) -> bool {
        matches!(self, Self::Constraints | Self::Decisions)
    }
}

/// What a line of a summary is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Line {
    Blank,
    /// A heading; `None` is one that no summary of this service has.
    Heading(Option<Section>),
    Content,
}

impl Line {
    pub fn of(line: &str) -> Self {
        let line = line.trim();
        if line.is_empty() {
            return Self::Blank;
        }
        let is_bold = line.starts_with("**") && line.trim_end_matches(':').ends_with("**");
        let is_heading = line.starts_with('#') || is_bold;
        let words = line.trim_matches(|c: char| matches!(c, '#' | '*' | ':') || c.is_whitespace());
        let is_titled = |section: &Section| words.eq_ignore_ascii_case(section.title());
        let section = Section::ALL.into_iter().find(is_titled);
        if is_heading || section.is_some() && line.ends_with(':') {
            Self::Heading(section)
        } else {
            Self::Content
        }
    }
}

/// Who is named at the beginning of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Label {
    Author(Author),
    /// The model did not know it.
    Unknown,
}

pub(super) const UNKNOWN: &str = "[unknown]";

/// The label after the bullet: `- [member Ann] …`.
pub(super) fn label(line: &str) -> Option<Label> {
    let (_, after) = split_bullet(line);
    let (label, _) = after.strip_prefix('[')?.split_once(']')?;
    let word = label.split(|c: char| !c.is_alphanumeric()).next()?;
    if word.eq_ignore_ascii_case("unknown") {
        Some(Label::Unknown)
    } else {
        Author::from_label(word).map(Label::Author)
    }
}

/// A line's indent and bullet, and its text.
pub(super) fn split_bullet(line: &str) -> (&str, &str) {
    let is_of_bullet = |c: char| c.is_whitespace() || matches!(c, '-' | '*' | '•' | '–' | '+');
    let text = line.trim_start_matches(is_of_bullet);
    let number = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let text = match text[number..].strip_prefix(['.', ')']) {
        Some(after) if number > 0 => after.trim_start(),
        Some(_) | None => text,
    };
    line.split_at(line.len() - text.len())
}

/// The text of a line without its label.
pub(super) fn without_label(line: &str) -> &str {
    let (_, text) = split_bullet(line);
    match (label(line), text.split_once(']')) {
        (Some(_), Some((_, after))) => after.trim_start(),
        (_, _) => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headings_are_read_in_the_forms_that_models_use() {
        for (line, expected) in [
            ("## Goal", Line::Heading(Some(Section::Goal))),
            ("# open POINTS", Line::Heading(Some(Section::OpenPoints))),
            (
                "**Constraints:**",
                Line::Heading(Some(Section::Constraints)),
            ),
            (
                "**Constraints**:",
                Line::Heading(Some(Section::Constraints)),
            ),
            ("Files and commands:", Line::Heading(Some(Section::Files))),
            ("## 目标", Line::Heading(None)),
            ("Goal", Line::Content),
            ("- Done: the goal", Line::Content),
            ("  ", Line::Blank),
        ] {
            assert_eq!(Line::of(line), expected, "{line}");
        }
    }

    #[test]
    fn labels_are_read_after_any_bullet() {
        let author = |author| Some(Label::Author(author));
        for (line, expected, text) in [
            ("- [user] tea", author(Author::User), "tea"),
            ("* [Member: Ann] tea", author(Author::Member), "tea"),
            ("2. [tool] tea", author(Author::Tool), "tea"),
            ("[assistant] tea", author(Author::Assistant), "tea"),
            ("- [unknown] tea", Some(Label::Unknown), "tea"),
            ("- [x] tea", None, "[x] tea"),
            ("- tea [user]", None, "tea [user]"),
            ("3 teas", None, "3 teas"),
        ] {
            assert_eq!(label(line), expected, "{line}");
            assert_eq!(without_label(line), text, "{line}");
        }
    }
}
