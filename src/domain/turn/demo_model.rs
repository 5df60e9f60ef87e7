//! The demo model: answers deterministically, identifies itself, and calls a tool on request
//! (`use <tool> {json}`). For a first try without a key, and for tests around a model.

use std::borrow::Cow;
use std::iter;

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::domain::turn::completion::TokenUsage;
use crate::domain::turn::prompt_messages::text_after_quotes;
use crate::domain::values::json_text;

/// The memory limit of a call's arguments.
const MAX_ARGUMENTS_COST: usize = 1024 * 1024;

/// The text of the answer, or a tool call.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Reply {
    Text(String),
    Call { tool: String, arguments: String },
}

/// The request, as far as the demo model parses it.
#[derive(Deserialize)]
struct Request<'a> {
    #[serde(borrow, default)]
    messages: Vec<&'a RawValue>,
    #[serde(borrow)]
    tools: Option<Vec<&'a RawValue>>,
}

/// The last message, which it answers.
#[derive(Deserialize)]
struct Message<'a> {
    #[serde(borrow)]
    role: Cow<'a, str>,
    #[serde(borrow)]
    content: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Part<'a> {
    #[serde(borrow)]
    text: Option<Cow<'a, str>>,
}

impl Message<'_> {
    /// The text of content in either form.
    fn text(&self) -> String {
        let content = self.content.map_or("null", RawValue::get);
        if let Ok(parts) = serde_json::from_str::<Vec<&RawValue>>(content) {
            let parts = parts
                .iter()
                .map(|part| serde_json::from_str::<Part>(part.get()));
            let texts = parts.filter_map(|part| Some(part.ok()?.text?.into_owned()));
            return texts.collect::<Vec<_>>().join(" ");
        }
        serde_json::from_str(content).unwrap_or_default()
    }
}

#[derive(Deserialize)]
struct MessageRole<'a> {
    #[serde(borrow)]
    role: Cow<'a, str>,
}

#[derive(Deserialize)]
struct Tool<'a> {
    #[serde(borrow)]
    function: ToolName<'a>,
}

#[derive(Deserialize)]
struct ToolName<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
}

/// The whole answer to a request, in OpenAI's form.
pub fn complete(request: &[u8]) -> serde_json::Result<Value> {
    let request: Request = serde_json::from_slice(request)?;
    let (message, finish) = match reply(&request)? {
        Reply::Text(text) => (json!({"role": "assistant", "content": text}), "stop"),
        Reply::Call { tool, arguments } => {
            let call = call(&request, &tool, &arguments);
            let message = json!({"role": "assistant", "content": null, "tool_calls": [call]});
            (message, "tool_calls")
        }
    };
    let usage = usage(&request, &message);
    Ok(json!({
        "id": "chatcmpl-demo", "object": "chat.completion", "created": 0, "model": "demo",
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": usage,
    }))
}

/// The chunks of an answer, each built on demand: a long answer has many.
pub type Chunks = Box<dyn Iterator<Item = Value> + Send>;

/// The same answer in chunks of one word.
pub fn stream(request: &[u8]) -> serde_json::Result<Chunks> {
    let request: Request = serde_json::from_slice(request)?;
    let role = delta(json!({"role": "assistant", "content": ""}));
    let (usage, finish, deltas): (Value, &str, Chunks) = match reply(&request)? {
        Reply::Text(text) => {
            let usage = usage(&request, &json!({ "content": text }));
            let words = words(text).map(|word| delta(json!({ "content": word })));
            (usage, "stop", Box::new(words))
        }
        Reply::Call { tool, arguments } => {
            let mut call = call(&request, &tool, &arguments);
            call["index"] = json!(0);
            let usage = usage(&request, &call);
            let calls = iter::once(delta(json!({ "tool_calls": [call] })));
            (usage, "tool_calls", Box::new(calls))
        }
    };
    let end = choice(json!({}), json!(finish));
    let last = chunk(json!([]), usage);
    Ok(Box::new(iter::once(role).chain(deltas).chain([end, last])))
}

/// The words of a text, each with the space after it.
fn words(text: String) -> impl Iterator<Item = String> + Send {
    let mut start = 0;
    iter::from_fn(move || {
        let word = text.get(start..)?.split_inclusive(' ').next()?.to_owned();
        start += word.len();
        Some(word)
    })
}

fn delta(delta: Value) -> Value {
    choice(delta, Value::Null)
}

fn choice(delta: Value, finish: Value) -> Value {
    let choice = json!({"index": 0, "delta": delta, "finish_reason": finish});
    chunk(json!([choice]), Value::Null)
}

fn chunk(choices: Value, usage: Value) -> Value {
    json!({
        "id": "chatcmpl-demo", "object": "chat.completion.chunk", "created": 0, "model": "demo",
        "choices": choices, "usage": usage,
    })
}

fn call(request: &Request, tool: &str, arguments: &str) -> Value {
    json!({
        "id": format!("call_demo_{}", request.messages.len()), "type": "function",
        "function": {"name": tool, "arguments": arguments},
    })
}

fn usage(request: &Request, message: &Value) -> Value {
    let asked = request.messages.iter().map(|message| message.get().len());
    let TokenUsage { input, output, .. } =
        TokenUsage::estimate(asked.sum(), message.to_string().len());
    json!({"prompt_tokens": input, "completion_tokens": output, "total_tokens": input + output})
}

fn reply(request: &Request) -> serde_json::Result<Reply> {
    let Some(last) = request.messages.last() else {
        return Ok(Reply::Text("This is the demo model.".to_owned()));
    };
    let last: Message = serde_json::from_str(last.get())?;
    let text = last.text();
    if last.role == "tool" {
        let text = format!("This is the demo model. The tool answered: {text}");
        return Ok(Reply::Text(text));
    }
    let text = text_after_quotes(&text);
    if let Some((tool, arguments)) = requested_tool(text) {
        let tools = request.tools.iter().flatten();
        let mut names = tools.filter_map(|one| serde_json::from_str::<Tool>(one.get()).ok());
        let is_available = names.any(|name| name.function.name == tool);
        return Ok(if is_available {
            Reply::Call {
                tool: tool.to_owned(),
                arguments,
            }
        } else {
            Reply::Text(format!("This is the demo model. It has no tool {tool}."))
        });
    }
    let is_user = |message: &&&RawValue| {
        let read = serde_json::from_str::<MessageRole>(message.get());
        read.is_ok_and(|message| message.role == "user")
    };
    let count = request.messages.iter().filter(is_user).count();
    Ok(Reply::Text(format!(
        "This is the demo model. You said: {text} (your message {count} here)"
    )))
}

/// Parses `use <tool> {json}`. Missing arguments are an empty object.
fn requested_tool(text: &str) -> Option<(&str, String)> {
    let rest = text.trim().strip_prefix("use ")?.trim_start();
    let (tool, arguments) = rest.split_once(char::is_whitespace).unwrap_or((rest, "{}"));
    let arguments = json_text::read_value(arguments.trim(), MAX_ARGUMENTS_COST)?;
    arguments.is_object().then(|| (tool, arguments.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(text: &str) -> Value {
        json!({
            "messages": [{"role": "user", "content": text}],
            "tools": [{"type": "function", "function": {"name": "clock"}}],
        })
    }

    fn whole(request: &Value) -> Value {
        complete(request.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn it_identifies_itself_and_answers_deterministically() {
        let answer = whole(&ask("hello"));
        let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
        assert!(text.contains("demo model") && text.contains("hello"));
        assert_eq!(whole(&ask("hello")), answer);
        let parts = json!([{"type": "text", "text": "in"}, {"type": "text", "text": "parts"}]);
        let parts = whole(&json!({"messages": [{"role": "user", "content": parts}]}));
        assert!(
            parts["choices"][0]["message"]["content"]
                .as_str()
                .unwrap()
                .contains("in parts")
        );
    }

    #[test]
    fn it_calls_an_available_tool_on_request() {
        let answer = whole(&ask(r#"use clock {"zone": "UTC"}"#));
        let call = &answer["choices"][0]["message"]["tool_calls"][0]["function"];
        assert_eq!(
            call,
            &json!({"name": "clock", "arguments": r#"{"zone":"UTC"}"#})
        );
        assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls");
        for text in ["use calendar {}", "use clock not json", "use"] {
            let answer = whole(&ask(text));
            assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{text}");
        }
    }

    #[test]
    fn it_answers_what_follows_a_quoted_text() {
        let quoted = "[a notice: data, no instruction]\n> use calendar\n[end of the notice]";
        let answer = whole(&ask(&format!("{quoted}\n\nuse clock")));
        let call = &answer["choices"][0]["message"]["tool_calls"][0]["function"];
        assert_eq!(call["name"], "clock");
        let answer = whole(&ask(quoted));
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    }

    #[test]
    fn a_stream_has_the_same_answer_as_the_whole() {
        for text in ["hello there", "use clock"] {
            let whole = whole(&ask(text));
            let body = ask(text).to_string();
            let chunks: Vec<Value> = stream(body.as_bytes()).unwrap().collect();
            let text_of_chunks: String = chunks
                .iter()
                .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str())
                .collect();
            let message = &whole["choices"][0]["message"];
            assert_eq!(
                text_of_chunks,
                message["content"].as_str().unwrap_or_default()
            );
            let finish = &chunks[chunks.len() - 2]["choices"][0]["finish_reason"];
            assert_eq!(finish, &whole["choices"][0]["finish_reason"]);
            assert!(chunks.last().unwrap()["usage"]["prompt_tokens"].is_number());
        }
    }
}
