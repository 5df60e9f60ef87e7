//! Documents of whole conversations and users: export and import.

pub mod document;
pub mod export;
pub mod import;
pub mod markdown;
pub mod user_document;
