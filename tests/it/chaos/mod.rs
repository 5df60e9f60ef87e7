//! Faults while clients are at work: what a client was told stays true. Checked from what the clients
//! remember and from what is there in the end, never from logs. CHAOS_ROUNDS says how many faults,
//! CHAOS_SEED gives the choices of an earlier run again (but not its timing).

mod checks;
mod checks_notice;
mod history;
mod load;
mod sessions;
mod state;
mod turn_checks;
mod turn_checks_notice;
mod turn_history;
mod turn_load;
mod turns;

/// As much as a run of its own does: `make chaos`.
const MANY_ROUNDS: u64 = 20;

fn variable(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}: a number")))
}

fn many_rounds() -> u64 {
    variable("CHAOS_ROUNDS").unwrap_or(MANY_ROUNDS)
}

fn seed() -> u64 {
    let drawn = || std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0);
    variable("CHAOS_SEED").unwrap_or_else(drawn)
}

/// Choices that follow from a seed alone (splitmix64).
#[derive(Clone)]
pub struct Dice {
    state: u64,
}

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// Others, for a task of its own.
    pub fn split(&mut self) -> Self {
        Self::new(self.draw())
    }

    fn draw(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, end: usize) -> usize {
        (self.draw() % end as u64) as usize
    }

    pub fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len())]
    }
}
