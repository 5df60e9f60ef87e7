//! Which messages a compression keeps. The plan is made before the model is asked, with the largest summary that it
//! may give: it divides no tool group, always keeps the last message of a user, and refuses where it does not help.

use std::ops::Range;
use std::time::Duration;

use super::budget::{Pressure, TokenLimits};
use super::outline::Outline;
use super::transcript::Transcript;
use crate::domain::conversation::message::MessageKind;
use crate::domain::conversation::session::CompressionRecord;
use crate::error::{Code, Error};

pub const MAX_KEEP_LAST: u32 = 1000;
/// A smaller transcript may get a summary that is larger than itself; that does no harm.
const SMALL_TOKENS: i64 = 256;

/// Which messages at the end are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tail {
    /// What fits.
    Tokens(TokenLimits),
    /// The last so many messages.
    Messages(usize),
    /// All from the so many-th last message of a user on.
    FromUsers(usize),
}

/// What a compression has to save.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Saving {
    /// Anything: the caller gave the summary.
    Any,
    /// A fifth of the transcript: a summary costs a call of a model.
    Fifth,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanRequest {
    pub tail: Tail,
    /// The size of the summary, or the largest that it may have.
    pub summary_tokens: i64,
    pub saving: Saving,
    /// The first message of the turn that runs, if the compression is a part of it.
    pub running_since: Option<i64>,
    /// Through which number bulky tool results are rendered short.
    pub shortened_through: i64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// System messages at the beginning. They stay before the summary.
    pub head: Vec<i64>,
    /// Messages after the summary.
    pub tail: Vec<i64>,
    pub summarised: i64,
    pub tokens_before: i64,
    pub tokens_after: i64,
}

impl Plan {
    pub fn kept(&self) -> i64 {
        (self.head.len() + self.tail.len()) as i64
    }

    /// The record of the compression. It took so long from the beginning of the plan, with the model's calls.
    pub fn record(&self, model: Option<String>, duration: Duration) -> CompressionRecord {
        CompressionRecord {
            summarised: self.summarised,
            kept: self.kept(),
            tokens_before: self.tokens_before,
            tokens_after: self.tokens_after,
            model,
            duration_ms: i64::try_from(duration.as_millis()).unwrap_or(i64::MAX),
        }
    }
}

/// Why there is no plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("the session has no messages yet")]
    Empty,
    #[error("all messages would be kept")]
    NothingOld,
    #[error("the summary and the kept messages are not smaller than the session")]
    NoSaving { before: i64, after: i64 },
    #[error("the summary and the messages that have to stay have {after} tokens, and {most} fit")]
    OverTarget { after: i64, most: i64 },
    /// No compression helps: the turn ends as `context_exhausted`, without a call of a model.
    #[error("the messages that have to stay have {needed} tokens, and the model takes {hard}")]
    Exhausted { needed: i64, hard: i64 },
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        Self::new(Code::NothingToCompress, refusal.to_string())
    }
}

/// Plans over all messages that no undo took back, in the order of their numbers.
pub fn plan(rows: &[Outline], request: &PlanRequest) -> Result<Plan, Refusal> {
    plan_of(&Transcript::new(rows, request.shortened_through), request)
}

pub(super) fn plan_of(transcript: &Transcript<'_>, request: &PlanRequest) -> Result<Plan, Refusal> {
    if transcript.len() == 0 {
        return Err(Refusal::Empty);
    }
    let mut selection = Selection::new(transcript, request);
    selection.keep_required(request.running_since);
    match request.tail {
        Tail::Tokens(limits) => {
            if selection.tokens > limits.hard {
                return Err(Refusal::Exhausted {
                    needed: selection.tokens,
                    hard: limits.hard,
                });
            }
            selection.keep_images(Some(&limits));
            selection.keep_what_fits(&limits);
        }
        Tail::Messages(count) => {
            selection.keep_images(None);
            selection.keep_from(transcript.len().saturating_sub(count));
        }
        Tail::FromUsers(count) => {
            selection.keep_images(None);
            selection.keep_from(nth_last_users(transcript, count));
        }
    }
    selection.plan(request)
}

/// Where the `count`-th last message of a user is: after the end for 0, at the beginning if there are fewer.
fn nth_last_users(transcript: &Transcript<'_>, count: usize) -> usize {
    match count.checked_sub(1) {
        None => transcript.len(),
        Some(before) => (0..transcript.len())
            .rev()
            .filter(|index| transcript.row(*index).is_users())
            .nth(before)
            .unwrap_or(0),
    }
}

/// The messages that are kept, while they are selected.
struct Selection<'a> {
    transcript: &'a Transcript<'a>,
    head_length: usize,
    /// After the head.
    groups: Vec<Range<usize>>,
    is_kept: Vec<bool>,
    summary_tokens: i64,
    /// What is kept, without the summary.
    tokens: i64,
}

impl<'a> Selection<'a> {
    fn new(transcript: &'a Transcript<'a>, request: &PlanRequest) -> Self {
        let head_length = transcript.head_length();
        Self {
            transcript,
            head_length,
            groups: transcript.groups(head_length),
            is_kept: vec![false; transcript.len()],
            summary_tokens: request.summary_tokens,
            tokens: transcript.tokens(0..head_length),
        }
    }

    /// Earlier summaries are never kept: the new one stands for them too.
    fn is_addable(&self, index: usize) -> bool {
        !self.is_kept[index] && self.transcript.row(index).kind != MessageKind::Summary
    }

    /// The tokens that keeping a range would add.
    fn added_tokens(&self, range: Range<usize>) -> i64 {
        range
            .filter(|index| self.is_addable(*index))
            .map(|index| self.transcript.tokens(index..index + 1))
            .sum()
    }

    fn keep(&mut self, range: Range<usize>) {
        for index in range {
            if self.is_addable(index) {
                self.is_kept[index] = true;
                self.tokens += self.transcript.tokens(index..index + 1);
            }
        }
    }

    /// What stays whatever it costs: the last message of a user, calls at the end that wait for results, and of a
    /// running turn its messages of users and its newest complete group.
    fn keep_required(&mut self, running_since: Option<i64>) {
        let transcript = self.transcript;
        if let Some(index) = transcript.last_users() {
            self.keep(index..index + 1);
        }
        let newest = self.groups.last().filter(|group| transcript.is_open(group));
        if let Some(group) = newest.cloned() {
            self.keep(group);
        }
        let Some(since) = running_since else {
            return;
        };
        for index in self.head_length..transcript.len() {
            let row = transcript.row(index);
            if row.seq >= since && row.is_users() {
                self.keep(index..index + 1);
            }
        }
        let is_complete = |group: &&Range<usize>| {
            let row = transcript.row(group.start);
            row.seq >= since && row.calls > 0 && !transcript.is_open(group)
        };
        if let Some(group) = self.groups.iter().rfind(is_complete) {
            self.keep(group.start..transcript.len());
        }
    }

    /// Groups with an image since the newest turn of a user. At the hard limit those that do not fit are left out,
    /// oldest first: an answer without them is better than none.
    fn keep_images(&mut self, limits: Option<&TokenLimits>) {
        let newest_turn = self.transcript.newest_turn();
        let first = self
            .groups
            .partition_point(|group| group.end <= newest_turn);
        for position in (first..self.groups.len()).rev() {
            let group = self.groups[position].clone();
            if !self.transcript.has_image(&group) {
                continue;
            }
            let after = self.tokens + self.added_tokens(group.clone()) + self.summary_tokens;
            let is_over = |limits: &TokenLimits| {
                limits.pressure == Pressure::HardLimit && after > limits.most
            };
            if limits.is_some_and(is_over) {
                break;
            }
            self.keep(group);
        }
    }

    /// The end of the transcript, by tokens. The newest group may be larger than the tail.
    fn keep_what_fits(&mut self, limits: &TokenLimits) {
        let mut tail = 0;
        for position in (0..self.groups.len()).rev() {
            let group = self.groups[position].clone();
            let added = self.added_tokens(group.clone());
            let after = self.tokens + added + self.summary_tokens;
            tail += self.transcript.tokens(group.clone());
            let is_first = position + 1 == self.groups.len();
            if (tail > limits.tail && !is_first) || (added > 0 && after > limits.target) {
                break;
            }
            self.keep(group);
        }
    }

    /// All from the beginning of the group of a message on.
    fn keep_from(&mut self, index: usize) {
        let position = self.groups.partition_point(|group| group.end <= index);
        if let Some(group) = self.groups.get(position) {
            self.keep(group.start..self.transcript.len());
        }
    }

    fn plan(self, request: &PlanRequest) -> Result<Plan, Refusal> {
        let transcript = self.transcript;
        let mut tail = Vec::new();
        let mut is_old = false;
        for index in self.head_length..transcript.len() {
            let row = transcript.row(index);
            if self.is_kept[index] {
                tail.push(row.seq);
            } else {
                is_old |= row.kind != MessageKind::Summary;
            }
        }
        let before = transcript.tokens(0..transcript.len());
        let after = self.tokens + self.summary_tokens;
        if request.saving == Saving::Fifth && !is_old {
            return Err(Refusal::NothingOld);
        }
        if let Tail::Tokens(limits) = request.tail
            && after > limits.most
        {
            let most = limits.most;
            return Err(Refusal::OverTarget { after, most });
        }
        let is_smaller = match request.saving {
            Saving::Any => after < before.max(SMALL_TOKENS),
            Saving::Fifth => after.saturating_mul(5) <= before.saturating_mul(4),
        };
        if !is_smaller {
            return Err(Refusal::NoSaving { before, after });
        }
        let head = (0..self.head_length).map(|index| transcript.row(index).seq);
        Ok(Plan {
            head: head.collect(),
            summarised: (transcript.len() - self.head_length - tail.len()) as i64,
            tail,
            tokens_before: before,
            tokens_after: after,
        })
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
