//! Sessions, session keys, messages, grants, transfer.

pub mod session_chain;
pub mod session_grants;
pub mod session_keys;
pub mod session_messages;
pub mod session_transfer;
pub mod sessions;
