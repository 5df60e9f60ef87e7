//! Conversations: session keys (slots), sessions, chains, messages, grants.

pub(super) mod access_sql;
pub mod chains;
pub mod conversations;
pub mod grants;
pub(in crate::store) mod message_columns;
pub mod messages;
pub mod open_calls;
pub mod sessions;
pub mod slot_aliases;
pub mod slots;
pub mod summary_sources;
pub mod tips;
