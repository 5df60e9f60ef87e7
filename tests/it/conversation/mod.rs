//! Sessions, session keys, chains, messages, grants, and how long they are kept.

mod branches;
mod compression;
mod compression_plans;
mod expiry;
mod resets;
mod retention;
mod retention_sweeps;
mod session_chains;
mod session_deletion;
mod session_grants;
mod session_keys;
mod session_locks;
mod session_messages;
mod session_names;
mod sessions;
