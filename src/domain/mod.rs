//! Types and rules. No IO, no async, no HTTP, no SQL: everything here can be tested as data.

pub mod api_key;
pub mod display_name;
pub mod limits;
pub mod paging;
pub mod platform;
pub mod tenant;
pub mod usage;
