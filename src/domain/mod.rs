//! Types and rules. No IO, no async, no HTTP, no SQL: everything here can be tested as data.

pub mod agent;
mod agent_rules;
pub mod api_key;
pub mod audit;
pub mod compression;
pub mod display_name;
pub mod grant;
pub mod identity;
pub mod issuer;
pub mod limits;
pub mod message;
pub mod origin;
pub mod paging;
pub mod platform;
pub mod reset;
pub mod resource_name;
pub mod retention;
pub mod session;
pub mod session_name;
pub mod slot;
pub mod tenant;
pub mod timestamp;
pub mod usage;
pub mod user;
pub mod viewer;
