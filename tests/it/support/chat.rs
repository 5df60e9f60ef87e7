//! Bodies of chats, and what answers to them say.

use serde_json::{Value, json};

use crate::support::servers::model::Model;
use crate::support::{Fields, Reply};

/// It has what the keys of providers have, and is nowhere to be seen.
pub const UPSTREAM_KEY: &str = "sk-canary-0123456789abcdef0123";

pub fn agent_on(model: &Model, mut members: Value) -> Value {
    members["upstream"] = json!({
        "kind": "openai", "base_url": model.base_url, "model": "m-1", "api_key": UPSTREAM_KEY,
    });
    members
}

pub fn with_model(mut body: Value) -> Value {
    body["model"] = json!("main");
    body
}

pub fn lines(transcript: &[Value]) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let line = |message: &Value| (text(&message["role"]), text(&message["content"]));
    transcript.iter().map(line).collect()
}

pub fn line(role: &str, text: &str) -> (String, String) {
    (role.to_owned(), text.to_owned())
}

/// What a whole answer says.
#[track_caller]
pub fn answer(reply: &Reply) -> String {
    let body = reply.expect(200);
    let content = &body["choices"][0]["message"]["content"];
    content
        .as_str()
        .unwrap_or_else(|| panic!("{body}"))
        .to_owned()
}

pub fn id_of_turn(turn: &Value) -> String {
    turn.id()
}
