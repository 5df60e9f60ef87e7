//! The duration, the number and the parts of the measurements.

use std::time::Duration;

use crate::figures::Times;

/// Only checks that the bench works: its figures are useless.
pub const SHORT: &str = "short";

/// A node's default number of connections to Postgres.
const DEFAULT_POOL: u32 = 16;

pub struct Plan {
    pub rounds: usize,
    pub times: Times,
    /// Connections to Postgres of the measured node.
    pub pool: u32,
    pub short: bool,
}

impl Plan {
    pub fn from_args() -> Self {
        let short = names().any(|name| name == SHORT);
        let (rounds, warm_up, measured) = match (short, cfg!(debug_assertions)) {
            (false, _) => (5, 500, 1500),
            (true, false) => (1, 500, 500),
            // Enough for answers to 64 clients.
            (true, true) => (1, 500, 4000),
        };
        Self {
            rounds,
            times: Times {
                warm_up: Duration::from_millis(warm_up),
                measured: Duration::from_millis(measured),
            },
            pool: option("pool").unwrap_or(DEFAULT_POOL),
            short,
        }
    }

    /// Whether to measure this part: the named parts, or all.
    pub fn is_selected(&self, part: &str) -> bool {
        let mut parts = names().filter(|name| name != SHORT && !name.contains('='));
        let first = parts.next();
        first.is_none_or(|first| first == part || parts.any(|name| name == part))
    }
}

/// The number of an argument `name=number`.
pub fn option(name: &str) -> Option<u32> {
    names().find_map(|argument| argument.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
}

fn names() -> impl Iterator<Item = String> {
    std::env::args().skip(1).filter(|name| name != "--bench")
}
