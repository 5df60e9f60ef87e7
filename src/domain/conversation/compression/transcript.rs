//! A transcript in outline, and its tool groups. Everything reads it through `row`, so that tests count how often.

#[cfg(test)]
use std::cell::Cell;
use std::ops::Range;

use super::outline::Outline;
use super::shortening::rendered_tokens;
use crate::domain::conversation::message::Role;

pub(super) struct Transcript<'a> {
    rows: &'a [Outline],
    shortened_through: i64,
    #[cfg(test)]
    reads: Cell<usize>,
}

impl<'a> Transcript<'a> {
    pub fn new(rows: &'a [Outline], shortened_through: i64) -> Self {
        Self {
            rows,
            shortened_through,
            #[cfg(test)]
            reads: Cell::new(0),
        }
    }

    pub fn len(&self) -> usize {
        self.rows.len()
    }

    pub fn row(&self, index: usize) -> &Outline {
        #[cfg(test)]
        self.reads.set(self.reads.get() + 1);
        &self.rows[index]
    }

    #[cfg(test)]
    pub fn reads(&self) -> usize {
        self.reads.get()
    }

    /// The tokens of some messages, as a model gets them.
    pub fn tokens(&self, range: Range<usize>) -> i64 {
        range
            .map(|index| rendered_tokens(self.row(index), self.shortened_through))
            .sum()
    }

    /// How many system messages stand at the beginning.
    pub fn head_length(&self) -> usize {
        let is_other = |index: &usize| self.row(*index).role != Role::System;
        (0..self.len()).find(is_other).unwrap_or(self.len())
    }

    /// The last message of a user.
    pub fn last_users(&self) -> Option<usize> {
        (0..self.len()).rfind(|index| self.row(*index).is_users())
    }

    /// Where the newest turn of a user begins: after the last message of the model or a tool before the last of a
    /// user, who may have written several.
    pub fn newest_turn(&self) -> usize {
        let last_users = self.last_users().unwrap_or(0);
        let is_answer = |index: &usize| {
            let row = self.row(*index);
            row.is_models() || row.role == Role::Tool
        };
        let answer = (0..last_users).rfind(is_answer);
        answer.map_or(0, |index| index + 1)
    }

    /// The messages from an index on, in groups that are never divided. A group is a call of tools and what
    /// follows, up to the last result before the model speaks again; any other message is one alone. Ids do not
    /// count: local servers number the calls of each answer from 0 on.
    pub fn groups(&self, from: usize) -> Vec<Range<usize>> {
        let mut groups = Vec::new();
        let mut start = from;
        while start < self.len() {
            let end = self.group_end(start);
            groups.push(start..end);
            start = end;
        }
        groups
    }

    fn group_end(&self, start: usize) -> usize {
        let mut last = start;
        if self.row(start).calls == 0 {
            return last + 1;
        }
        for index in start + 1..self.len() {
            let row = self.row(index);
            if row.role == Role::Tool {
                last = index;
            } else if row.is_models() || row.calls > 0 {
                break;
            }
        }
        last + 1
    }

    /// Whether a group waits for results.
    pub fn is_open(&self, group: &Range<usize>) -> bool {
        let calls = usize::from(self.row(group.start).calls);
        let is_result = |index: &usize| self.row(*index).role == Role::Tool;
        group.clone().filter(is_result).count() < calls
    }

    pub fn has_image(&self, group: &Range<usize>) -> bool {
        group.clone().any(|index| self.row(index).has_image)
    }
}
