//! Clients with little overhead: in an answer they only find the first word and the end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use actix_web::web::Bytes;
use anyhow::{Context, ensure};

use crate::connection::{self, Connection, content_length, find};
use crate::figures::{Part, Times};
use crate::load;
use crate::random::next;
use crate::upstream::WORD;

const LAST_CHUNK: &[u8] = b"\r\n0\r\n\r\n";
const DONE: &[u8] = b"[DONE]";

/// The time to the first word, and to the end of an answer.
struct AnswerTimes {
    first: Duration,
    whole: Duration,
}

impl Connection {
    async fn send(&mut self, request: &[u8]) -> anyhow::Result<AnswerTimes> {
        let began = Instant::now();
        let body = self.send_for_head(request).await?;
        let length = content_length(&self.read[..body])?;
        let mut first = None;
        let mut searched = body;
        loop {
            if first.is_none() {
                first = find(&self.read[searched..], WORD.as_bytes()).map(|_| began.elapsed());
                searched = body.max(self.read.len().saturating_sub(WORD.len()));
            }
            let ended = match length {
                Some(length) => self.read.len() >= body + length,
                None => self.read.ends_with(LAST_CHUNK),
            };
            if ended {
                break;
            }
            self.read_more().await?;
        }
        let whole = began.elapsed();
        let text = || String::from_utf8_lossy(&self.read).into_owned();
        if length.is_none() {
            let last = &self.read[self.read.len().saturating_sub(64)..];
            ensure!(find(last, DONE).is_some(), "incomplete: {}", text());
        }
        let first = first.with_context(|| format!("no word: {}", text()))?;
        Ok(AnswerTimes { first, whole })
    }
}

/// The next request of a client (numbered from 0); the second number is random.
pub type Requests = Arc<dyn Fn(u64, u64) -> Bytes + Send + Sync>;

/// A request for a chat completion, ready to send.
pub fn post(key: &str, session: Option<&str>, body: &str) -> Bytes {
    let session = session.map(|id| format!("x-hermes-session-id: {id}\r\n"));
    let headers = session.unwrap_or_default();
    connection::post("/v1/chat/completions", key, &headers, body)
}

pub struct Load {
    pub address: SocketAddr,
    pub requests: Requests,
    pub clients: u32,
    pub times: Times,
    /// The process whose CPU time is measured.
    pub pid: u32,
}

/// The result of a load in one round.
pub struct RoundResult {
    pub whole: Part,
    pub first: Part,
    /// CPU microseconds for each request.
    pub cpu: f64,
    /// Requests, including those outside of the measured time.
    pub done: usize,
}

impl Load {
    pub async fn run(&self) -> anyhow::Result<RoundResult> {
        let address = self.address;
        let requests = &self.requests;
        let loaded = load::run(self.clients, self.pid, self.times, |client, mut done| {
            let requests = requests.clone();
            async move {
                let mut connection = Connection::open(address).await?;
                let mut random = client + 1;
                loop {
                    random = next(random);
                    let request = requests(client, random);
                    if !done.put(connection.send(&request).await?) {
                        return Ok(done);
                    }
                }
            }
        });
        let loaded = loaded.await?;
        Ok(RoundResult {
            whole: loaded.part(|answered: &AnswerTimes| answered.whole)?,
            first: loaded.part(|answered| answered.first)?,
            cpu: loaded.cpu(),
            done: loaded.count(),
        })
    }
}
