//! What fits an agent's model. All parts are fractions of its context window, so the smallest window works too.

use crate::domain::tenant::agent::AgentSpec;

/// A summary may have a tenth of the window, and never more than this.
const MOST_SUMMARY_TOKENS: i64 = 10_000;

/// What fits a model, in tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    pub window: i64,
    /// What every request has beside the transcript: prompt, tools, instruction.
    pub fixed: i64,
    /// From here on a conversation is compressed.
    pub threshold: i64,
    /// No request may be larger: the rest is for the answer.
    pub hard_limit: i64,
    /// What the kept tail may fill.
    pub tail: i64,
    pub largest_summary: i64,
}

/// Why a transcript is to be compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pressure {
    /// It has passed the threshold. A compression that does not help can be left out.
    Threshold,
    /// Otherwise no request is possible.
    HardLimit,
}

/// What the transcript may have after a compression, in tokens: without the fixed parts, with the summary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenLimits {
    pub pressure: Pressure,
    pub tail: i64,
    /// The tail is filled up to here: half of what there is, so that the next compression is far.
    pub target: i64,
    /// What has to stay may fill this.
    pub most: i64,
    /// No request can have more.
    pub hard: i64,
}

impl Budget {
    /// `max_tokens` is what the request leaves for the answer.
    pub fn new(spec: &AgentSpec, fixed: i64, max_tokens: Option<u32>) -> Self {
        let window = i64::from(spec.context_window);
        // A client may ask for more than there is. Half of the window remains for the request: if the model needs
        // more for its answer, no compression can help.
        let answer = i64::from(max_tokens.unwrap_or(0)).clamp(window / 10, window / 2);
        let hard_limit = window - answer;
        let threshold = share(window, spec.compression.threshold).min(hard_limit);
        Self {
            window,
            fixed: fixed.max(0),
            threshold,
            hard_limit,
            tail: share(threshold, spec.compression.tail_ratio),
            largest_summary: (window / 10).min(MOST_SUMMARY_TOKENS),
        }
    }

    /// Whether a transcript with so many tokens is to be compressed. Where the fixed parts leave no room below the
    /// threshold, each turn would compress: then only the hard limit counts.
    pub fn pressure(&self, transcript: i64) -> Option<Pressure> {
        let request = self.fixed.saturating_add(transcript);
        if request > self.hard_limit {
            Some(Pressure::HardLimit)
        } else if request >= self.threshold
            && self.limits(Pressure::Threshold).target > self.largest_summary
        {
            Some(Pressure::Threshold)
        } else {
            None
        }
    }

    pub fn limits(&self, pressure: Pressure) -> TokenLimits {
        let below = |line: i64| (line - self.fixed).max(0);
        let hard = below(self.hard_limit);
        let (target, most) = match pressure {
            Pressure::Threshold => {
                let target = below(self.threshold) / 2;
                (target, target)
            }
            Pressure::HardLimit => (hard / 2, hard),
        };
        TokenLimits {
            pressure,
            tail: self.tail,
            target,
            most,
            hard,
        }
    }
}

fn share(tokens: i64, ratio: f64) -> i64 {
    (tokens as f64 * ratio) as i64
}

#[cfg(test)]
mod tests {
    use super::super::generated::budget_of;
    use super::*;

    #[test]
    fn all_parts_are_fractions_of_the_window() {
        // window, fixed: threshold, hard limit, tail, summary; target and most at the threshold and at the hard limit
        for (window, fixed, parts, limits) in [
            (1000, 0, [500, 900, 100, 100], [250, 250, 450, 900]),
            (1000, 100, [500, 900, 100, 100], [200, 200, 400, 800]),
            (3000, 1800, [1500, 2700, 300, 300], [0, 0, 450, 900]),
            (3000, 9000, [1500, 2700, 300, 300], [0, 0, 0, 0]),
            (
                128_000,
                8000,
                [64_000, 115_200, 12_800, 10_000],
                [28_000, 28_000, 53_600, 107_200],
            ),
        ] {
            let budget = budget_of(window, fixed);
            let actual = [
                budget.threshold,
                budget.hard_limit,
                budget.tail,
                budget.largest_summary,
            ];
            assert_eq!(actual, parts, "{window} {fixed}");
            let soft = budget.limits(Pressure::Threshold);
            let hard = budget.limits(Pressure::HardLimit);
            let actual = [soft.target, soft.most, hard.target, hard.most];
            assert_eq!(actual, limits, "{window} {fixed}");
        }
    }

    #[test]
    fn the_answer_has_what_the_request_leaves_it() {
        let mut spec = AgentSpec::demo();
        spec.context_window = 10_000;
        spec.compression.threshold = 0.95;
        for (max_tokens, hard_limit) in [
            (None, 9000),
            (Some(10), 9000),
            (Some(3000), 7000),
            (Some(5000), 5000),
            (Some(u32::MAX), 5000),
        ] {
            let budget = Budget::new(&spec, 0, max_tokens);
            assert_eq!(budget.hard_limit, hard_limit, "{max_tokens:?}");
            assert_eq!(budget.threshold, hard_limit, "{max_tokens:?}");
        }
    }

    #[test]
    fn pressure_begins_where_a_compression_helps() {
        for (window, fixed, transcript, expected) in [
            (1000, 100, 399, None),
            (1000, 100, 400, Some(Pressure::Threshold)),
            (1000, 100, 800, Some(Pressure::Threshold)),
            (1000, 100, 801, Some(Pressure::HardLimit)),
            (1000, 100, i64::MAX, Some(Pressure::HardLimit)),
            // The fixed parts are over the threshold, or close below it.
            (3000, 1800, 900, None),
            (3000, 1000, 1700, None),
            (3000, 1800, 901, Some(Pressure::HardLimit)),
        ] {
            let pressure = budget_of(window, fixed).pressure(transcript);
            assert_eq!(pressure, expected, "{window} {fixed} {transcript}");
        }
    }
}
