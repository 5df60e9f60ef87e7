//! Linking and unlinking: codes, merges, identity moves, imports.

pub mod identity_moves;
pub mod imports;
pub mod link_codes;
pub mod merges;
pub mod pending_links;
pub mod unlinks;
