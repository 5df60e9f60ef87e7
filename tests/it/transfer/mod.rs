//! Exports and imports of sessions and users.

mod people_export;
mod session_export;
mod session_import;
mod session_transfer;
