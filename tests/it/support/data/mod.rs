//! Rows that tests make and compare: whole tenants, whole users, what the catalog says.

pub mod audit;
pub mod bulk;
pub mod catalog;
pub mod directory;
pub mod erasure;
pub mod every_table;
pub mod retention;
pub mod samples;
pub mod summaries;
pub mod twins;
pub mod two_platforms;
pub mod whole_user;
