//! The one stand-in: a small OpenAI-compatible server that answers what a test has scripted, in order,
//! and remembers what it was asked and how many calls were under way at one time.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use actix_web::dev::ServerHandle;
use actix_web::web::{self, Bytes};
use actix_web::{App, HttpRequest, HttpResponse, HttpServer};
use futures_util::stream::{self, StreamExt};
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::support::eventually;

/// One scripted answer.
#[derive(Debug, Clone)]
pub enum Step {
    /// The assistant says this; streamed in words if the request asks for a stream.
    Say(String),
    /// It says back what the person said last, with so much time before each word.
    Echo(Duration),
    /// It says the first words, and the rest when it is released.
    SayHeld { first: String, rest: String },
    /// The assistant calls a tool.
    CallTool { name: String, arguments: Value },
    /// It calls several, by these ids.
    CallTools(Vec<(String, String)>),
    /// An error of the provider.
    Fail { status: u16, body: Value },
    /// The same, and when to come again.
    FailWith(Failure),
    /// The first words of a stream, then the connection breaks.
    BreakOff(String),
    /// These bytes as a stream that then ends.
    Raw(String),
    /// Words without end.
    Endless,
    /// Nothing for this long, then the next step.
    Wait(Duration),
    /// Nothing until it is released, then the next step.
    Hold,
}

#[derive(Debug, Clone)]
pub struct Failure {
    pub status: u16,
    pub retry_after: Option<u32>,
    pub body: Value,
}

impl Step {
    pub fn say(text: &str) -> Self {
        Self::Say(text.to_owned())
    }

    pub fn held(first: &str, rest: &str) -> Self {
        let first = first.to_owned();
        let rest = rest.to_owned();
        Self::SayHeld { first, rest }
    }

    /// It repeats the message at once.
    pub fn echo() -> Self {
        Self::Echo(Duration::ZERO)
    }

    pub fn fail(status: u16) -> Self {
        let body = json!({});
        Self::Fail { status, body }
    }
}

/// What an echo says.
pub fn echo_of(text: &str) -> String {
    format!("you said {text}")
}

#[derive(Default)]
struct Script {
    steps: VecDeque<Step>,
    /// When the steps are at their end.
    otherwise: Option<Step>,
    requests: Vec<Value>,
    session_keys: Vec<Option<String>>,
    under_way: usize,
    most_under_way: usize,
}

struct Shared {
    script: Mutex<Script>,
    released: Semaphore,
}

pub struct Model {
    pub base_url: String,
    shared: Arc<Shared>,
    server: ServerHandle,
}

impl Model {
    pub async fn start(steps: impl IntoIterator<Item = Step>) -> Self {
        let shared = Arc::new(Shared {
            script: Mutex::new(Script {
                steps: steps.into_iter().collect(),
                ..Script::default()
            }),
            released: Semaphore::new(0),
        });
        let data = web::Data::from(shared.clone());
        let server = HttpServer::new(move || {
            App::new()
                .app_data(data.clone())
                .app_data(web::JsonConfig::default().limit(64 * 1024 * 1024))
                .route("/v1/chat/completions", web::post().to(complete))
        })
        .workers(1)
        .disable_signals()
        .bind(SocketAddr::from(([127, 0, 0, 1], 0)))
        .unwrap();
        let base_url = format!("http://{}/v1", server.addrs()[0]);
        let running = server.run();
        let handle = running.handle();
        tokio::spawn(running);
        Self {
            base_url,
            shared,
            server: handle,
        }
    }

    /// What it was asked so far.
    pub fn requests(&self) -> Vec<Value> {
        self.shared.script.lock().unwrap().requests.clone()
    }

    /// Waits until it was called so often.
    pub async fn called(&self, times: usize) {
        let called = async || self.requests().len() == times;
        eventually("the model is called", Duration::from_secs(20), called).await;
    }

    /// How many calls were under way at one time, at most.
    pub fn most_under_way(&self) -> usize {
        self.shared.script.lock().unwrap().most_under_way
    }

    /// The `X-Hermes-Session-Key` of each request.
    pub fn session_keys(&self) -> Vec<Option<String>> {
        self.shared.script.lock().unwrap().session_keys.clone()
    }

    pub fn push(&self, step: Step) {
        self.shared.script.lock().unwrap().steps.push_back(step);
    }

    /// What it does whenever its steps are at their end.
    pub fn otherwise(&self, step: Step) {
        self.shared.script.lock().unwrap().otherwise = Some(step);
    }

    /// Lets one go on that is held, or will be.
    pub fn release(&self) {
        self.shared.released.add_permits(1);
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        drop(self.server.stop(false));
    }
}

/// A call that is under way; until it is dropped.
struct UnderWay(Arc<Shared>);

impl UnderWay {
    fn new(shared: &Arc<Shared>, asked: Value) -> Self {
        let mut script = shared.script.lock().unwrap();
        script.requests.push(asked);
        script.under_way += 1;
        script.most_under_way = script.most_under_way.max(script.under_way);
        Self(shared.clone())
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.script.lock().unwrap().under_way -= 1;
    }
}

async fn complete(
    request: HttpRequest,
    shared: web::Data<Shared>,
    body: web::Json<Value>,
) -> HttpResponse {
    let body = body.into_inner();
    let shared = shared.into_inner();
    let stream = body["stream"] == true;
    let key = request.headers().get("x-hermes-session-key");
    let key = key.map(|key| key.to_str().unwrap().to_owned());
    shared.script.lock().unwrap().session_keys.push(key);
    let said = last_said(&body);
    let call = UnderWay::new(&shared, body);
    loop {
        let step = {
            let mut script = shared.script.lock().unwrap();
            let next = script.steps.pop_front();
            next.or_else(|| script.otherwise.clone())
        };
        let answer = match step {
            Some(Step::Wait(time)) => {
                tokio::time::sleep(time).await;
                continue;
            }
            Some(Step::Hold) => {
                shared.released.acquire().await.unwrap().forget();
                continue;
            }
            Some(Step::Say(text)) => CompleteAnswer::Text(text, Duration::ZERO),
            Some(Step::Echo(pause)) => CompleteAnswer::Text(echo_of(&said), pause),
            Some(Step::SayHeld { first, rest }) => {
                let mut items = words(&first, Duration::ZERO);
                items.push(Item::Hold);
                items.extend(words(&rest, Duration::ZERO));
                items.extend(end("stop"));
                return respond(call, items);
            }
            Some(Step::BreakOff(text)) => {
                let mut items = words(&text, Duration::ZERO);
                items.push(Item::Break);
                return respond(call, items);
            }
            Some(Step::Raw(text)) => return respond(call, vec![Item::Bytes(text.into())]),
            Some(Step::Endless) => return respond(call, vec![Item::Endless]),
            Some(Step::CallTool { name, arguments }) => {
                CompleteAnswer::Calls(vec![("call_1".to_owned(), name, arguments.to_string())])
            }
            Some(Step::CallTools(calls)) => {
                let calls = calls.into_iter();
                CompleteAnswer::Calls(
                    calls
                        .map(|(id, name)| (id, name, "{}".to_owned()))
                        .collect(),
                )
            }
            Some(Step::Fail { status, body }) => {
                let status = actix_web::http::StatusCode::from_u16(status).unwrap();
                return HttpResponse::build(status).json(body);
            }
            Some(Step::FailWith(failure)) => {
                let status = actix_web::http::StatusCode::from_u16(failure.status).unwrap();
                let mut answer = HttpResponse::build(status);
                if let Some(seconds) = failure.retry_after {
                    answer.insert_header(("retry-after", seconds));
                }
                return answer.json(failure.body);
            }
            None => {
                let error = json!({"error": {"message": "the script is at its end"}});
                return HttpResponse::InternalServerError().json(error);
            }
        };
        return if stream {
            respond(call, answer.items())
        } else {
            answer.whole()
        };
    }
}

fn last_said(body: &Value) -> String {
    let mut messages = body["messages"].as_array().into_iter().flatten();
    let last = messages.rfind(|message| message["role"] == "user");
    let text = last.and_then(|message| message["content"].as_str());
    // Messages without an answer between them are one, parted by empty lines.
    let text = text.and_then(|text| text.rsplit("\n\n").next());
    text.unwrap_or_default().to_owned()
}

/// An answer that is complete.
enum CompleteAnswer {
    Text(String, Duration),
    /// Id, name, arguments.
    Calls(Vec<(String, String, String)>),
}

fn call_of((id, name, arguments): &(String, String, String)) -> Value {
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

impl CompleteAnswer {
    fn whole(&self) -> HttpResponse {
        let (message, finish_reason) = match self {
            Self::Text(text, _) => (json!({"role": "assistant", "content": text}), "stop"),
            Self::Calls(calls) => {
                let calls: Vec<Value> = calls.iter().map(call_of).collect();
                (
                    json!({"role": "assistant", "tool_calls": calls}),
                    "tool_calls",
                )
            }
        };
        HttpResponse::Ok().json(json!({
            "id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": "scripted",
            "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }))
    }

    fn items(&self) -> Vec<Item> {
        let (mut items, finish_reason) = match self {
            Self::Text(text, pause) => (words(text, *pause), "stop"),
            Self::Calls(calls) => {
                let numbered = calls.iter().enumerate().map(|(place, call)| {
                    let mut call = call_of(call);
                    call["index"] = place.into();
                    chunk(json!({ "tool_calls": [call] }), Value::Null)
                });
                (numbered.collect(), "tool_calls")
            }
        };
        items.extend(end(finish_reason));
        items
    }
}

/// What a stream is made of.
enum Item {
    Bytes(Bytes),
    Pause(Duration),
    Hold,
    Break,
    Endless,
    /// The call is over when this is on its way.
    Done,
}

fn chunk(delta: Value, finish: Value) -> Item {
    let data = json!({
        "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": "scripted",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
    });
    Item::Bytes(Bytes::from(format!("data: {data}\n\n")))
}

fn words(text: &str, pause: Duration) -> Vec<Item> {
    let mut items = Vec::new();
    for word in text.split_inclusive(' ') {
        if !pause.is_zero() {
            items.push(Item::Pause(pause));
        }
        items.push(chunk(json!({ "content": word }), Value::Null));
    }
    items
}

fn end(finish_reason: &str) -> [Item; 2] {
    [chunk(json!({}), json!(finish_reason)), Item::Done]
}

fn respond(call: UnderWay, items: Vec<Item>) -> HttpResponse {
    let state = (Some(call), VecDeque::from(items));
    let parts = stream::unfold(state, async |(mut call, mut items)| {
        let part = loop {
            match items.pop_front()? {
                Item::Bytes(bytes) => break Ok(bytes),
                Item::Pause(time) => tokio::time::sleep(time).await,
                Item::Hold => {
                    let shared = call.as_ref()?.0.clone();
                    shared.released.acquire().await.unwrap().forget();
                }
                Item::Break => {
                    // What was said before must be on its way when the connection breaks.
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    break Err(std::io::Error::other("scripted break"));
                }
                Item::Endless => {
                    items.push_back(chunk(json!({ "content": "on ".repeat(4096) }), Value::Null));
                    items.push_back(Item::Endless);
                }
                Item::Done => {
                    call = None;
                    break Ok(Bytes::from_static(b"data: [DONE]\n\n"));
                }
            }
        };
        Some((part, (call, items)))
    });
    HttpResponse::Ok()
        .content_type("text/event-stream")
        .streaming(parts.boxed_local())
}
