//! What tests are written with.

pub mod balancer;
pub mod catalog;
pub mod chat;
pub mod cluster;
pub mod conversations;
pub mod http;
pub mod linking;
pub mod model;
pub mod nodes;
pub mod people;
pub mod process;
pub mod sse;
pub mod tokens;
pub mod twins;
pub mod whole_person;
pub mod world;

pub use http::Reply;
pub use world::{Tenant, World};

use std::time::{Duration, Instant};

/// Asks until the answer is yes; a test that waits for something waits here and never sleeps.
pub async fn eventually(what: &str, within: Duration, ask: impl AsyncFn() -> bool) {
    let started = Instant::now();
    while !ask().await {
        assert!(started.elapsed() < within, "not within {within:?}: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
