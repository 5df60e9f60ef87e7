//! What a summary was made from, as far as its check asks: the identifiers in its input, who spoke there, and
//! how large it was. What tools wrote is kept apart from what people and the assistant wrote.

use std::collections::HashSet;

use super::identifiers::Haystack;
use super::sections::{Label, Line, Section, label};
use super::source::{Author, SourceMessage};
use crate::domain::turn::token_estimate::{tokens, weight_of_text};

/// Where an identifier of a summary comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    Conversation,
    /// Only from a text that nobody in the conversation wrote.
    Tools,
    Nowhere,
}

#[derive(Debug)]
pub struct Evidence {
    conversation: Haystack,
    tools: Haystack,
    authors: HashSet<Author>,
    tokens: u64,
    mark: String,
}

impl Evidence {
    pub(super) fn new(mark: &str) -> Self {
        Self {
            conversation: Haystack::default(),
            tools: Haystack::default(),
            authors: HashSet::new(),
            tokens: 0,
            mark: mark.to_owned(),
        }
    }

    pub(super) fn add_message(&mut self, message: &SourceMessage) {
        let author = message.author();
        self.authors.insert(author);
        self.tokens += tokens(weight_of_text(message.text()));
        let haystack = match author {
            Author::User | Author::Member | Author::Assistant | Author::System => {
                &mut self.conversation
            }
            Author::Tool | Author::Service => &mut self.tools,
        };
        haystack.add(message.text());
    }

    /// Of the previous summary only constraints count as the conversation's: their origin was checked. In a
    /// text without sections, which a client gave, all does.
    pub(super) fn add_previous(&mut self, summary: &str) {
        self.tokens += tokens(weight_of_text(summary));
        let mut section = None;
        let has_sections = summary
            .lines()
            .any(|line| matches!(Line::of(line), Line::Heading(Some(_))));
        for line in summary.lines() {
            if let Line::Heading(next) = Line::of(line) {
                section = next;
                continue;
            }
            let label = label(line);
            if let Some(Label::Author(author)) = label {
                self.authors.insert(author);
            }
            let is_of_tool = label == Some(Label::Author(Author::Tool));
            if !has_sections || section == Some(Section::Constraints) && !is_of_tool {
                self.conversation.add(line);
            } else {
                self.tools.add(line);
            }
        }
    }

    pub(super) fn add_focus(&mut self, focus: &str) {
        self.conversation.add(focus);
    }

    pub(super) fn origin(&self, identifier: &str) -> Origin {
        if self.conversation.contains(identifier) {
            Origin::Conversation
        } else if self.tools.contains(identifier) {
            Origin::Tools
        } else {
            Origin::Nowhere
        }
    }

    /// Whether somebody spoke. Models do not tell the owner from the members of a group.
    pub(super) fn has_author(&self, author: Author) -> bool {
        let people = [Author::User, Author::Member];
        if people.contains(&author) {
            people.iter().any(|author| self.authors.contains(author))
        } else {
            self.authors.contains(&author)
        }
    }

    /// The tokens of the transcript and the previous summary, without their marks.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    pub(super) fn mark(&self) -> &str {
        &self.mark
    }
}
