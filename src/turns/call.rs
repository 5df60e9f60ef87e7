//! One call of a model: its chunks go to whoever asked as they come, and in batches into the events. All
//! the while the lease is renewed and somebody may ask to stop.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::launch::{LiveSender, LiveUpdate, Piece};
use super::writer::{WriteOutcome, Writer};
use crate::agent_runtime::{Agent, Chunks};
use crate::domain::turn::StopReason;
use crate::domain::turn::answer::Answer;
use crate::domain::turn::completion_object::CompletionObject;
use crate::error::{Code, Error, Result};
use crate::notifications::RunningTurn;
use crate::telemetry;

/// How long pieces of an answer wait to be written together, and how much of them at most. The first wait
/// shorter, for those who watch; but an answer that is there at once is written only once.
const BATCH_TIME: Duration = Duration::from_millis(50);
const FIRST_BATCH_TIME: Duration = Duration::from_millis(25);
const BATCH_BYTES: usize = 1024;
/// Chunks that go to whoever asked in one piece; the first words go at once.
const MOST_TOGETHER: usize = 64;
/// After a renewal that failed: whoever renews first after an outage keeps the turn.
const RENEW_AGAIN: Duration = Duration::from_millis(100);
/// However long the lease: a turn that was ended elsewhere is noticed within this.
const LONGEST_SILENCE: Duration = Duration::from_secs(3);

/// How a call ended.
#[derive(Debug)]
pub enum CallEnd {
    Answered,
    Failed(Error),
    Stopped(StopReason),
    Lost,
    /// This node ends, and another shall go on.
    Leaving,
}

/// Where the chunks come from. A server that has not answered yet is waited for in one place, however often
/// the wait is interrupted.
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

/// A write that is under way, and the writer it gives back.
type Writing = Pin<Box<dyn Future<Output = (Writer, Result<WriteOutcome>)> + Send>>;

/// What a call has to do besides reading.
struct CallState<'a> {
    /// Not there while it writes.
    writer: Option<Writer>,
    writing: Option<Writing>,
    /// For whoever asked, and not sent yet.
    ahead: Vec<Piece>,
    waiting: String,
    /// When what waits is written.
    write_at: Option<Instant>,
    wrote_first: bool,
    began: Instant,
    renew_at: Instant,
    renew_every: Duration,
    running: &'a RunningTurn,
}

/// Asks the model and reads its answer into `answer`. The writer comes back when nothing is being written.
pub async fn call(
    writer: Writer,
    agent: &Agent,
    body: Vec<u8>,
    session_key: Option<&str>,
    answer: &mut Answer,
    direct: &mut Option<LiveSender>,
    running: &RunningTurn,
) -> (Option<Writer>, CallEnd) {
    let app = writer.app.clone();
    let opening = app.models.stream(agent, body, session_key);
    let mut reading = Reading::Opening(Box::pin(opening));
    let lease = app.config.turn_lease;
    let renew_every = (lease / 3).min(LONGEST_SILENCE);
    let mut side = CallState {
        writer: Some(writer),
        writing: None,
        ahead: Vec::new(),
        waiting: String::new(),
        write_at: None,
        wrote_first: false,
        began: Instant::now(),
        renew_at: Instant::now() + renew_every,
        renew_every,
        running,
    };
    let mut leave_at: Option<Instant> = None;
    let stopping = app.shutdown.stopping();
    tokio::pin!(stopping);
    // One for all that is due: to set one wakes this thread, and there are many chunks.
    let timer = sleep_until(side.renew_at);
    tokio::pin!(timer);
    let ended = loop {
        let due = side.due().into_iter().chain(leave_at).min();
        if let Some(due) = due.filter(|due| *due != timer.deadline()) {
            timer.as_mut().reset(due);
        }
        tokio::select! {
            biased;
            read = reading.next() => match read {
                Ok(Some(chunk)) => {
                    if let Err(ended) = side.take_in(chunk, answer, direct) {
                        break ended;
                    }
                }
                Ok(None) => break CallEnd::Answered,
                Err(error) => break CallEnd::Failed(error),
            },
            () = after_the_others(), if !side.ahead.is_empty() => side.tell(direct),
            (writer, wrote) = poll_writing(&mut side.writing) => {
                side.writing = None;
                side.writer = Some(writer);
                if let Some(ended) = side.heard(wrote) {
                    break ended;
                }
            }
            () = &mut timer, if due.is_some() => {
                if leave_at.is_some_and(|at| at <= Instant::now()) {
                    break CallEnd::Leaving;
                }
                side.write_or_renew();
            }
            () = side.running.woken(), if side.writing.is_none() => side.renew(),
            () = &mut stopping, if leave_at.is_none() => {
                leave_at = Some(app.shutdown.turns_end_at());
            }
        }
    };
    side.tell(direct);
    let (writer, ended) = match side.writing.take() {
        None => (side.writer, ended),
        Some(writing) => {
            let (writer, wrote) = writing.await;
            match wrote {
                Ok(WriteOutcome::Lost) => (Some(writer), CallEnd::Lost),
                Ok(WriteOutcome::Fine(_)) | Err(_) => (Some(writer), ended),
            }
        }
    };
    // The rest is written together with the answer.
    let writer = writer.map(|writer| Writer {
        pending_text: side.waiting,
        ..writer
    });
    (writer, ended)
}

/// Ready when every task of this thread that could go on has done so: the one that reads from the model's
/// connection among them, so that what has come together goes on together.
async fn after_the_others() {
    let mut waited = false;
    poll_fn(|context| {
        if std::mem::replace(&mut waited, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

async fn poll_writing(writing: &mut Option<Writing>) -> (Writer, Result<WriteOutcome>) {
    match writing {
        Some(writing) => writing.await,
        None => std::future::pending().await,
    }
}

impl CallState<'_> {
    fn take_in(
        &mut self,
        chunk: CompletionObject,
        answer: &mut Answer,
        direct: &mut Option<LiveSender>,
    ) -> Result<(), CallEnd> {
        let Ok(text) = answer.add(&chunk) else {
            let detail = "the model's answer is too large";
            return Err(CallEnd::Failed(Error::new(Code::UpstreamFailed, detail)));
        };
        if !text.is_empty() {
            self.waiting.push_str(text);
            let now = Instant::now();
            let full = self.waiting.len() >= BATCH_BYTES;
            let at = match (full, self.wrote_first) {
                (true, _) => now,
                (false, false) => now + FIRST_BATCH_TIME,
                (false, true) => now + BATCH_TIME,
            };
            self.write_at = Some(self.write_at.map_or(at, |before| before.min(at)));
        }
        let begins = !text.is_empty() && !std::mem::replace(&mut self.wrote_first, true);
        if direct.is_some() && !(chunk.delta.is_empty() && chunk.logprobs.is_null()) {
            self.ahead.push(Piece {
                delta: chunk.delta,
                logprobs: chunk.logprobs,
            });
        }
        if begins {
            telemetry::record_first_token(self.began.elapsed());
        }
        if begins || self.ahead.len() >= MOST_TOGETHER {
            self.tell(direct);
        }
        Ok(())
    }

    /// Sends what whoever asked has not seen yet.
    fn tell(&mut self, direct: &mut Option<LiveSender>) {
        for piece in self.ahead.drain(..) {
            if let Some(sender) = direct
                && sender.send(LiveUpdate::Delta(piece)).is_err()
            {
                *direct = None;
            }
        }
    }

    /// When there is something to write; not while something is being written.
    fn due(&self) -> Option<Instant> {
        let due = self
            .write_at
            .map_or(self.renew_at, |at| at.min(self.renew_at));
        self.writing.is_none().then_some(due)
    }

    fn write_or_renew(&mut self) {
        match self.write_at {
            Some(at) if at <= self.renew_at => self.write(),
            Some(_) | None => self.renew(),
        }
    }

    fn write(&mut self) {
        let Some(mut writer) = self.writer.take() else {
            return;
        };
        writer.pending_text = std::mem::take(&mut self.waiting);
        self.write_at = None;
        self.renew_at = Instant::now() + self.renew_every;
        self.writing = Some(Box::pin(async move {
            let wrote = writer.write(&[], &[]).await;
            (writer, wrote)
        }));
    }

    fn renew(&mut self) {
        let Some(mut writer) = self.writer.take() else {
            return;
        };
        self.renew_at = Instant::now() + self.renew_every;
        self.writing = Some(Box::pin(async move {
            let wrote = writer.renew().await;
            (writer, wrote)
        }));
    }

    /// Whether what was heard ends the call. Postgres may be away for a while: as long as nobody else has
    /// the turn, this node goes on.
    fn heard(&mut self, wrote: Result<WriteOutcome>) -> Option<CallEnd> {
        match wrote {
            Ok(WriteOutcome::Fine(heard)) => heard.stop.map(CallEnd::Stopped),
            Ok(WriteOutcome::Lost) => Some(CallEnd::Lost),
            Err(error) => {
                tracing::warn!(error = %error, "a turn's lease was not renewed");
                self.renew_at = Instant::now() + RENEW_AGAIN;
                None
            }
        }
    }
}
