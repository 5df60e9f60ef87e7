//! What bridges call: inbound messages and deliveries.

pub mod deliveries;
pub mod inbound;
mod inbound_answers;
mod inbound_wait;
