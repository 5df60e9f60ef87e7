//! What an accepted turn needs after its commit, and the way from where it runs to the client that asked.

use serde_json::{Map, Value};
use tokio::sync::mpsc;

use super::accept::Disposition;
use super::outcome::Outcome;
use super::run::start;
use crate::app::App;
use crate::ids::TenantId;

/// Chunks that a client may be behind. One that is further behind is let go, and the turn goes on.
const LIVE_BUFFER: usize = 1024;

/// What the client that asked is told, ahead of what is committed.
#[derive(Debug)]
pub enum LiveUpdate {
    /// What the model added.
    Delta(Piece),
    /// The turn ended, or waits for its client: nothing comes after it.
    Ended(Box<Outcome>),
    /// The turn is no longer this node's. What becomes of it is in its events.
    Lost,
}

/// What a chunk of an answer adds.
#[derive(Debug)]
pub struct Piece {
    pub delta: Map<String, Value>,
    /// Null where there are none.
    pub logprobs: Value,
}

/// The way to the client that asked.
#[derive(Debug)]
pub struct LiveSender(mpsc::Sender<LiveUpdate>);

/// The client is gone, or too far behind.
#[derive(Debug)]
pub struct ReceiverClosed;

impl LiveSender {
    pub fn new() -> (Self, mpsc::Receiver<LiveUpdate>) {
        let (sender, receiver) = mpsc::channel(LIVE_BUFFER);
        (Self(sender), receiver)
    }

    pub fn send(&self, ahead: LiveUpdate) -> Result<(), ReceiverClosed> {
        self.0.try_send(ahead).map_err(|_| ReceiverClosed)
    }
}

/// Does what an accepted turn needs after its commit: starts it, or tells and starts others. What the client is
/// told ahead of the events comes back where `listens` and the turn runs here.
pub fn launch(
    app: &App,
    tenant_id: TenantId,
    disposition: Disposition,
    listens: bool,
) -> Option<mpsc::Receiver<LiveUpdate>> {
    match disposition {
        Disposition::Started(claimed) => {
            let (direct, ahead) = LiveSender::new();
            start(app, tenant_id, *claimed, listens.then_some(direct));
            listens.then_some(ahead)
        }
        Disposition::Queued { next } => {
            if let Some(next) = next {
                start(app, tenant_id, *next, None);
            }
            None
        }
        Disposition::Attached => None,
    }
}
