//! Streams of events, read one event at a time.

use std::time::Duration;

use serde_json::Value;

use crate::support::Reply;

/// Longer than a quiet stream is quiet: a heartbeat comes before.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SseEvent {
    pub id: Option<i64>,
    pub name: String,
    pub data: String,
}

impl SseEvent {
    fn parse(text: &str) -> Option<Self> {
        let mut event = Self {
            id: None,
            name: String::new(),
            data: String::new(),
        };
        for line in text.lines() {
            match line.split_once(": ") {
                Some(("id", id)) => event.id = Some(id.parse().unwrap()),
                Some(("event", name)) => event.name = name.to_owned(),
                Some(("data", data)) => event.data = data.to_owned(),
                _ => {}
            }
        }
        (!event.data.is_empty()).then_some(event)
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.data).unwrap_or_else(|_| panic!("{self:?}"))
    }

    /// What a chunk of a chat says.
    pub fn text(&self) -> String {
        let chunk: Value = serde_json::from_str(&self.data).unwrap_or_default();
        let text = chunk["choices"][0]["delta"]["content"].as_str();
        text.unwrap_or_default().to_owned()
    }
}

pub struct Sse {
    pub head: reqwest::header::HeaderMap,
    response: reqwest::Response,
    read: Vec<u8>,
}

impl Sse {
    #[track_caller]
    pub fn open(request: reqwest::RequestBuilder) -> impl Future<Output = Self> {
        let caller = std::panic::Location::caller();
        async move {
            let response = request.send().await.unwrap();
            let status = response.status();
            if status != 200 {
                let told = response.text().await;
                panic!("{caller}: {status}: {told:?}");
            }
            Self::of(response)
        }
    }

    pub fn of(response: reqwest::Response) -> Self {
        Self {
            head: response.headers().clone(),
            response,
            read: Vec::new(),
        }
    }

    pub fn header(&self, name: &str) -> String {
        let value = self.head.get(name).unwrap_or_else(|| panic!("no {name}"));
        value.to_str().unwrap().to_owned()
    }

    /// The next event; `None` at the end. An error where the connection breaks.
    pub async fn try_next(&mut self) -> reqwest::Result<Option<SseEvent>> {
        loop {
            while let Some(end) = self.read.windows(2).position(|two| two == b"\n\n") {
                let event: Vec<u8> = self.read.drain(..end + 2).collect();
                if let Some(event) = SseEvent::parse(&String::from_utf8(event).unwrap()) {
                    return Ok(Some(event));
                }
            }
            match self.response.chunk().await? {
                Some(piece) => self.read.extend_from_slice(&piece),
                None => return Ok(None),
            }
        }
    }

    pub async fn next(&mut self) -> Option<SseEvent> {
        let next = tokio::time::timeout(PATIENCE, self.try_next()).await;
        next.expect("an event").unwrap()
    }

    /// Waits for a comment, which keeps a quiet stream alive; no event may come before it.
    pub async fn comment(&mut self) {
        while !self.read.starts_with(b": ") {
            assert!(self.read.is_empty(), "{:?}", self.read);
            let piece = tokio::time::timeout(PATIENCE, self.response.chunk()).await;
            let piece = piece.expect("a comment").unwrap();
            self.read.extend_from_slice(&piece.expect("a comment"));
        }
    }

    /// Everything up to the end.
    pub async fn rest(&mut self) -> Vec<SseEvent> {
        let mut rest = Vec::new();
        while let Some(event) = self.next().await {
            rest.push(event);
        }
        rest
    }

    /// Up to and with the event of this name.
    pub async fn until(&mut self, name: &str) -> Vec<SseEvent> {
        let mut read = Vec::new();
        loop {
            let next = self.next().await;
            let next = next.unwrap_or_else(|| panic!("no {name} after {read:?}"));
            read.push(next);
            if read[read.len() - 1].name == name {
                return read;
            }
        }
    }

    /// Reads a chat until it has said this.
    pub async fn reads(&mut self, text: &str) {
        let mut heard = String::new();
        while heard != text {
            let next = self.next().await;
            heard += &next.unwrap_or_else(|| panic!("only {heard:?}")).text();
            assert!(text.starts_with(&heard), "{heard:?}");
        }
    }
}

/// All that chunks of a chat say.
pub fn text_of(chunks: &[SseEvent]) -> String {
    chunks.iter().map(SseEvent::text).collect()
}

pub fn events(reply: &Reply) -> Vec<Value> {
    let data = reply
        .body
        .split("\n\n")
        .filter_map(|event| event.strip_prefix("data: "));
    data.filter(|data| *data != "[DONE]")
        .map(|data| serde_json::from_str(data).unwrap())
        .collect()
}
