//! The model: a small server with a constant answer, without delay, in a process of its own (this program
//! again), so that its CPU time does not count as the bench's.

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};

use actix_web::web::{self, Bytes};
use actix_web::{App, HttpResponse, HttpServer};
use anyhow::Context;
use futures_util::stream;
use serde_json::{Value, json};

/// With this argument the program is the model.
pub const ARGUMENT: &str = "upstream";
/// The word in every piece of an answer, and nowhere else.
pub const WORD: &str = "wordish";
pub const PIECES: usize = 20;
const MAX_BYTES: usize = 64 * 1024 * 1024;

/// The model's process, which ends with the bench: it reads from a pipe of the bench.
pub struct Upstream {
    child: Child,
    pub address: SocketAddr,
}

impl Upstream {
    pub fn start() -> anyhow::Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg(ARGUMENT)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the model")?;
        let mut line = String::new();
        let output = child.stdout.take().context("the model has no output")?;
        BufReader::new(output).read_line(&mut line)?;
        let address = line.trim().parse();
        let address = address.context("the model did not start")?;
        Ok(Self { child, address })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The constant answer, whole and streamed.
#[derive(Clone)]
struct CannedAnswer {
    whole: Bytes,
    pieces: Vec<Bytes>,
}

impl CannedAnswer {
    fn new() -> Self {
        let text = format!("{WORD} ").repeat(PIECES);
        let usage =
            json!({"prompt_tokens": 50, "completion_tokens": PIECES, "total_tokens": 50 + PIECES});
        let whole = envelope(
            "chat.completion",
            json!([{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]),
            usage.clone(),
        );
        let piece = |delta: Value, end: Value| {
            let choices = json!([{"index": 0, "delta": delta, "finish_reason": end}]);
            envelope("chat.completion.chunk", choices, Value::Null)
        };
        let role = piece(json!({"role": "assistant", "content": ""}), Value::Null);
        let word = piece(json!({"content": format!("{WORD} ")}), Value::Null);
        let end = piece(json!({}), json!("stop"));
        let used = envelope("chat.completion.chunk", json!([]), usage);
        let all = std::iter::once(role)
            .chain(std::iter::repeat_n(word, PIECES))
            .chain([end, used]);
        let event = |text: String| Bytes::from(format!("data: {text}\n\n"));
        Self {
            whole: Bytes::from(whole.to_string()),
            pieces: all
                .map(|piece| piece.to_string())
                .chain(["[DONE]".to_owned()])
                .map(event)
                .collect(),
        }
    }
}

fn envelope(object: &str, choices: Value, usage: Value) -> Value {
    json!({"id": "chatcmpl-bench", "object": object, "created": 1_700_000_000, "model": "bench",
           "choices": choices, "usage": usage})
}

/// The model's process.
pub fn serve() -> anyhow::Result<()> {
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
    let answer_data = web::Data::new(CannedAnswer::new());
    actix_web::rt::System::new().block_on(async move {
        let server = HttpServer::new(move || {
            App::new()
                .app_data(answer_data.clone())
                .app_data(web::PayloadConfig::new(MAX_BYTES))
                .route("/v1/chat/completions", web::post().to(answer))
        })
        .workers(1)
        .tcp_nodelay(true)
        .bind(SocketAddr::from(([127, 0, 0, 1], 0)))?;
        println!("{}", server.addrs()[0]);
        server.run().await?;
        Ok(())
    })
}

async fn answer(answer_data: web::Data<CannedAnswer>, body: Bytes) -> HttpResponse {
    if !requests_stream(&body) {
        let head = &mut HttpResponse::Ok();
        return head
            .content_type("application/json")
            .body(answer_data.whole.clone());
    }
    let pieces = answer_data
        .pieces
        .clone()
        .into_iter()
        .map(Ok::<Bytes, actix_web::Error>);
    let head = &mut HttpResponse::Ok();
    head.content_type("text/event-stream")
        .streaming(stream::iter(pieces))
}

/// Whether the request asks for a stream. Skips a long history: the member is before or after it.
fn requests_stream(body: &[u8]) -> bool {
    const PATTERN: &[u8] = b"\"stream\":true";
    const EXAMINED_BYTES: usize = 512;
    let first = &body[..body.len().min(EXAMINED_BYTES)];
    let last = &body[body.len().saturating_sub(EXAMINED_BYTES)..];
    [first, last]
        .iter()
        .any(|part| part.windows(PATTERN.len()).any(|window| window == PATTERN))
}
