//! Throughline's own endpoints, one file a resource: routes, wire types and handlers.

pub mod api_keys;
pub mod limits;
pub mod tenant;
pub mod tenants;
pub mod usage;
