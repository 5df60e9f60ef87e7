//! Exports and imports of sessions and users.

mod people_export;
pub mod session_export;
mod session_import;
pub mod session_transfer;
