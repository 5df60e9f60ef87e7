//! Servers that tests start: Postgres, Redis, nodes as processes, the scripted model.

pub mod balancer;
pub mod cluster;
pub mod model;
pub mod nodes;
pub mod own_servers;
pub mod pair;
pub mod process;
