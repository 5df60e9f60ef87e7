//! What bridges call: inbound messages and deliveries.

pub mod deliveries;
mod delivery_bodies;
pub mod inbound;
