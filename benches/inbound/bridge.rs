//! The bridge: one consumer or several that take deliveries, by long poll or from the stream, and tell those who
//! wait for them. Acknowledging is left to these.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use chrono::{DateTime, Utc};
use futures_util::future::try_join_all;
use serde::Deserialize;
use throughline::clock::Clock;
use tokio::sync::oneshot;

use crate::connection::{Connection, find, get};
use crate::node::Node;

/// How deliveries are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    LongPoll,
    Stream,
}

/// Seconds that a poll waits. Short: whoever leaves while it waits counts as one who waits until then.
const POLL_WAIT: u64 = 1;
/// After this nobody counts as a consumer who has left.
pub const GONE: Duration = Duration::from_secs(POLL_WAIT + 1);
const EVENT: &[u8] = b"event: delivery\ndata: ";
const EVENT_END: &[u8] = b"\n\n";
const CLOSED: &[u8] = b"event: closed";

#[derive(Debug, Deserialize)]
struct Fetched {
    data: Vec<Delivery>,
}

/// What a bridge needs to know of a delivery.
#[derive(Debug, Deserialize)]
pub struct Delivery {
    pub id: String,
    pub lease: String,
    in_reply_to: String,
    created_at: DateTime<Utc>,
}

/// A delivery that the bridge has in hand.
#[derive(Debug)]
pub struct Arrived {
    pub delivery: Delivery,
    pub at: Instant,
    /// Since it was written, just before the commit.
    pub written: Duration,
}

/// Those who wait for the answers to their messages.
#[derive(Clone, Default)]
pub struct Waiting {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    messages: AtomicU64,
    answers: AtomicU64,
    by_message: Mutex<HashMap<String, oneshot::Sender<Arrived>>>,
}

impl Waiting {
    /// The id of a message that was never sent, and the answer to it, which is to come.
    pub fn next_message(&self) -> (String, oneshot::Receiver<Arrived>) {
        let (arrives, arrived) = oneshot::channel();
        let number = self.inner.messages.fetch_add(1, Ordering::Relaxed);
        let id = format!("{number:08}");
        self.by_message().insert(id.clone(), arrives);
        (id, arrived)
    }

    /// How often a consumer was answered since it was asked before.
    pub fn take_answers(&self) -> u64 {
        self.inner.answers.swap(0, Ordering::Relaxed)
    }

    fn arrive(
        &self,
        deliveries: Vec<Delivery>,
        at: Instant,
        now: DateTime<Utc>,
    ) -> anyhow::Result<()> {
        self.inner.answers.fetch_add(1, Ordering::Relaxed);
        for delivery in deliveries {
            let waits = self.by_message().remove(&delivery.in_reply_to);
            let waits = waits.with_context(|| format!("nobody waits for {delivery:?}"))?;
            let written = (now - delivery.created_at).to_std().unwrap_or_default();
            let arrived = Arrived {
                delivery,
                at,
                written,
            };
            ensure!(waits.send(arrived).is_ok(), "who waited is gone");
        }
        Ok(())
    }

    fn by_message(&self) -> MutexGuard<'_, HashMap<String, oneshot::Sender<Arrived>>> {
        let by_message = self.inner.by_message.lock();
        by_message.unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes deliveries with so many consumers until it is dropped, or something fails.
pub async fn serve(node: &Node, way: Way, consumers: u32, waiting: &Waiting) -> anyhow::Result<()> {
    let consuming = (0..consumers).map(|_| async move {
        match way {
            Way::LongPoll => poll(node, waiting).await,
            Way::Stream => read_stream(node, waiting).await,
        }
    });
    try_join_all(consuming).await?;
    Ok(())
}

async fn poll(node: &Node, waiting: &Waiting) -> anyhow::Result<()> {
    let mut connection = Connection::open(node.address).await?;
    let path = format!("/v1/deliveries?platform=telegram&wait={POLL_WAIT}");
    let request = get(&path, &node.key);
    loop {
        let body = connection.ask_whole(&request).await?;
        let at = Instant::now();
        let now = Clock::system().now();
        let fetched: Fetched = serde_json::from_slice(body)?;
        waiting.arrive(fetched.data, at, now)?;
    }
}

async fn read_stream(node: &Node, waiting: &Waiting) -> anyhow::Result<()> {
    let mut connection = Connection::open(node.address).await?;
    let request = get("/v1/deliveries/stream?platform=telegram", &node.key);
    connection.ask_head(&request).await?;
    loop {
        let at = Instant::now();
        let now = Clock::system().now();
        let read = &mut connection.read;
        ensure!(find(read, CLOSED).is_none(), "the stream was closed");
        let begin = find(read, EVENT).map(|place| place + EVENT.len());
        let end = begin.and_then(|begin| Some(begin + find(&read[begin..], EVENT_END)?));
        let Some((begin, end)) = begin.zip(end) else {
            connection.more().await?;
            continue;
        };
        let delivery: Delivery = serde_json::from_slice(&read[begin..end])?;
        read.drain(..end);
        waiting.arrive(vec![delivery], at, now)?;
    }
}
