//! The one stand-in: a small OpenAI-compatible server that answers what a test has scripted, in order,
//! and remembers what it was asked.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use actix_web::dev::ServerHandle;
use actix_web::web::{self, Bytes};
use actix_web::{App, HttpRequest, HttpResponse, HttpServer};
use futures_util::stream::{self, StreamExt};
use serde_json::{Value, json};

/// One scripted answer.
#[derive(Debug, Clone)]
pub enum Step {
    /// The assistant says this; streamed in words if the request asks for a stream.
    Say(String),
    /// The assistant calls a tool.
    CallTool { name: String, arguments: Value },
    /// An error of the provider.
    Fail { status: u16, body: Value },
    /// The first words of a stream, then the connection breaks.
    BreakOff(String),
    /// Nothing for this long, then the next step.
    Wait(Duration),
}

#[derive(Default)]
struct Script {
    steps: VecDeque<Step>,
    requests: Vec<Value>,
    session_keys: Vec<Option<String>>,
}

pub struct Model {
    pub base_url: String,
    script: Arc<Mutex<Script>>,
    server: ServerHandle,
}

impl Model {
    pub async fn start(steps: impl IntoIterator<Item = Step>) -> Self {
        let script = Arc::new(Mutex::new(Script {
            steps: steps.into_iter().collect(),
            requests: Vec::new(),
            session_keys: Vec::new(),
        }));
        let shared = web::Data::from(script.clone());
        let server = HttpServer::new(move || {
            App::new()
                .app_data(shared.clone())
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
            script,
            server: handle,
        }
    }

    /// What it was asked so far.
    pub fn requests(&self) -> Vec<Value> {
        self.script.lock().unwrap().requests.clone()
    }

    /// The `X-Hermes-Session-Key` of each request.
    pub fn session_keys(&self) -> Vec<Option<String>> {
        self.script.lock().unwrap().session_keys.clone()
    }

    pub fn push(&self, step: Step) {
        self.script.lock().unwrap().steps.push_back(step);
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        drop(self.server.stop(false));
    }
}

async fn complete(
    request: HttpRequest,
    script: web::Data<Mutex<Script>>,
    body: web::Json<Value>,
) -> HttpResponse {
    let body = body.into_inner();
    let stream = body["stream"] == true;
    let key = request.headers().get("x-hermes-session-key");
    let key = key.map(|key| key.to_str().unwrap().to_owned());
    {
        let mut script = script.lock().unwrap();
        script.requests.push(body);
        script.session_keys.push(key);
    }
    loop {
        let step = script.lock().unwrap().steps.pop_front();
        match step {
            Some(Step::Wait(time)) => tokio::time::sleep(time).await,
            Some(Step::Say(text)) if stream => return stream_words(&text, true),
            Some(Step::Say(text)) => {
                return whole(json!({"role": "assistant", "content": text}), "stop");
            }
            Some(Step::BreakOff(text)) => return stream_words(&text, false),
            Some(Step::CallTool { name, arguments }) => {
                let call = json!({
                    "id": "call_1", "type": "function",
                    "function": {"name": name, "arguments": arguments.to_string()},
                });
                return whole(
                    json!({"role": "assistant", "tool_calls": [call]}),
                    "tool_calls",
                );
            }
            Some(Step::Fail { status, body }) => {
                let status = actix_web::http::StatusCode::from_u16(status).unwrap();
                return HttpResponse::build(status).json(body);
            }
            None => {
                let error = json!({"error": {"message": "the script is at its end"}});
                return HttpResponse::InternalServerError().json(error);
            }
        }
    }
}

fn whole(message: Value, finish_reason: &str) -> HttpResponse {
    HttpResponse::Ok().json(json!({
        "id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": "scripted",
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }))
}

fn stream_words(text: &str, complete: bool) -> HttpResponse {
    let chunk = |delta: Value, finish: Value| {
        let data = json!({
            "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": "scripted",
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
        });
        Ok::<Bytes, std::io::Error>(Bytes::from(format!("data: {data}\n\n")))
    };
    let mut parts: Vec<_> = text
        .split_inclusive(' ')
        .map(|word| chunk(json!({ "content": word }), Value::Null))
        .collect();
    if complete {
        parts.push(chunk(json!({}), json!("stop")));
        parts.push(Ok(Bytes::from_static(b"data: [DONE]\n\n")));
    } else {
        parts.push(Err(std::io::Error::other("scripted break")));
    }
    let parts = stream::iter(parts).then(async |part| {
        if part.is_err() {
            // What was said before must be on its way when the connection breaks.
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        part
    });
    HttpResponse::Ok()
        .content_type("text/event-stream")
        .streaming(parts.boxed_local())
}
