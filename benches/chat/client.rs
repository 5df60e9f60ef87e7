//! Clients that cost little themselves: requests are bytes, and of an answer is read only where its first
//! word stands and where it ends.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use actix_web::web::Bytes;
use anyhow::{Context, bail, ensure};
use futures_util::future::try_join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::figures::{Part, Sample, Times};
use crate::machine::cpu_of;
use crate::upstream::WORD;

const HEAD_END: &[u8] = b"\r\n\r\n";
const LAST_CHUNK: &[u8] = b"\r\n0\r\n\r\n";
const DONE: &[u8] = b"[DONE]";
const PATIENCE: Duration = Duration::from_secs(30);

/// A connection that is used again and again.
pub struct Connection {
    stream: TcpStream,
    read: Vec<u8>,
}

/// How long it took.
struct Answered {
    first: Duration,
    whole: Duration,
}

impl Connection {
    pub async fn open(address: SocketAddr) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            read: Vec::with_capacity(64 * 1024),
        })
    }

    async fn more(&mut self) -> anyhow::Result<()> {
        let reading = self.stream.read_buf(&mut self.read);
        let count = tokio::time::timeout(PATIENCE, reading).await;
        let count = count.context("nothing comes any more")??;
        ensure!(count > 0, "a connection was closed");
        Ok(())
    }

    /// Sends a request and reads the head of its answer; what comes after it stays to be read.
    pub async fn ask_head(&mut self, request: &[u8]) -> anyhow::Result<usize> {
        self.read.clear();
        self.stream.write_all(request).await?;
        loop {
            self.more().await?;
            if let Some(place) = find(&self.read, HEAD_END) {
                if !self.read.starts_with(b"HTTP/1.1 200") {
                    bail!("answered {}", String::from_utf8_lossy(&self.read));
                }
                return Ok(place + HEAD_END.len());
            }
        }
    }

    async fn ask(&mut self, request: &[u8]) -> anyhow::Result<Answered> {
        let began = Instant::now();
        let body = self.ask_head(request).await?;
        let length = content_length(&self.read[..body])?;
        let (mut first, mut looked_at) = (None, body);
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

fn find(text: &[u8], wanted: &[u8]) -> Option<usize> {
    text.windows(wanted.len())
        .position(|window| window == wanted)
}

/// `None` where it comes in chunks.
fn content_length(head: &[u8]) -> anyhow::Result<Option<usize>> {
    let head = std::str::from_utf8(head)?.to_ascii_lowercase();
    let line = head
        .lines()
        .find_map(|line| line.strip_prefix("content-length:"));
    Ok(line.map(|number| number.trim().parse()).transpose()?)
}

/// The request that a client (from 0 on) sends next; the second number is a random one.
pub type Requests = Arc<dyn Fn(u64, u64) -> Bytes + Send + Sync>;

/// A POST of a JSON body, ready to be sent.
pub fn post(key: &str, session: Option<&str>, body: &str) -> Bytes {
    let session = session.map(|id| format!("x-hermes-session-id: {id}\r\n"));
    Bytes::from(format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n\
         content-type: application/json\r\n{}content-length: {}\r\n\r\n{body}",
        session.unwrap_or_default(),
        body.len()
    ))
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
        let began = Instant::now();
        let Times { warm_up, measured } = self.times;
        let end = warm_up + measured;
        let working = (0..u64::from(self.clients)).map(|client| {
            let (address, requests) = (self.address, self.requests.clone());
            tokio::spawn(async move {
                let mut connection = Connection::open(address).await?;
                let mut random = client + 1;
                let mut samples = Vec::new();
                loop {
                    random = next(random);
                    let request = requests(client, random);
                    let answered = connection.ask(&request).await?;
                    let ended = began.elapsed();
                    samples.push((answered, ended));
                    if ended > end {
                        return anyhow::Ok(samples);
                    }
                }
            })
        });
        let working = async { anyhow::Ok(try_join_all(working).await?) };
        let pid = self.pid;
        let watching = async {
            tokio::time::sleep_until((began + warm_up).into()).await;
            let (from, cpu) = (began.elapsed(), cpu_of(pid)?);
            tokio::time::sleep_until((began + end).into()).await;
            let (to, used) = (began.elapsed(), cpu_of(pid)?.saturating_sub(cpu));
            anyhow::Ok((from..to, used))
        };
        let (worked, (window, used)) = tokio::try_join!(working, watching)?;
        let answered = worked.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
        let answered: Vec<(Answered, Duration)> = answered.into_iter().flatten().collect();
        let part = |took: fn(&Answered) -> Duration| {
            let sample = |(answered, ended): &(Answered, Duration)| Sample {
                task: 0,
                took: took(answered),
                ended: *ended,
            };
            let samples: Vec<Sample> = answered.iter().map(sample).collect();
            Part::new(&samples, 1, window.clone())
        };
        let whole = part(|answered| answered.whole)?;
        let count = whole.rate() * (window.end - window.start).as_secs_f64();
        Ok(Taken {
            first: part(|answered| answered.first)?,
            cpu: used.as_secs_f64() * 1e6 / count,
            done: answered.len(),
            whole,
        })
    }
}

/// Xorshift: what is chosen matters little, only that all are.
fn next(mut random: u64) -> u64 {
    random ^= random << 13;
    random ^= random >> 7;
    random ^ (random << 17)
}
