//! How long, how often and of what is measured; and judging a median.

use std::time::Duration;

use crate::figures::Times;
use crate::seed::Sessions;

/// For looking whether everything works: its figures tell nothing.
pub const SHORT: &str = "short";

pub struct Plan {
    pub rounds: usize,
    pub times: Times,
    /// Connections to Postgres of the node that is measured.
    pub pool: u32,
    pub streams: u64,
    short: bool,
}

impl Plan {
    pub fn from_args() -> Self {
        let short = names().any(|name| name == SHORT);
        let pool = names().find_map(|name| name.strip_prefix("pool=")?.parse().ok());
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
            pool: pool.unwrap_or(64),
            streams: if short { 100 } else { 1000 },
            short,
        }
    }

    /// Whether this part is to be measured: one that is named, or all.
    pub fn is_asked(&self, part: &str) -> bool {
        let mut parts = names().filter(|name| name != SHORT && !name.starts_with("pool="));
        let first = parts.next();
        first.is_none_or(|first| first == part || parts.any(|name| name == part))
    }

    pub fn sessions(&self) -> [Sessions; 3] {
        let counts = match self.short {
            true => [640, 128, 64],
            false => [64_000, 9_600, 640],
        };
        let [few, some, many] = counts;
        [(10, few), (100, some), (1_000, many)]
            .map(|(messages, count)| Sessions { messages, count })
    }
}

fn names() -> impl Iterator<Item = String> {
    std::env::args().skip(1).filter(|name| name != "--bench")
}

pub fn middle(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Prints one line; answers whether a figure keeps its goal.
pub fn judge(name: &str, figure: f64, goal: f64) -> bool {
    let met = figure <= goal;
    let verdict = if met { "goal met" } else { "over the goal" };
    println!("  {name}: {figure:.2}, goal: at most {goal}: {verdict}");
    met
}

/// Rows of figures below their names.
pub struct Table {
    title: String,
    columns: &'static [&'static str],
}

impl Table {
    /// Prints the names.
    pub fn begin(title: String, columns: &'static [&'static str]) -> Self {
        print!("\n{title:<20}");
        for name in columns {
            print!("{name:>width$}", width = Self::width(name));
        }
        println!();
        Self { title, columns }
    }

    /// Room for "12345.678", and two spaces before a name.
    fn width(name: &str) -> usize {
        (name.len() + 2).max(10)
    }

    /// Prints one row: times to the microsecond, what is large without a fraction.
    pub fn row(&self, clients: u32, figures: &[f64]) {
        let name = format!("  {clients:>2} clients");
        print!("{name:<width$}", width = self.title.len().max(20));
        for (column, figure) in self.columns.iter().zip(figures) {
            let (width, digits) = match column.contains("p50") || column.contains("p99") {
                true => (Self::width(column), 3),
                false => (Self::width(column), 0),
            };
            print!("{figure:>width$.digits$}");
        }
        println!();
    }
}
