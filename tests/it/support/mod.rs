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
    let pause = Duration::from_millis(10);
    retry(what, within, pause, async || ask().await.then_some(())).await;
}

/// Asks until there is an answer, with a pause after each that is none.
pub async fn retry<T>(
    what: &str,
    within: Duration,
    pause: Duration,
    mut ask: impl AsyncFnMut() -> Option<T>,
) -> T {
    let started = Instant::now();
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(started.elapsed() < within, "not within {within:?}: {what}");
        tokio::time::sleep(pause).await;
    }
}

/// Asks for so long, and the answer is always yes: what must not happen can only be watched for.
pub async fn stays(what: &str, long: Duration, mut ask: impl AsyncFnMut() -> bool) {
    let started = Instant::now();
    while started.elapsed() < long {
        let so_far = started.elapsed();
        assert!(ask().await, "no longer after {so_far:?}: {what}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Lets real time pass where nothing shows what is waited for. The reason is for the reader.
pub async fn real_time(_reason: &str, time: Duration) {
    tokio::time::sleep(time).await;
}
