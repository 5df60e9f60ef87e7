//! The way out to every URL that a tenant or user gives: models, JWKS, remote MCP servers, attachments.
//!
//! - `url_rules`: what a URL's text alone shows, and every reason to refuse one
//! - `address`: which IP addresses may be dialled
//! - `own_ports`: the service's own ports, which no tenant may reach through it; `interfaces`: this machine's addresses
//! - `client`: the one HTTP client that holds to all three at the moment it dials
//! - `completions`: calls of models through it, with `breaker` for those that fail and `sse` for streams
//! - `call_error`: why a call brought no answer; `call_reason`: the same, as the log names it
//!
//! Nothing else in the service opens a connection to a place that a tenant chose.

mod address;
mod breaker;
mod call_error;
mod call_reason;
mod client;
mod completions;
mod interfaces;
mod own_ports;
mod sse;
mod url_rules;

#[cfg(test)]
mod hostile_tests;

pub use call_error::CallError;
pub use client::{AddressLookup, FetchError, GuardedClient, Lookup, fetch};
pub use completions::{CompletionStream, Completions, ModelServer};
pub use own_ports::OwnPorts;
pub use url_rules::UrlRefused;
