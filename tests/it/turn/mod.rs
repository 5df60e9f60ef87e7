//! Turns: their order, events, tools, ends, and what survives a lost node.

mod abandoned_turns;
mod idle_streams;
mod prompts;
mod turn_events;
mod turn_faults;
mod turn_limits;
mod turn_outages;
mod turn_races;
mod turn_recovery;
mod turn_scale;
mod turn_starts;
mod turn_tools;
mod turns;
