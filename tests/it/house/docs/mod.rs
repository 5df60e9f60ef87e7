//! The documents: their tables are the code's, their links lead somewhere, and their commands run.

mod links;
mod log_lines;
pub mod markdown;
mod reference;
mod sizes;
mod summary;
mod tour;
