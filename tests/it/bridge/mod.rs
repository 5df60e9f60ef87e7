//! What bridges bring in and take out: inbound messages, commands and deliveries.

mod bridge_example;
mod bursts;
mod command_faults;
mod commands;
mod deliveries;
mod inbound;
mod inbound_faults;
mod inbound_retries;
mod inbound_unlinking;
mod outside_text;
