//! Clients that cost little themselves: of an answer is read only where its first word stands and where it
//! ends.

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

/// How long it took.
struct Answered {
    first: Duration,
    whole: Duration,
}

impl Connection {
    async fn ask(&mut self, request: &[u8]) -> anyhow::Result<Answered> {
        let began = Instant::now();
        let body = self.ask_head(request).await?;
        let length = content_length(&self.read[..body])?;
        let mut first = None;
        let mut looked_at = body;
        loop {
            if first.is_none() {
                first = find(&self.read[looked_at..], WORD.as_bytes()).map(|_| began.elapsed());
                looked_at = body.max(self.read.len().saturating_sub(WORD.len()));
            }
            let ended = match length {
                Some(length) => self.read.len() >= body + length,
                None => self.read.ends_with(LAST_CHUNK),
            };
            if ended {
                break;
            }
            self.more().await?;
        }
        let whole = began.elapsed();
        let told = || String::from_utf8_lossy(&self.read).into_owned();
        if length.is_none() {
            let last = &self.read[self.read.len().saturating_sub(64)..];
            ensure!(find(last, DONE).is_some(), "broke off: {}", told());
        }
        let first = first.with_context(|| format!("said nothing: {}", told()))?;
        Ok(Answered { first, whole })
    }
}

/// The request that a client (from 0 on) sends next; the second number is a random one.
pub type Requests = Arc<dyn Fn(u64, u64) -> Bytes + Send + Sync>;

/// A request for a chat completion, ready to be sent.
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
    /// Whose CPU time is taken.
    pub pid: u32,
}

/// What a load came to in one round.
pub struct Taken {
    pub whole: Part,
    pub first: Part,
    /// Microseconds for each request.
    pub cpu: f64,
    /// Requests, also before and after what was measured.
    pub done: usize,
}

impl Load {
    pub async fn run(&self) -> anyhow::Result<Taken> {
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
                    if !done.put(connection.ask(&request).await?) {
                        return Ok(done);
                    }
                }
            }
        });
        let loaded = loaded.await?;
        Ok(Taken {
            whole: loaded.part(|answered: &Answered| answered.whole)?,
            first: loaded.part(|answered| answered.first)?,
            cpu: loaded.cpu(),
            done: loaded.count(),
        })
    }
}
