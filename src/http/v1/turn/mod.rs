//! Turns and their events.

pub mod turns;
