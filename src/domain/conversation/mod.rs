//! Sessions, session keys, messages and the rights to them.

pub mod compression;
pub mod grant;
pub mod message;
pub mod message_extra;
pub mod reset;
pub mod session;
pub mod session_key;
pub mod session_name;
pub mod slot;
pub mod summary_sources;
pub mod tree;
