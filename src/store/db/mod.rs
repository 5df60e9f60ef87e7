//! The database itself: the pool, roles, migrations, jobs, nodes, stored answers.

pub mod admin;
pub mod idempotency;
pub mod jobs;
pub(super) mod limited;
pub mod migrate;
pub mod nodes;
pub mod outages;
pub(super) mod page_bytes;
pub(super) mod pool;
pub mod roles;
pub mod sealed;
