//! One call of a model: its chunks go to whoever asked as they come, and in batches into the events. All
//! the while the lease is renewed and somebody may ask to stop.

use std::pin::Pin;
use std::time::Duration;

use serde_json::Value;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use super::launch::{Ahead, Direct};
use super::writer::{Writer, Wrote};
use crate::domain::answer::Answer;
use crate::domain::turn::StopReason;
use crate::error::{Code, Error, Result};
use crate::live::Running;
use crate::model::Agent;
use crate::telemetry;

/// How long pieces of an answer wait to be written together, and how much of them at most. The first wait
/// shorter, for those who watch; but an answer that is there at once is written only once.
const BATCH_TIME: Duration = Duration::from_millis(50);
const FIRST_BATCH_TIME: Duration = Duration::from_millis(25);
const BATCH_BYTES: usize = 1024;
/// Chunks that were read and not looked at yet.
const READ_AHEAD: usize = 64;
/// A node that is told to end lets its turns finish for this part of its grace.
const DRAIN_PART: f64 = 0.6;
/// However long the lease: a turn that was ended elsewhere is noticed within this.
const LONGEST_SILENCE: Duration = Duration::from_secs(3);

/// How a call ended.
#[derive(Debug)]
pub enum Called {
    Answered,
    Failed(Error),
    Stopped(StopReason),
    Lost,
    /// This node ends, and another shall go on.
    Leaving,
}

/// A write that is under way, and the writer it gives back.
type Writing = Pin<Box<dyn Future<Output = (Writer, Result<Wrote>)> + Send>>;

/// What a call has to do besides reading.
struct Side<'a> {
    /// Not there while it writes.
    writer: Option<Writer>,
    writing: Option<Writing>,
    waiting: String,
    /// When what waits is written.
    write_at: Option<Instant>,
    wrote_first: bool,
    began: Instant,
    renew_at: Instant,
    renew_every: Duration,
    running: &'a Running,
}

/// Asks the model and reads its answer into `answer`. The writer comes back when nothing is being written.
pub async fn call(
    writer: Writer,
    agent: &Agent,
    body: Vec<u8>,
    session_key: Option<&str>,
    answer: &mut Answer,
    direct: &mut Option<Direct>,
    running: &Running,
) -> (Option<Writer>, Called) {
    let app = writer.app.clone();
    let (chunk_sender, mut chunks) = mpsc::channel::<Value>(READ_AHEAD);
    let reading = async move {
        let mut stream = app.models.stream(agent, body, session_key).await?;
        while let Some(chunk) = stream.next().await? {
            if chunk_sender.send(chunk).await.is_err() {
                break;
            }
        }
        Ok::<(), Error>(())
    };
    tokio::pin!(reading);
    let app = writer.app.clone();
    let lease = app.config.turn_lease;
    let renew_every = (lease / 3).min(LONGEST_SILENCE);
    let mut side = Side {
        writer: Some(writer),
        writing: None,
        waiting: String::new(),
        write_at: None,
        wrote_first: false,
        began: Instant::now(),
        renew_at: Instant::now() + renew_every,
        renew_every,
        running,
    };
    let mut leave_at: Option<Instant> = None;
    let mut read: Option<Result<()>> = None;
    let ended = loop {
        let write_at = side.write_at.filter(|_| side.writing.is_none());
        tokio::select! {
            biased;
            chunk = chunks.recv() => match chunk {
                Some(chunk) => {
                    if let Err(ended) = side.take_in(chunk, answer, direct) {
                        break ended;
                    }
                }
                // Every chunk was looked at, and there will be no more.
                None => break match read.take() {
                    Some(Ok(())) | None => Called::Answered,
                    Some(Err(error)) => Called::Failed(error),
                },
            },
            done = &mut reading, if read.is_none() => read = Some(done),
            (writer, wrote) = poll_writing(&mut side.writing) => {
                side.writing = None;
                side.writer = Some(writer);
                if let Some(ended) = side.heard(wrote) {
                    break ended;
                }
            }
            () = sleep_until(write_at.unwrap_or_else(Instant::now)), if write_at.is_some() => side.write(),
            () = sleep_until(side.renew_at), if side.writing.is_none() => side.renew(),
            () = side.running.woken(), if side.writing.is_none() => side.renew(),
            () = app.draining.cancelled(), if leave_at.is_none() => {
                leave_at = Some(Instant::now() + app.config.shutdown_grace.mul_f64(DRAIN_PART));
            }
            () = sleep_until(leave_at.unwrap_or_else(Instant::now)), if leave_at.is_some() => {
                break Called::Leaving;
            }
        }
    };
    let (writer, ended) = match side.writing.take() {
        None => (side.writer, ended),
        Some(writing) => {
            let (writer, wrote) = writing.await;
            match wrote {
                Ok(Wrote::Lost) => (Some(writer), Called::Lost),
                Ok(Wrote::Fine(_)) | Err(_) => (Some(writer), ended),
            }
        }
    };
    // The rest is written together with the answer.
    let writer = writer.map(|writer| Writer {
        unsaid: side.waiting,
        ..writer
    });
    (writer, ended)
}

async fn poll_writing(writing: &mut Option<Writing>) -> (Writer, Result<Wrote>) {
    match writing {
        Some(writing) => writing.await,
        None => std::future::pending().await,
    }
}

impl Side<'_> {
    fn take_in(
        &mut self,
        chunk: Value,
        answer: &mut Answer,
        direct: &mut Option<Direct>,
    ) -> Result<(), Called> {
        let Ok(text) = answer.add(&chunk) else {
            let detail = "the model's answer is too large";
            return Err(Called::Failed(Error::new(Code::UpstreamFailed, detail)));
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
            if !self.wrote_first {
                telemetry::record_first_token(self.began.elapsed());
            }
            self.wrote_first = true;
        }
        if let Some(sender) = direct
            && sender.send(Ahead::Chunk(chunk)).is_err()
        {
            *direct = None;
        }
        Ok(())
    }

    fn write(&mut self) {
        let Some(mut writer) = self.writer.take() else {
            return;
        };
        writer.unsaid = std::mem::take(&mut self.waiting);
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
    fn heard(&mut self, wrote: Result<Wrote>) -> Option<Called> {
        match wrote {
            Ok(Wrote::Fine(heard)) => heard.stop.map(Called::Stopped),
            Ok(Wrote::Lost) => Some(Called::Lost),
            Err(error) => {
                tracing::warn!(error = %error, "a turn's lease was not renewed");
                None
            }
        }
    }
}
