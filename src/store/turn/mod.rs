//! Turns: starting, claiming, writing, stopping; their events and prompts.

pub mod events;
pub mod prompt_history;
pub mod turn_claims;
pub mod turn_counts;
pub mod turn_lease;
pub mod turn_sql;
pub mod turn_starts;
pub mod turn_stops;
pub mod turn_writes;
pub mod turns;
