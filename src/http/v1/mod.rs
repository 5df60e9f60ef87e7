//! Throughline's own endpoints, one file a resource: routes, wire types and handlers.

pub mod bridge;
pub mod conversation;
pub mod identity_links;
pub mod people;
pub mod tenant;
pub mod turn;
