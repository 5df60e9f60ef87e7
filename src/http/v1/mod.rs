//! Throughline's own endpoints, one file a resource: routes, wire types and handlers.

pub mod agents;
pub mod api_keys;
pub mod audit;
pub mod deliveries;
pub mod home_channels;
pub mod identities;
pub mod identity_links;
pub mod inbound;
mod inbound_answers;
pub mod issuers;
pub mod limits;
pub mod link_codes;
pub mod resolve;
pub mod retention;
pub mod session_chain;
pub mod session_grants;
pub mod session_keys;
pub mod session_messages;
pub mod session_transfer;
pub mod sessions;
pub mod tenant;
pub mod tenants;
pub mod turns;
pub mod usage;
pub mod user_export;
pub mod users;
