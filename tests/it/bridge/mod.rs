//! What bridges bring in and take out: inbound messages, commands and deliveries.

mod bridge_example;
mod bursts;
mod command_faults;
pub mod deliveries;
pub mod inbound;
mod inbound_faults;
mod inbound_parting;
mod inbound_retries;
mod outside_text;
