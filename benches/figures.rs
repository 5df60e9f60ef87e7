//! The measurements of each round, and their ratios.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use anyhow::ensure;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    Pgbench,
    Library,
    Http,
}

/// The durations of one side in one round.
#[derive(Debug, Clone, Copy)]
pub struct Times {
    /// The time in which new connections load catalogs and plan statements, before the measurement.
    pub warm_up: Duration,
    pub measured: Duration,
}

/// One completed transaction.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    /// The index of its task.
    pub task: usize,
    pub took: Duration,
    /// The time of its end since the start of its side's part of the round.
    pub ended: Duration,
}

/// One side's part of a round.
#[derive(Debug)]
pub struct Part {
    /// Milliseconds of each task, sorted.
    took: Vec<Vec<f64>>,
    seconds: f64,
    /// Transactions, including those outside of the measured time.
    done: i64,
}

impl Part {
    /// The samples that ended in `window`.
    pub fn new(samples: &[Sample], tasks: usize, window: Range<Duration>) -> anyhow::Result<Self> {
        let mut took = vec![Vec::new(); tasks];
        for sample in samples {
            if window.contains(&sample.ended) {
                took[sample.task].push(sample.took.as_secs_f64() * 1000.0);
            }
        }
        for one in &mut took {
            ensure!(!one.is_empty(), "nothing was measured");
            one.sort_by(f64::total_cmp);
        }
        Ok(Self {
            took,
            seconds: (window.end - window.start).as_secs_f64(),
            done: i64::try_from(samples.len())?,
        })
    }

    pub fn quantile(&self, task: usize, share: f64) -> f64 {
        let took = &self.took[task];
        let index = (took.len() as f64 * share) as usize;
        took[index.min(took.len() - 1)]
    }

    pub fn mean(&self, task: usize) -> f64 {
        let took = &self.took[task];
        took.iter().sum::<f64>() / took.len() as f64
    }

    /// Transactions a second.
    pub fn rate(&self) -> f64 {
        self.took.iter().map(Vec::len).sum::<usize>() as f64 / self.seconds
    }
}

/// All rounds of all sides.
#[derive(Debug, Default)]
pub struct Figures {
    pgbench: Vec<Part>,
    library: Vec<Part>,
    http: Vec<Part>,
}

impl Figures {
    pub fn put(&mut self, side: Side, part: Part) {
        match side {
            Side::Pgbench => self.pgbench.push(part),
            Side::Library => self.library.push(part),
            Side::Http => self.http.push(part),
        }
    }

    /// A figure of `side` in each round.
    pub fn each(&self, side: Side, figure: impl Fn(&Part) -> f64) -> Vec<f64> {
        let parts = match side {
            Side::Pgbench => &self.pgbench,
            Side::Library => &self.library,
            Side::Http => &self.http,
        };
        parts.iter().map(figure).collect()
    }

    /// The median of a figure of `side`.
    pub fn median(&self, side: Side, figure: impl Fn(&Part) -> f64) -> f64 {
        let mut each = self.each(side, figure);
        each.sort_by(f64::total_cmp);
        each[each.len() / 2]
    }

    /// Transactions of all sides, measured or not.
    pub fn done(&self) -> i64 {
        let parts = self.pgbench.iter().chain(&self.library).chain(&self.http);
        parts.map(|part| part.done).sum()
    }
}

/// The quotients of the rounds, sorted.
pub struct Ratio(Vec<f64>);

impl Ratio {
    pub fn of(above: &[f64], below: &[f64]) -> Self {
        let pairs = above.iter().zip(below);
        let mut quotients: Vec<f64> = pairs.map(|(above, below)| above / below).collect();
        quotients.sort_by(f64::total_cmp);
        Self(quotients)
    }

    /// This ratio to another one, round by round.
    pub fn over(&self, other: &Self) -> Self {
        Self::of(&self.0, &other.0)
    }

    /// Whether the median is within the goal.
    pub fn is_within(&self, goal: f64) -> bool {
        self.0[self.0.len() / 2] <= goal
    }

    /// Prints one line; returns whether the median is within the goal.
    pub fn check(&self, name: &str, goal: f64) -> bool {
        let met = self.is_within(goal);
        let verdict = if met { "goal met" } else { "over the goal" };
        println!("  {name}: {self}, goal: at most {goal}: {verdict}");
        met
    }
}

impl fmt::Display for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(all) = self;
        let median = all[all.len() / 2];
        let min = all[0];
        let max = all[all.len() - 1];
        write!(f, "{median:.2} ({min:.2} to {max:.2})")
    }
}
