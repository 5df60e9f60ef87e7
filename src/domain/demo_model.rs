//! The demo model: answers deterministically, says that it is the demo model, and calls a tool when it is
//! told to (`use <tool> {json}`). For a first try without a key, and for tests of everything around a model.

use serde_json::{Value, json};

use crate::domain::completion::{TokenUsage, text_of};

/// What it says, or the call that it makes.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Reply {
    Say(String),
    Call { tool: String, arguments: String },
}

/// Its whole answer to a request, in OpenAI's shape.
pub fn complete(request: &Value) -> Value {
    let messages = list(request, "messages");
    let (message, finish) = match reply(messages, list(request, "tools")) {
        Reply::Say(text) => (json!({"role": "assistant", "content": text}), "stop"),
        Reply::Call { tool, arguments } => {
            let call = call(messages, &tool, &arguments);
            let message = json!({"role": "assistant", "content": null, "tool_calls": [call]});
            (message, "tool_calls")
        }
    };
    let usage = usage(messages, &message);
    json!({
        "id": "chatcmpl-demo", "object": "chat.completion", "created": 0, "model": "demo",
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": usage,
    })
}

/// The same in chunks, a word in each.
pub fn stream(request: &Value) -> Vec<Value> {
    let messages = list(request, "messages");
    let mut deltas = vec![json!({"role": "assistant", "content": ""})];
    let (message, finish) = match reply(messages, list(request, "tools")) {
        Reply::Say(text) => {
            let words = text
                .split_inclusive(' ')
                .map(|word| json!({ "content": word }));
            deltas.extend(words);
            (json!({ "content": text }), "stop")
        }
        Reply::Call { tool, arguments } => {
            let mut call = call(messages, &tool, &arguments);
            call["index"] = json!(0);
            deltas.push(json!({ "tool_calls": [call] }));
            (call, "tool_calls")
        }
    };
    let chunk = |choices: Value, usage: Value| {
        json!({
            "id": "chatcmpl-demo", "object": "chat.completion.chunk", "created": 0, "model": "demo",
            "choices": choices, "usage": usage,
        })
    };
    let choice = |delta: Value, finish: Value| {
        let choice = json!({"index": 0, "delta": delta, "finish_reason": finish});
        chunk(json!([choice]), Value::Null)
    };
    let mut chunks: Vec<Value> = deltas
        .into_iter()
        .map(|delta| choice(delta, Value::Null))
        .collect();
    chunks.push(choice(json!({}), json!(finish)));
    chunks.push(chunk(json!([]), usage(messages, &message)));
    chunks
}

fn list<'a>(request: &'a Value, member: &str) -> &'a [Value] {
    request[member].as_array().map_or(&[], Vec::as_slice)
}

fn call(messages: &[Value], tool: &str, arguments: &str) -> Value {
    json!({
        "id": format!("call_demo_{}", messages.len()), "type": "function",
        "function": {"name": tool, "arguments": arguments},
    })
}

fn usage(messages: &[Value], message: &Value) -> Value {
    let TokenUsage { input, output, .. } =
        TokenUsage::estimate(messages, message.to_string().len());
    json!({"prompt_tokens": input, "completion_tokens": output, "total_tokens": input + output})
}

fn reply(messages: &[Value], tools: &[Value]) -> Reply {
    let Some(last) = messages.last() else {
        return Reply::Say("This is the demo model.".to_owned());
    };
    let text = text_of(last);
    if last["role"] == "tool" {
        return Reply::Say(format!("This is the demo model. The tool answered: {text}"));
    }
    if let Some((tool, arguments)) = asked_tool(&text) {
        let known = tools.iter().any(|one| one["function"]["name"] == tool);
        return match known {
            true => Reply::Call {
                tool: tool.to_owned(),
                arguments,
            },
            false => Reply::Say(format!("This is the demo model. It has no tool {tool}.")),
        };
    }
    let said = messages.iter().filter(|message| message["role"] == "user");
    let said = said.count();
    Reply::Say(format!(
        "This is the demo model. You said: {text} (your message {said} here)"
    ))
}

/// `use <tool> {json}`; without arguments they are empty.
fn asked_tool(text: &str) -> Option<(&str, String)> {
    let rest = text.trim().strip_prefix("use ")?.trim_start();
    let (tool, arguments) = rest.split_once(char::is_whitespace).unwrap_or((rest, "{}"));
    let arguments: Value = serde_json::from_str(arguments.trim()).ok()?;
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

    #[test]
    fn it_says_what_it_is_and_the_same_each_time() {
        let answer = complete(&ask("hello"));
        let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
        assert!(text.contains("demo model") && text.contains("hello"));
        assert_eq!(complete(&ask("hello")), answer);
        let parts = json!([{"type": "text", "text": "in"}, {"type": "text", "text": "parts"}]);
        let parts = complete(&json!({"messages": [{"role": "user", "content": parts}]}));
        assert!(
            parts["choices"][0]["message"]["content"]
                .as_str()
                .unwrap()
                .contains("in parts")
        );
    }

    #[test]
    fn it_calls_a_tool_that_it_has_when_told_to() {
        let answer = complete(&ask(r#"use clock {"zone": "UTC"}"#));
        let call = &answer["choices"][0]["message"]["tool_calls"][0]["function"];
        assert_eq!(
            call,
            &json!({"name": "clock", "arguments": r#"{"zone":"UTC"}"#})
        );
        assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls");
        for text in ["use calendar {}", "use clock not json", "use"] {
            let answer = complete(&ask(text));
            assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{text}");
        }
    }

    #[test]
    fn a_stream_says_the_same_as_the_whole() {
        for text in ["hello there", "use clock"] {
            let whole = complete(&ask(text));
            let chunks = stream(&ask(text));
            let said: String = chunks
                .iter()
                .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str())
                .collect();
            let message = &whole["choices"][0]["message"];
            assert_eq!(said, message["content"].as_str().unwrap_or_default());
            let finish = &chunks[chunks.len() - 2]["choices"][0]["finish_reason"];
            assert_eq!(finish, &whole["choices"][0]["finish_reason"]);
            assert!(chunks.last().unwrap()["usage"]["prompt_tokens"].is_number());
        }
    }
}
