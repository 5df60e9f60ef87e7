//! Types and rules. No IO, no async, no HTTP, no SQL: every rule can be tested as data.

pub mod bridge;
pub mod compression;
pub mod conversation;
pub mod identity_links;
pub mod people;
pub mod tenant;
pub mod transfer;
pub mod turn;
pub mod values;
