//! The way from a turn that runs on this node to the caller that waits for it: chunks ahead of what is committed.

use serde_json::{Map, Value};
use tokio::sync::mpsc;

use super::outcome::TurnOutcome;

/// Updates that a caller may be behind. One that is further behind is dropped, and the turn goes on.
const LIVE_BUFFER: usize = 1024;

#[derive(Debug)]
pub enum LiveUpdate {
    /// What the model added.
    Delta(Piece),
    /// The turn has ended, or waits for its client: nothing comes after it.
    Ended(Box<TurnOutcome>),
    /// The turn is no longer this node's. The rest is in its events.
    LeaseLost,
}

/// What a chunk adds to an answer.
#[derive(Debug)]
pub struct Piece {
    pub delta: Map<String, Value>,
    /// Null where there are none.
    pub logprobs: Value,
}

#[derive(Debug)]
pub struct LiveSender(mpsc::Sender<LiveUpdate>);

/// The caller has left, or is too far behind.
#[derive(Debug)]
pub struct ReceiverClosed;

impl LiveSender {
    pub fn new() -> (Self, mpsc::Receiver<LiveUpdate>) {
        let (sender, receiver) = mpsc::channel(LIVE_BUFFER);
        (Self(sender), receiver)
    }

    pub fn send(&self, update: LiveUpdate) -> Result<(), ReceiverClosed> {
        self.0.try_send(update).map_err(|_| ReceiverClosed)
    }
}
