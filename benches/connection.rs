//! Connections that cost little themselves: requests are bytes, and answers are read as they come.

use std::net::SocketAddr;
use std::time::Duration;

use actix_web::web::Bytes;
use anyhow::{Context, bail, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const HEAD_END: &[u8] = b"\r\n\r\n";
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A connection that is used again and again.
pub struct Connection {
    stream: TcpStream,
    /// What was read since the last request.
    pub read: Vec<u8>,
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

    pub async fn more(&mut self) -> anyhow::Result<()> {
        let reading = self.stream.read_buf(&mut self.read);
        let count = tokio::time::timeout(PATIENCE, reading).await;
        let count = count.context("nothing comes any more")??;
        ensure!(count > 0, "a connection was closed");
        Ok(())
    }

    /// Sends a request and reads the head of its answer; what comes after it stays to be read. Answers where
    /// that begins.
    pub async fn ask_head(&mut self, request: &[u8]) -> anyhow::Result<usize> {
        self.read.clear();
        self.stream.write_all(request).await?;
        loop {
            self.more().await?;
            if let Some(place) = find(&self.read, HEAD_END) {
                if !self.read.starts_with(b"HTTP/1.1 2") {
                    bail!("answered {}", String::from_utf8_lossy(&self.read));
                }
                return Ok(place + HEAD_END.len());
            }
        }
    }

    /// The same with the whole body of an answer that says how long it is.
    pub async fn ask_whole(&mut self, request: &[u8]) -> anyhow::Result<&[u8]> {
        let body = self.ask_head(request).await?;
        let length = content_length(&self.read[..body])?.unwrap_or(0);
        while self.read.len() < body + length {
            self.more().await?;
        }
        Ok(&self.read[body..])
    }
}

pub fn find(text: &[u8], wanted: &[u8]) -> Option<usize> {
    text.windows(wanted.len())
        .position(|window| window == wanted)
}

/// `None` where it comes in chunks.
pub fn content_length(head: &[u8]) -> anyhow::Result<Option<usize>> {
    let head = std::str::from_utf8(head)?.to_ascii_lowercase();
    let line = head
        .lines()
        .find_map(|line| line.strip_prefix("content-length:"));
    Ok(line.map(|number| number.trim().parse()).transpose()?)
}

/// A POST of a JSON body, ready to be sent; `headers` are whole lines.
pub fn post(path: &str, key: &str, headers: &str, body: &str) -> Bytes {
    Bytes::from(format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n\
         content-type: application/json\r\n{headers}content-length: {}\r\n\r\n{body}",
        body.len()
    ))
}

pub fn get(path: &str, key: &str) -> Bytes {
    Bytes::from(format!(
        "GET {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n\r\n"
    ))
}
