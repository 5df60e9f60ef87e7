//! One call of a model: its chunks go to the live caller as they come, and in batches into the events. Meanwhile the
//! lease is renewed, and the turn may be stopped.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::live::{LiveSender, LiveUpdate, Piece};
use super::writer::{TurnWriter, WriteOutcome};
use crate::agent_runtime::{Agent, Chunks};
use crate::domain::turn::StopReason;
use crate::domain::turn::answer::Answer;
use crate::domain::turn::completion_object::CompletionObject;
use crate::error::{Code, Error, Result};
use crate::notifications::RunningTurn;
use crate::telemetry;

/// How long pieces of an answer wait to be written together, and how much of them at most. The first wait is
/// shorter, for subscribers; but an answer that is there at once is written only once.
const BATCH_TIME: Duration = Duration::from_millis(50);
const FIRST_BATCH_TIME: Duration = Duration::from_millis(25);
const BATCH_BYTES: usize = 1024;
/// Chunks that go to the live caller in one piece; the first words go at once.
const MAX_BATCH_CHUNKS: usize = 64;
/// After a renewal that failed: the node that renews first after an outage keeps the turn.
const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// However long the lease: a turn that was ended elsewhere is noticed within this.
const MAX_RENEW_INTERVAL: Duration = Duration::from_secs(3);

/// How a call ended.
#[derive(Debug)]
pub enum CallEnd {
    Answered,
    Failed(Error),
    Stopped(StopReason),
    LeaseLost,
    /// This node stops, and another one shall go on.
    Released,
}

/// Where the chunks come from. An answer that has not begun is one future, however often its wait is interrupted.
enum Reading<'a> {
    Opening(Pin<Box<dyn Future<Output = Result<Chunks>> + Send + 'a>>),
    Open(Chunks),
}

impl Reading<'_> {
    /// The next chunk. Nothing is lost when its future is dropped.
    async fn next(&mut self) -> Result<Option<CompletionObject>> {
        loop {
            match self {
                Self::Opening(opening) => *self = Self::Open(opening.await?),
                Self::Open(chunks) => return chunks.next().await,
            }
        }
    }
}

/// A write in flight, and the writer that it gives back.
type WriteInFlight<'a> =
    Pin<Box<dyn Future<Output = (&'a mut TurnWriter, Result<WriteOutcome>)> + Send + 'a>>;

/// A call of a model, and where its answer goes.
pub struct ModelCall<'a> {
    pub agent: &'a Agent,
    pub writer: &'a mut TurnWriter,
    pub running: &'a RunningTurn,
    pub answer: &'a mut Answer,
    /// The caller that gets chunks ahead of the events, as long as it keeps up.
    pub live: &'a mut Option<LiveSender>,
}

/// What a call has to do besides reading.
struct CallState<'a> {
    /// `None` while a write is in flight.
    writer: Option<&'a mut TurnWriter>,
    in_flight: Option<WriteInFlight<'a>>,
    answer: &'a mut Answer,
    live: &'a mut Option<LiveSender>,
    /// For the live caller, and not sent yet.
    unsent: Vec<Piece>,
    /// Text that is not written yet.
    pending_text: String,
    /// When it is written.
    write_at: Option<Instant>,
    has_text: bool,
    began: Instant,
    renew_at: Instant,
    renew_every: Duration,
}

impl ModelCall<'_> {
    /// Calls the model and reads its answer. Text that is not written by then is left to the writer's next write.
    pub async fn run(self, body: Vec<u8>, session_key: Option<&str>) -> CallEnd {
        let app = self.writer.app.clone();
        let opening = app.models.stream(self.agent, body, session_key);
        let mut reading = Reading::Opening(Box::pin(opening));
        let renew_every = (app.config.turn_lease / 3).min(MAX_RENEW_INTERVAL);
        let running = self.running;
        let mut state = CallState {
            writer: Some(self.writer),
            in_flight: None,
            answer: self.answer,
            live: self.live,
            unsent: Vec::new(),
            pending_text: String::new(),
            write_at: None,
            has_text: false,
            began: Instant::now(),
            renew_at: Instant::now() + renew_every,
            renew_every,
        };
        let mut release_at: Option<Instant> = None;
        let stopping = app.shutdown.stopping();
        tokio::pin!(stopping);
        // One for all that is due: to set one wakes this thread, and there are many chunks.
        let timer = sleep_until(state.renew_at);
        tokio::pin!(timer);
        let end = loop {
            let due = state.due().into_iter().chain(release_at).min();
            if let Some(due) = due.filter(|due| *due != timer.deadline()) {
                timer.as_mut().reset(due);
            }
            tokio::select! {
                biased;
                read = reading.next() => match read {
                    Ok(Some(chunk)) => {
                        if let Err(end) = state.read_chunk(chunk) {
                            break end;
                        }
                    }
                    Ok(None) => break CallEnd::Answered,
                    Err(error) => break CallEnd::Failed(error),
                },
                () = after_other_tasks(), if !state.unsent.is_empty() => state.send_live(),
                (writer, outcome) = poll_write(&mut state.in_flight) => {
                    state.in_flight = None;
                    state.writer = Some(writer);
                    if let Some(end) = state.finish_write(outcome) {
                        break end;
                    }
                }
                () = &mut timer, if due.is_some() => {
                    if release_at.is_some_and(|at| at <= Instant::now()) {
                        break CallEnd::Released;
                    }
                    state.write_or_renew();
                }
                () = running.woken(), if state.in_flight.is_none() => state.renew(),
                () = &mut stopping, if release_at.is_none() => {
                    release_at = Some(app.shutdown.turns_end_at());
                }
            }
        };
        state.finish(end).await
    }
}

/// Ready when every task of this thread that could go on has done so: the one that reads from the model's
/// connection among them, so that chunks which arrived together are sent together.
async fn after_other_tasks() {
    let mut has_waited = false;
    poll_fn(|context| {
        if std::mem::replace(&mut has_waited, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

async fn poll_write<'a>(
    in_flight: &mut Option<WriteInFlight<'a>>,
) -> (&'a mut TurnWriter, Result<WriteOutcome>) {
    match in_flight {
        Some(write) => write.await,
        None => std::future::pending().await,
    }
}

impl CallState<'_> {
    fn read_chunk(&mut self, chunk: CompletionObject) -> Result<(), CallEnd> {
        let Ok(text) = self.answer.add(&chunk) else {
            let detail = "the model's answer is too large";
            return Err(CallEnd::Failed(Error::new(Code::UpstreamFailed, detail)));
        };
        if !text.is_empty() {
            self.pending_text.push_str(text);
            let now = Instant::now();
            let at = if self.pending_text.len() >= BATCH_BYTES {
                now
            } else if self.has_text {
                now + BATCH_TIME
            } else {
                now + FIRST_BATCH_TIME
            };
            self.write_at = Some(self.write_at.map_or(at, |before| before.min(at)));
        }
        let is_first = !text.is_empty() && !std::mem::replace(&mut self.has_text, true);
        if self.live.is_some() && !(chunk.delta.is_empty() && chunk.logprobs.is_null()) {
            self.unsent.push(Piece {
                delta: chunk.delta,
                logprobs: chunk.logprobs,
            });
        }
        if is_first {
            telemetry::record_first_token(self.began.elapsed());
        }
        if is_first || self.unsent.len() >= MAX_BATCH_CHUNKS {
            self.send_live();
        }
        Ok(())
    }

    /// Sends what the live caller has not got yet.
    fn send_live(&mut self) {
        for piece in self.unsent.drain(..) {
            if let Some(sender) = self.live
                && sender.send(LiveUpdate::Delta(piece)).is_err()
            {
                *self.live = None;
            }
        }
    }

    /// When there is something to write; not while a write is in flight.
    fn due(&self) -> Option<Instant> {
        let due = self
            .write_at
            .map_or(self.renew_at, |at| at.min(self.renew_at));
        self.in_flight.is_none().then_some(due)
    }

    fn write_or_renew(&mut self) {
        match self.write_at {
            Some(at) if at <= self.renew_at => self.write(),
            Some(_) | None => self.renew(),
        }
    }

    fn write(&mut self) {
        let Some(writer) = self.writer.take() else {
            return;
        };
        writer.pending_text = std::mem::take(&mut self.pending_text);
        self.write_at = None;
        self.renew_at = Instant::now() + self.renew_every;
        self.in_flight = Some(Box::pin(async move {
            let outcome = writer.write(&[], &[]).await;
            (writer, outcome)
        }));
    }

    fn renew(&mut self) {
        let Some(writer) = self.writer.take() else {
            return;
        };
        self.renew_at = Instant::now() + self.renew_every;
        self.in_flight = Some(Box::pin(async move {
            let outcome = writer.renew().await;
            (writer, outcome)
        }));
    }

    /// Whether the outcome of a write ends the call. Postgres may be away for a while: as long as no other node has
    /// claimed the turn, this one goes on.
    fn finish_write(&mut self, outcome: Result<WriteOutcome>) -> Option<CallEnd> {
        match outcome {
            Ok(WriteOutcome::Applied(ack)) => ack.stop.map(CallEnd::Stopped),
            Ok(WriteOutcome::LeaseLost) => Some(CallEnd::LeaseLost),
            Err(error) => {
                tracing::warn!(error = %error, "turn lease not renewed");
                self.renew_at = Instant::now() + RETRY_PAUSE;
                None
            }
        }
    }

    /// Waits for the write in flight, and leaves the rest of the text to the writer.
    async fn finish(mut self, mut end: CallEnd) -> CallEnd {
        self.send_live();
        if let Some(write) = self.in_flight.take() {
            let (writer, outcome) = write.await;
            self.writer = Some(writer);
            if let Ok(WriteOutcome::LeaseLost) = outcome {
                end = CallEnd::LeaseLost;
            }
        }
        if let Some(writer) = self.writer {
            writer.pending_text = self.pending_text;
        }
        end
    }
}
