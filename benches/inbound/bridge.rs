//! The bridge: consumers that lease deliveries, by long poll or from the stream, and pass them to the clients that
//! wait for them. The clients acknowledge them.

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

/// How deliveries are leased.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeliveryMode {
    LongPoll,
    Stream,
}

/// Seconds that a poll waits. Short: a consumer that leaves during a poll counts as waiting until its end.
const POLL_WAIT: u64 = 1;
/// After this time a consumer that left no longer counts.
pub const CONSUMER_TIMEOUT: Duration = Duration::from_secs(POLL_WAIT + 1);
const EVENT: &[u8] = b"event: delivery\ndata: ";
const EVENT_END: &[u8] = b"\n\n";
const CLOSED: &[u8] = b"event: closed";

#[derive(Debug, Deserialize)]
struct DeliveryList {
    data: Vec<Delivery>,
}

/// The members of a delivery that a bridge uses.
#[derive(Debug, Deserialize)]
pub struct Delivery {
    pub id: String,
    pub lease: String,
    in_reply_to: String,
    created_at: DateTime<Utc>,
}

/// A delivery that the bridge received.
#[derive(Debug)]
pub struct ReceivedDelivery {
    pub delivery: Delivery,
    pub at: Instant,
    /// The time since it was written, just before the commit.
    pub written: Duration,
}

/// The clients that wait for the answers to their messages.
#[derive(Clone, Default)]
pub struct PendingAnswers {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    messages: AtomicU64,
    answers: AtomicU64,
    by_message: Mutex<HashMap<String, oneshot::Sender<ReceivedDelivery>>>,
}

impl PendingAnswers {
    /// The id of a new message, and the receiver of its answer.
    pub fn next_message(&self) -> (String, oneshot::Receiver<ReceivedDelivery>) {
        let (sender, receiver) = oneshot::channel();
        let number = self.inner.messages.fetch_add(1, Ordering::Relaxed);
        let id = format!("{number:08}");
        self.by_message().insert(id.clone(), sender);
        (id, receiver)
    }

    /// The number of answers to consumers since the last call.
    pub fn take_answers(&self) -> u64 {
        self.inner.answers.swap(0, Ordering::Relaxed)
    }

    fn deliver(
        &self,
        deliveries: Vec<Delivery>,
        at: Instant,
        now: DateTime<Utc>,
    ) -> anyhow::Result<()> {
        self.inner.answers.fetch_add(1, Ordering::Relaxed);
        for delivery in deliveries {
            let sender = self.by_message().remove(&delivery.in_reply_to);
            let sender = sender.with_context(|| format!("no client waits for {delivery:?}"))?;
            let written = (now - delivery.created_at).to_std().unwrap_or_default();
            let received = ReceivedDelivery {
                delivery,
                at,
                written,
            };
            ensure!(sender.send(received).is_ok(), "the waiting client is gone");
        }
        Ok(())
    }

    fn by_message(&self) -> MutexGuard<'_, HashMap<String, oneshot::Sender<ReceivedDelivery>>> {
        let by_message = self.inner.by_message.lock();
        by_message.unwrap_or_else(PoisonError::into_inner)
    }
}

/// Leases deliveries with this number of consumers until it is dropped, or a consumer fails.
pub async fn serve(
    node: &Node,
    mode: DeliveryMode,
    consumers: u32,
    pending: &PendingAnswers,
) -> anyhow::Result<()> {
    let consuming = (0..consumers).map(|_| async move {
        match mode {
            DeliveryMode::LongPoll => poll(node, pending).await,
            DeliveryMode::Stream => read_stream(node, pending).await,
        }
    });
    try_join_all(consuming).await?;
    Ok(())
}

async fn poll(node: &Node, pending: &PendingAnswers) -> anyhow::Result<()> {
    let mut connection = Connection::open(node.address).await?;
    let path = format!("/v1/deliveries?platform=telegram&wait={POLL_WAIT}");
    let request = get(&path, &node.key);
    loop {
        let body = connection.send_for_body(&request).await?;
        let at = Instant::now();
        let now = Clock::system().now();
        let list: DeliveryList = serde_json::from_slice(body)?;
        pending.deliver(list.data, at, now)?;
    }
}

async fn read_stream(node: &Node, pending: &PendingAnswers) -> anyhow::Result<()> {
    let mut connection = Connection::open(node.address).await?;
    let request = get("/v1/deliveries/stream?platform=telegram", &node.key);
    connection.send_for_head(&request).await?;
    loop {
        let at = Instant::now();
        let now = Clock::system().now();
        let read = &mut connection.read;
        ensure!(find(read, CLOSED).is_none(), "the stream was closed");
        let begin = find(read, EVENT).map(|index| index + EVENT.len());
        let end = begin.and_then(|begin| Some(begin + find(&read[begin..], EVENT_END)?));
        let Some((begin, end)) = begin.zip(end) else {
            connection.read_more().await?;
            continue;
        };
        let delivery: Delivery = serde_json::from_slice(&read[begin..end])?;
        read.drain(..end);
        pending.deliver(vec![delivery], at, now)?;
    }
}
