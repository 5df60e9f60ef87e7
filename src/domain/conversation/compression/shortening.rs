//! Old tool results that a model gets in short. No row changes: a mark says through which number of the session
//! results are rendered short.

use super::budget::Budget;
use super::outline::Outline;
use super::transcript::Transcript;
use crate::domain::conversation::message::Role;

/// A longer result is rendered short: about 1,500 characters. It depends on no agent, so a prompt does not change
/// with the agent's window.
pub const BULKY_TOKENS: i32 = 375;
/// What a short one is counted as.
pub const SHORT_TOKENS: i32 = 50;

/// A new position of the mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shortening {
    pub through: i64,
    /// The tokens that it saves, beside the mark before it.
    pub saved: i64,
}

/// The tokens of a message as a model gets it.
pub fn rendered_tokens(row: &Outline, shortened_through: i64) -> i64 {
    let is_short = row.seq <= shortened_through && is_bulky(row);
    i64::from(if is_short { SHORT_TOKENS } else { row.tokens })
}

fn is_bulky(row: &Outline) -> bool {
    row.role == Role::Tool && row.tokens > BULKY_TOKENS
}

/// How far the mark moves, from `shortened_through`. It stays before the tail, the newest group and the images since
/// the newest turn of a user. `None` if it would save less than a tenth of the window: each move changes the prompt's
/// beginning, which the provider must then cache again.
pub fn shorten_through(
    rows: &[Outline],
    budget: &Budget,
    shortened_through: i64,
) -> Option<Shortening> {
    shortening_of(
        &Transcript::new(rows, shortened_through),
        budget,
        shortened_through,
    )
}

pub(super) fn shortening_of(
    transcript: &Transcript<'_>,
    budget: &Budget,
    shortened_through: i64,
) -> Option<Shortening> {
    let mut end = transcript.len();
    let mut tail = 0;
    for group in transcript.groups(0).into_iter().rev() {
        tail += transcript.tokens(group.clone());
        if tail > budget.tail && group.end < transcript.len() {
            break;
        }
        end = group.start;
    }
    let is_image = |index: &usize| {
        let row = transcript.row(*index);
        row.has_image && row.role == Role::Tool
    };
    let image = (transcript.newest_turn()..end).find(is_image);
    let mut shortening = Shortening {
        through: shortened_through,
        saved: 0,
    };
    for index in 0..image.unwrap_or(end) {
        let row = transcript.row(index);
        if row.seq > shortened_through && is_bulky(row) {
            shortening.through = row.seq;
            shortening.saved += i64::from(row.tokens - SHORT_TOKENS);
        }
    }
    (shortening.saved * 10 >= budget.window && shortening.saved > 0).then_some(shortening)
}

#[cfg(test)]
mod tests {
    use super::super::generated::{budget_of, outlines};
    use super::*;

    fn check(text: &str, tokens: i32, mark: i64, expected: Option<(i64, i64)>) {
        let budget = budget_of(10_000, 0);
        let shortening = shorten_through(&outlines(text, tokens), &budget, mark);
        let actual = shortening.map(|shortening| (shortening.through, shortening.saved));
        assert_eq!(actual, expected, "{text} {tokens} {mark}");
    }

    #[test]
    fn old_bulky_results_are_shortened_in_large_steps() {
        // The tail is 1,000 tokens: the last group is larger, and stays.
        check("u c r c r c r a", 600, 0, Some((7, 3 * 550)));
        check("u c r c r c r", 600, 0, Some((5, 2 * 550)));
        check("u c r c r c r a", 600, 3, Some((7, 2 * 550)));
        check("u c r c r c r a", 600, 5, None);
        check("u c r c r c r a", 375, 0, None);
        check("", 600, 0, None);
        // Only results.
        check("u a u a u a u a", 600, 0, None);
    }

    #[test]
    fn images_since_the_newest_turn_of_a_user_stay() {
        check("u c r c r c R c r a", 600, 0, Some((5, 2 * 550)));
        check("c R c r c r u a", 600, 0, Some((6, 3 * 550)));
    }
}
