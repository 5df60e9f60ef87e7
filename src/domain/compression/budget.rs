//! How large a summary, its request and the model's answer may be in a context window.

use super::request::FIXED_TOKENS;

/// A summary is at most this share of the window, and at most so many tokens.
const WINDOW_PER_SUMMARY: u32 = 10;
const LARGEST_SUMMARY: u32 = 10_000;
/// A model thinks before it answers, and what it thinks counts.
const ANSWER_PER_SUMMARY: u32 = 4;
const WINDOW_PER_ANSWER: u32 = 4;
const LARGEST_PIECE: u32 = 32_000;
const SMALLEST_PIECE: u32 = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SummaryBudget {
    /// The most tokens of a summary.
    pub summary: u32,
    /// The token limit of the request.
    pub answer: u32,
    /// The most tokens of a piece of the transcript.
    pub piece: u32,
}

impl SummaryBudget {
    /// For the context window of the agent. That of another model for summaries is not known.
    pub fn of(context_window: u32) -> Self {
        let summary = (context_window / WINDOW_PER_SUMMARY).clamp(1, LARGEST_SUMMARY);
        let answer = (summary * ANSWER_PER_SUMMARY).min(context_window / WINDOW_PER_ANSWER);
        let others = summary + answer + u32::try_from(FIXED_TOKENS).unwrap_or(u32::MAX);
        let piece = context_window.saturating_sub(others);
        Self {
            summary,
            answer,
            piece: piece.clamp(SMALLEST_PIECE, LARGEST_PIECE),
        }
    }

    /// After the model could not take a request; `None` if no smaller one is worth it.
    pub fn halved(self) -> Option<Self> {
        let piece = self.piece / 2;
        (piece >= SMALLEST_PIECE).then_some(Self { piece, ..self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_and_its_answer_fit_into_the_window() {
        for window in [1000, 3000, 8000, 32_000, 128_000, 1_000_000, 10_000_000] {
            let budget = SummaryBudget::of(window);
            let request = budget.summary + budget.piece + FIXED_TOKENS as u32;
            assert!(request + budget.answer <= window, "{window}: {budget:?}");
            assert!(budget.summary < budget.answer, "{window}");
            assert!(budget.summary <= window / 10, "{window}");
        }
        let large = SummaryBudget::of(128_000);
        assert_eq!(
            (large.summary, large.answer, large.piece),
            (10_000, 32_000, 32_000)
        );
    }

    #[test]
    fn halving_ends() {
        let mut budget = SummaryBudget::of(128_000);
        let mut times = 0;
        while let Some(smaller) = budget.halved() {
            assert_eq!(smaller.piece, budget.piece / 2);
            budget = smaller;
            times += 1;
        }
        assert_eq!(times, 8);
    }
}
