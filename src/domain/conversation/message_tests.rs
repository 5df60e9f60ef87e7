//! The validation of messages, and their token estimates.

use serde_json::json;

use super::*;

fn message(value: Value) -> NewMessage {
    let member = |name: &str| value.get(name).cloned().unwrap_or(Value::Null);
    NewMessage {
        role: serde_json::from_value(member("role")).unwrap(),
        kind: MessageKind::Normal,
        content: serde_json::from_value(member("content")).unwrap(),
        tool_calls: serde_json::from_value(member("tool_calls")).unwrap(),
        tool_call_id: serde_json::from_value(member("tool_call_id")).unwrap(),
        token_count: serde_json::from_value(member("token_count")).unwrap(),
        extra: None,
    }
}

#[test]
fn the_members_of_each_role_are_validated() {
    let call =
        json!({"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    for (sent, expected) in [
        (json!({"role": "user", "content": "hi"}), None),
        (
            json!({"role": "user", "content": [{"type": "text", "text": "hi"}]}),
            None,
        ),
        (json!({"role": "assistant", "tool_calls": [call]}), None),
        (
            json!({"role": "tool", "tool_call_id": "c1", "content": ""}),
            None,
        ),
        (json!({"role": "user"}), Some("/m/content")),
        (json!({"role": "assistant"}), Some("/m/content")),
        (
            json!({"role": "tool", "content": "x"}),
            Some("/m/tool_call_id"),
        ),
        (
            json!({"role": "user", "content": "x", "tool_call_id": "c1"}),
            Some("/m/tool_call_id"),
        ),
        (
            json!({"role": "user", "content": "x", "tool_calls": [call]}),
            Some("/m/tool_calls"),
        ),
        (
            json!({"role": "assistant", "content": "x", "tool_calls": []}),
            Some("/m/tool_calls"),
        ),
        (
            json!({"role": "assistant", "tool_calls": [call, call]}),
            Some("/m/tool_calls/1"),
        ),
        (
            json!({"role": "user", "content": "x", "token_count": 10_000_001}),
            Some("/m/token_count"),
        ),
    ] {
        let mut errors = Vec::new();
        message(sent.clone()).check("/m", &mut errors);
        let pointer = errors.first().map(|error| error.pointer.as_str());
        assert_eq!(pointer, expected, "{sent}");
    }
}

#[test]
fn content_is_a_text_or_typed_parts() {
    for bad in [
        json!(1),
        json!({}),
        json!([]),
        json!(["x"]),
        json!([{"text": "x"}]),
    ] {
        assert!(
            serde_json::from_value::<Content>(bad.clone()).is_err(),
            "{bad}"
        );
    }
}

#[test]
fn parts_and_tool_calls_are_limited_like_one_text() {
    let half = "x".repeat(MAX_CONTENT_CHARS / 2);
    let part = json!({"type": "text", "text": half});
    let read = |value: Value| serde_json::from_value::<Content>(value);
    assert!(read(json!([part, part])).is_ok());
    assert!(read(json!([part, part, part])).is_err());
    let odd: Vec<Value> = (0..60_000).map(|_| json!({"a": 0})).collect();
    assert!(read(json!([{"type": "x", "odd": odd}])).is_err());
    let image = json!({"url": format!("data:{}", "A".repeat(MAX_CONTENT_CHARS + FRAME_CHARS))});
    assert!(read(json!([{"type": "image_url", "image_url": image}])).is_err());
    let calls = |count: usize| {
        let call = |n: usize| json!({"id": n.to_string(), "type": "function", "function": {"name": "f", "arguments": half}});
        let calls: Vec<Value> = (0..count).map(call).collect();
        let mut errors = Vec::new();
        message(json!({"role": "assistant", "tool_calls": calls})).check("/m", &mut errors);
        errors.len()
    };
    assert_eq!((calls(2), calls(3)), (0, 1));
}

#[test]
fn a_provider_s_own_members_of_a_tool_call_are_kept() {
    let call = json!({"id": "c", "type": "function", "index": 0,
                      "function": {"name": "f", "arguments": "{}", "strict": true}});
    let read: ToolCall = serde_json::from_value(call.clone()).unwrap();
    assert_eq!(serde_json::to_value(read).unwrap(), call);
}

#[test]
fn tokens_are_estimated_unless_they_were_counted() {
    for (sent, tokens) in [
        (json!({"role": "user", "content": ""}), 4),
        (json!({"role": "user", "content": "12345678"}), 6),
        (json!({"role": "user", "content": "一二三"}), 7),
        (
            json!({"role": "user", "content": [{"type": "text", "text": "1234"}]}),
            6,
        ),
        (
            json!({"role": "user", "content": "12345678", "token_count": 99}),
            99,
        ),
    ] {
        assert_eq!(message(sent.clone()).tokens(), tokens, "{sent}");
    }
}
