//! What a tenant has: itself, its agents, its keys, its secrets, and the audit of all changes.

mod admin_keys;
mod agent_changes;
mod agents;
mod api_keys;
mod audit;
mod audit_chain;
mod operator;
mod secrets;
mod tenants;
