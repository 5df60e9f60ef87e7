//! Connections with little overhead: requests are bytes, and answers are read as they arrive.

use std::net::SocketAddr;
use std::time::Duration;

use actix_web::web::Bytes;
use anyhow::{Context, bail, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const HEAD_END: &[u8] = b"\r\n\r\n";
pub const MAX_WAIT: Duration = Duration::from_secs(30);

/// A keep-alive connection.
pub struct Connection {
    stream: TcpStream,
    /// The bytes that were read since the last request.
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

    pub async fn read_more(&mut self) -> anyhow::Result<()> {
        let reading = self.stream.read_buf(&mut self.read);
        let count = tokio::time::timeout(MAX_WAIT, reading).await;
        let count = count.context("no answer in time")??;
        ensure!(count > 0, "a connection was closed");
        Ok(())
    }

    /// Sends a request and reads the head of its answer. Returns the index of the body in `read`.
    pub async fn send_for_head(&mut self, request: &[u8]) -> anyhow::Result<usize> {
        self.read.clear();
        self.stream.write_all(request).await?;
        loop {
            self.read_more().await?;
            if let Some(index) = find(&self.read, HEAD_END) {
                if !self.read.starts_with(b"HTTP/1.1 2") {
                    bail!("answered {}", String::from_utf8_lossy(&self.read));
                }
                return Ok(index + HEAD_END.len());
            }
        }
    }

    /// Sends a request and reads the whole body of an answer with a content length.
    pub async fn send_for_body(&mut self, request: &[u8]) -> anyhow::Result<&[u8]> {
        let body = self.send_for_head(request).await?;
        let length = content_length(&self.read[..body])?.unwrap_or(0);
        while self.read.len() < body + length {
            self.read_more().await?;
        }
        Ok(&self.read[body..])
    }
}

pub fn find(text: &[u8], pattern: &[u8]) -> Option<usize> {
    text.windows(pattern.len())
        .position(|window| window == pattern)
}

/// The content length; `None` for a chunked body.
pub fn content_length(head: &[u8]) -> anyhow::Result<Option<usize>> {
    let head = std::str::from_utf8(head)?.to_ascii_lowercase();
    let line = head
        .lines()
        .find_map(|line| line.strip_prefix("content-length:"));
    Ok(line.map(|number| number.trim().parse()).transpose()?)
}

/// A POST of a JSON body, ready to send; `headers` are whole lines.
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
