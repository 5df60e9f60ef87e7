//! A tenant, its agents, keys, issuers, audit, usage and retention.

pub mod agents;
pub mod api_keys;
pub mod audit;
pub mod expiry;
pub mod issuers;
pub mod retention;
pub mod tenants;
pub mod usage;
