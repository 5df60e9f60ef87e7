//! How long and how often is measured, and of which parts.

use std::time::Duration;

use crate::figures::Times;

/// For looking whether everything works: its figures tell nothing.
pub const SHORT: &str = "short";

/// As many connections to Postgres as a node has where nothing else is said.
const DEFAULT_POOL: u32 = 16;

pub struct Plan {
    pub rounds: usize,
    pub times: Times,
    /// Connections to Postgres of the node that is measured.
    pub pool: u32,
    pub short: bool,
}

impl Plan {
    pub fn from_args() -> Self {
        let short = names().any(|name| name == SHORT);
        let (rounds, warm_up, measured) = match (short, cfg!(debug_assertions)) {
            (false, _) => (5, 500, 1500),
            (true, false) => (1, 500, 500),
            // Enough for 64 clients to be answered.
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

    /// Whether this part is to be measured: one that is named, or all.
    pub fn is_asked(&self, part: &str) -> bool {
        let mut parts = names().filter(|name| name != SHORT && !name.contains('='));
        let first = parts.next();
        first.is_none_or(|first| first == part || parts.any(|name| name == part))
    }
}

/// The number that is given as `name=number`.
pub fn option(name: &str) -> Option<u32> {
    names().find_map(|given| given.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
}

fn names() -> impl Iterator<Item = String> {
    std::env::args().skip(1).filter(|name| name != "--bench")
}
