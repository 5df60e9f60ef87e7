//! What tests are written with.

pub mod chat;
pub mod conversations;
pub mod data;
pub mod deliveries;
pub mod http;
pub mod linking;
pub mod people;
pub mod scene;
pub mod servers;
pub mod sse;
pub mod tokens;
pub mod transfer;
pub mod world;

pub use http::{Fields, Reply};
pub use scene::Scene;
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
