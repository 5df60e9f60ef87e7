//! Calling a model: any server that speaks OpenAI's chat completions, at an address that a tenant gave.
//! Every wait has an end and every answer a cap. A call is tried again only before the first byte of an
//! answer, and only while the server's budget lasts. Nothing that the server says is trusted, and neither
//! key nor address is ever repeated in an error.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use reqwest::{Method, Response};
use secrecy::{ExposeSecret, SecretString};
use serde_json::Value;
use tokio::time::{Instant as Deadline, timeout_at};
use url::Url;

use super::breaker::Breaker;
use super::call_error::CallError;
use super::client::{FetchError, GuardedClient};
use super::sse::Events;
use crate::domain::turn::completion_object::{CompletionObject, InvalidCompletion};
use crate::domain::values::json_text;
use crate::retry::Backoff;

/// Of an answer that is no success.
const ERROR_BODY: Duration = Duration::from_secs(30);
/// A stream lasts no longer, unless its agent's timeout is longer.
const WHOLE_STREAM: Duration = Duration::from_secs(15 * 60);
/// A call that took longer before it failed may have been paid for: it is not made again.
const QUICK_FAILURE: Duration = Duration::from_secs(5);
/// Of an answer that is not streamed, and of all events of one that is.
const MAX_ANSWER_BYTES: usize = 32 * 1024 * 1024;
/// Room for a whole answer is reserved in steps of this; the first is not counted.
const ROOM_STEP: usize = 256 * 1024;
const MAX_ERROR_BYTES: usize = 64 * 1024;
/// What one comes to in memory.
const MAX_ERROR_COST: usize = 1024 * 1024;
const MAX_MESSAGE_CHARS: usize = 500;
const MAX_RETRIES: u32 = 2;
/// The bounds of the pauses before them.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LAST_PAUSE: Duration = Duration::from_millis(400);
const JSON: HeaderValue = HeaderValue::from_static("application/json");
const JSON_OR_EVENTS: HeaderValue = HeaderValue::from_static("application/json, text/event-stream");
/// Then those that nothing is remembered of are forgotten.
const MANY_SERVERS: usize = 1024;

/// Where a model is. Made once for many calls.
#[derive(Debug, Clone)]
pub struct ModelServer {
    url: Url,
    /// Its failures are counted under this name.
    name: String,
    bearer: Result<Option<HeaderValue>, UnfitKey>,
    /// How long it may be silent, and how long it may take for an answer that is not streamed.
    timeout: Duration,
}

/// A key that no header can carry.
#[derive(Debug, Clone, Copy)]
struct UnfitKey;

impl ModelServer {
    /// `base_url` goes up to and with its `/v1`. Of one owner: what a tenant does to a server is no other
    /// tenant's loss.
    pub fn new(
        owner: &str,
        base_url: &Url,
        api_key: Option<&SecretString>,
        timeout: Duration,
    ) -> Self {
        let bearer = |key: &SecretString| {
            let text = format!("Bearer {}", key.expose_secret());
            let mut bearer = HeaderValue::from_str(&text).map_err(|_| UnfitKey)?;
            bearer.set_sensitive(true);
            Ok(bearer)
        };
        Self {
            url: completions_url(base_url),
            name: format!("{owner} {}", base_url.origin().ascii_serialization()),
            bearer: api_key.map(bearer).transpose(),
            timeout,
        }
    }

    /// The key as it is sent.
    fn key(&self) -> Option<&str> {
        let bearer = self.bearer.as_ref().ok()?.as_ref()?;
        let key = bearer.to_str().ok()?.strip_prefix("Bearer ")?;
        (!key.is_empty()).then_some(key)
    }
}

/// Cheap to clone; clones share what they remember of servers.
#[derive(Clone)]
pub struct Completions {
    client: GuardedClient,
    breakers: Arc<Mutex<HashMap<String, Breaker>>>,
}

impl Completions {
    pub fn new(client: GuardedClient) -> Self {
        Self {
            client,
            breakers: Arc::default(),
        }
    }

    /// The whole answer to `body`, which does not ask for a stream. `room` is asked for each further piece of a large
    /// one, and says whether there is room for it.
    pub async fn complete(
        &self,
        server: &ModelServer,
        body: Vec<u8>,
        room: &mut dyn FnMut(usize) -> bool,
    ) -> Result<CompletionObject, CallError> {
        let deadline = Deadline::now() + server.timeout;
        let mut response = self.send(server, None, body, deadline).await?;
        let mut answer = Vec::new();
        let mut held = ROOM_STEP;
        while let Some(piece) = next_piece(&mut response, deadline).await? {
            let length = answer.len() + piece.len();
            if length > MAX_ANSWER_BYTES {
                return Err(CallError::TooLarge);
            }
            while held < length {
                if !room(ROOM_STEP) {
                    return Err(CallError::TooLarge);
                }
                held += ROOM_STEP;
            }
            answer.extend_from_slice(&piece);
        }
        CompletionObject::read(answer).map_err(|why| no_completion(why, server))
    }

    /// The pieces of the answer to `body`, which asks for a stream. `session_key` tells a memory provider
    /// there whose memory it is.
    pub async fn stream(
        &self,
        server: &ModelServer,
        session_key: Option<&str>,
        body: Vec<u8>,
    ) -> Result<CompletionStream, CallError> {
        let deadline = Deadline::now() + WHOLE_STREAM.max(server.timeout);
        let response = self.send(server, session_key, body, deadline).await?;
        Ok(CompletionStream {
            server: server.clone(),
            response,
            events: Events::default(),
            ready: Vec::new().into_iter(),
            read: 0,
            deadline,
            silence: server.timeout,
            next_by: None,
            done: false,
        })
    }

    /// Sends until there is the head of a good answer, or no more attempt is left.
    async fn send(
        &self,
        server: &ModelServer,
        session_key: Option<&str>,
        body: Vec<u8>,
        deadline: Deadline,
    ) -> Result<Response, CallError> {
        let name = &server.name;
        let body = Bytes::from(body);
        let mut attempt = 0;
        let mut backoff = Backoff::new(FIRST_PAUSE, LAST_PAUSE);
        loop {
            let began = Deadline::now();
            let admitted = self.with_breaker(name, |breaker| breaker.admit(Instant::now()));
            admitted.map_err(|retry_after| CallError::LeftAlone { retry_after })?;
            let outcome = self
                .send_once(server, session_key, body.clone(), deadline)
                .await;
            let is_outage = matches!(&outcome, Err(error) if error.is_outage());
            self.with_breaker(name, |breaker| {
                if is_outage {
                    breaker.failed(Instant::now())
                } else {
                    breaker.succeeded()
                }
            });
            let error = match outcome {
                Ok(response) => return Ok(response),
                Err(error) => error,
            };
            let pause = error.pause_before_retry(&mut backoff);
            let Some(pause) = pause.filter(|pause| Deadline::now() + *pause < deadline) else {
                return Err(error);
            };
            if began.elapsed() > QUICK_FAILURE {
                return Err(error);
            }
            if attempt == MAX_RETRIES || !self.with_breaker(name, Breaker::take_retry) {
                return Err(error);
            }
            attempt += 1;
            tokio::time::sleep(pause).await;
        }
    }

    async fn send_once(
        &self,
        server: &ModelServer,
        session_key: Option<&str>,
        body: Bytes,
        deadline: Deadline,
    ) -> Result<Response, CallError> {
        let refused = |refused| CallError::NotReached(FetchError::Refused(refused));
        let request = self.client.request(Method::POST, &server.url);
        let mut request = request
            .map_err(refused)?
            .header(CONTENT_TYPE, JSON)
            .header(ACCEPT, JSON_OR_EVENTS);
        match &server.bearer {
            Ok(None) => {}
            Ok(Some(bearer)) => request = request.header(AUTHORIZATION, bearer),
            Err(UnfitKey) => return Err(CallError::NotAllowed(0)),
        }
        if let Some(session_key) = session_key {
            request = request.header("x-hermes-session-key", session_key);
        }
        let until = deadline.min(Deadline::now() + server.timeout);
        let sent = timeout_at(until, request.body(body).send()).await;
        let response = match sent {
            Err(_) => return Err(CallError::TooSlow),
            Ok(Err(error)) => return Err(not_reached(error.into())),
            Ok(Ok(response)) => response,
        };
        match response.status().as_u16() {
            200..=299 => Ok(response),
            status => Err(refusal(status, response, server).await),
        }
    }

    fn with_breaker<T>(&self, name: &str, act: impl FnOnce(&mut Breaker) -> T) -> T {
        let mut breakers = self.breakers.lock().unwrap_or_else(PoisonError::into_inner);
        if breakers.len() > MANY_SERVERS {
            breakers.retain(|_, breaker| !breaker.is_idle());
        }
        match breakers.get_mut(name) {
            Some(breaker) => act(breaker),
            None => act(breakers.entry(name.to_owned()).or_default()),
        }
    }
}

fn not_reached(error: FetchError) -> CallError {
    match error {
        FetchError::TooSlow => CallError::TooSlow,
        // A kept connection that the server had closed, most likely: no byte of an answer came.
        error @ (FetchError::Broken(_)
        | FetchError::Refused(_)
        | FetchError::Unresolved
        | FetchError::Unreachable(_)
        | FetchError::Redirect(_)
        | FetchError::Status(_)
        | FetchError::TooLarge(_)) => CallError::NotReached(error),
    }
}

fn completions_url(base_url: &Url) -> Url {
    let mut url = base_url.clone();
    let path = format!("{}/chat/completions", base_url.path().trim_end_matches('/'));
    url.set_path(&path);
    url
}

/// What an answer that is no success means.
async fn refusal(status: u16, mut response: Response, server: &ModelServer) -> CallError {
    let retry_after = response
        .headers()
        .get(RETRY_AFTER)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.trim().parse().ok())
        .map(Duration::from_secs);
    if let (503, Some(retry_after)) = (status, retry_after) {
        return CallError::Unavailable { retry_after };
    }
    match status {
        429 => CallError::Busy { retry_after },
        401 | 403 => CallError::NotAllowed(status),
        400..=499 if status != 408 => {
            let mut body = Vec::new();
            let until = Deadline::now() + ERROR_BODY;
            while let Ok(Some(piece)) = next_piece(&mut response, until).await {
                body.extend_from_slice(&piece);
                if body.len() > MAX_ERROR_BYTES {
                    break;
                }
            }
            let body = String::from_utf8_lossy(&body);
            let body = json_text::read_value(&body, MAX_ERROR_COST).unwrap_or_default();
            let message = message_of(&body, server);
            if is_too_long(&body["error"]) {
                CallError::TooLong(message)
            } else {
                CallError::Refused { status, message }
            }
        }
        status => CallError::Failed(status),
    }
}

/// Why a text that came with a success is no completion.
fn no_completion(why: InvalidCompletion, server: &ModelServer) -> CallError {
    let error = match why {
        InvalidCompletion::Malformed => return CallError::Malformed,
        InvalidCompletion::Error(error) => error,
    };
    let error = json_text::read_value(&error, MAX_ERROR_COST).unwrap_or_default();
    let too_long = is_too_long(&error);
    let message = message_of(&serde_json::json!({ "error": error }), server);
    if too_long {
        CallError::TooLong(message)
    } else {
        CallError::Reported(message)
    }
}

/// Whether an error is OpenAI's about the context window; some servers have it as the type.
fn is_too_long(error: &Value) -> bool {
    let named = |member: &str| error[member] == "context_length_exceeded";
    named("code") || named("type")
}

/// What a server says about an error: one line of it, without the agent's key and what could be another.
fn message_of(body: &Value, server: &ModelServer) -> String {
    let error = &body["error"];
    let message = error["message"].as_str().or(error.as_str());
    let message = message
        .or(body["message"].as_str())
        .unwrap_or("no reason was given");
    let message = match server.key() {
        Some(key) => message.replace(key, "…"),
        None => message.to_owned(),
    };
    let looks_secret =
        |word: &str| word.len() >= 20 && word.bytes().any(|byte| byte.is_ascii_digit());
    let words = message
        .split_whitespace()
        .map(|word| if looks_secret(word) { "…" } else { word });
    let line = words.collect::<Vec<_>>().join(" ");
    line.chars()
        .filter(|c| !c.is_control())
        .take(MAX_MESSAGE_CHARS)
        .collect()
}

async fn next_piece(response: &mut Response, by: Deadline) -> Result<Option<Bytes>, CallError> {
    match timeout_at(by, response.chunk()).await {
        Err(_) => Err(CallError::TooSlow),
        Ok(Err(_)) => Err(CallError::Broken),
        Ok(Ok(piece)) => Ok(piece),
    }
}

/// The pieces of an answer, as they come.
pub struct CompletionStream {
    server: ModelServer,
    response: Response,
    events: Events,
    ready: std::vec::IntoIter<Vec<u8>>,
    read: usize,
    deadline: Deadline,
    /// How long the server may be silent.
    silence: Duration,
    /// When the piece that is waited for must have come, however often the wait is interrupted.
    next_by: Option<Deadline>,
    done: bool,
}

impl CompletionStream {
    /// The next chunk; `None` once the server has said that it is done. A stream that just ends was
    /// broken off. Nothing is lost when its future is dropped.
    pub async fn next(&mut self) -> Result<Option<CompletionObject>, CallError> {
        loop {
            if self.done {
                return Ok(None);
            }
            if let Some(data) = self.ready.next() {
                if data == b"[DONE]" {
                    self.done = true;
                    continue;
                }
                return CompletionObject::read(data)
                    .map(Some)
                    .map_err(|why| no_completion(why, &self.server));
            }
            let silent_until = || self.deadline.min(Deadline::now() + self.silence);
            let next_by = *self.next_by.get_or_insert_with(silent_until);
            let piece = next_piece(&mut self.response, next_by).await?;
            self.next_by = None;
            let piece = piece.ok_or(CallError::Broken)?;
            self.read += piece.len();
            if self.read > MAX_ANSWER_BYTES {
                return Err(CallError::TooLarge);
            }
            let ended = self.events.push(&piece).map_err(|_| CallError::TooLarge)?;
            self.ready = ended.into_iter();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use futures_util::FutureExt;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;
    use crate::config::PrivateUpstreams;
    use crate::upstream::OwnPorts;

    const BEGUN: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n\
                         data: {\"choices\": []}\n\n";

    #[tokio::test]
    async fn a_wait_that_is_interrupted_has_the_same_end() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let base_url = format!("http://{}/v1", listener.local_addr().unwrap());
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let _ = stream.read(&mut [0; 4096]).await;
            stream.write_all(BEGUN.as_bytes()).await.unwrap();
            std::future::pending::<()>().await;
        });
        let client = GuardedClient::new(PrivateUpstreams::Allowed, OwnPorts::default()).unwrap();
        let server = ModelServer::new(
            "owner",
            &base_url.parse().unwrap(),
            None,
            Duration::from_secs(30),
        );
        let completions = Completions::new(client);
        let opened = completions.stream(&server, None, b"{}".to_vec()).await;
        let mut stream = opened.unwrap();
        assert!(stream.next().await.unwrap().is_some());
        assert_eq!(stream.next_by, None);
        assert!(stream.next().now_or_never().is_none());
        let end = stream.next_by.unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(stream.next().now_or_never().is_none());
        assert_eq!(stream.next_by, Some(end));
    }
}
