//! A tenant's own settings, agents, keys, issuers, usage and audit; the operator's tenants.

pub mod agents;
pub mod api_keys;
pub mod audit;
pub mod issuers;
pub mod limits;
pub mod operator;
pub mod own_tenant;
pub mod retention;
pub mod tenants;
pub mod usage;
pub mod whoami;
