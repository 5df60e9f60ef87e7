//! Sessions, session keys, chains, messages, grants, and how long they are kept.

mod branches;
mod expiry;
mod retention;
mod session_chains;
mod session_grants;
mod session_keys;
mod session_locks;
mod session_messages;
mod sessions;
