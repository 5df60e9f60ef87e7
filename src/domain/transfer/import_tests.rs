//! Documents that an import takes, and those that it refuses.

use serde_json::{Value, json};

use super::*;
use crate::error::Code;

fn read(document: Value) -> Result<Import> {
    check(serde_json::from_value(document).unwrap())
}

fn user(seq: i64, text: &str) -> Value {
    json!({"seq": seq, "role": "user", "content": text, "token_count": 10})
}

fn copy(seq: i64, link: i32, of: i64) -> Value {
    json!({"seq": seq, "copied_from": {"link": link, "seq": of}})
}

fn summary(seq: i64) -> Value {
    json!({"seq": seq, "role": "user", "kind": "summary", "content": "s", "token_count": 3})
}

fn first(messages: Value) -> Value {
    json!({"messages": messages})
}

fn later(messages: Value) -> Value {
    let record = json!({"summarised": 1, "kept": 1, "tokens_before": 2, "tokens_after": 1, "model": null,
                        "duration_ms": 0});
    json!({"compression": record, "messages": messages})
}

#[test]
fn a_link_is_counted_as_compression_would_have_made_it() {
    let links = json!([
        first(json!([user(1, "a"), user(2, "b"), user(3, "c")])),
        later(json!([
            copy(1, 0, 1),
            summary(2),
            copy(3, 0, 3),
            user(4, "d")
        ])),
        later(json!([summary(1), copy(2, 1, 3)])),
    ]);
    let import = read(json!({"links": links})).unwrap();
    let counts: Vec<_> = import
        .links
        .iter()
        .map(|link| {
            (
                link.last_seq(),
                link.message_count(),
                link.token_count,
                link.born_seq,
            )
        })
        .collect();
    assert_eq!(counts, [(3, 3, 30, 0), (4, 2, 33, 3), (2, 1, 13, 2)]);
    // A copy of a copy knows the original.
    let original = MessagePosition { link: 0, seq: 3 };
    assert_eq!(
        import.links[2].copies,
        [NewCopy {
            seq: 2,
            from: original
        }]
    );
    assert_eq!(import.restricted_role, None);
}

#[test]
fn what_breaks_a_rule_is_pointed_at() {
    let one = || first(json!([user(1, "a")]));
    for (links, pointer) in [
        (json!([]), "/links"),
        (
            json!([first(json!([user(2, "a")]))]),
            "/links/0/messages/0/seq",
        ),
        (
            json!([first(json!([user(1, "a"), user(1, "b")]))]),
            "/links/0/messages/1/seq",
        ),
        (json!([{"depth": 1, "messages": []}]), "/links/0/depth"),
        (
            json!([{"id": "x".repeat(257), "messages": []}]),
            "/links/0/id",
        ),
        (
            json!([first(json!([{"seq": 1, "content": "a"}]))]),
            "/links/0/messages/0/role",
        ),
        (
            json!([first(json!([{"seq": 1, "role": "user"}]))]),
            "/links/0/messages/0/content",
        ),
        (
            json!([first(json!([copy(1, 0, 1)]))]),
            "/links/0/messages/0/copied_from",
        ),
        (
            json!([later(json!([user(1, "a")]))]),
            "/links/0/compression",
        ),
        (
            json!([one(), first(json!([summary(1)]))]),
            "/links/1/compression",
        ),
        (json!([one(), later(json!([]))]), "/links/1/messages"),
        (
            json!([one(), later(json!([copy(1, 0, 1)]))]),
            "/links/1/messages",
        ),
        (
            json!([one(), later(json!([user(1, "a")]))]),
            "/links/1/messages/0/kind",
        ),
        (
            json!([first(json!([])), later(json!([summary(1)]))]),
            "/links/0/messages",
        ),
        (
            json!([
                one(),
                later(json!([summary(1), user(2, "b"), copy(3, 0, 1)]))
            ]),
            "/links/1/messages/2/copied_from",
        ),
        (
            json!([one(), later(json!([summary(1), copy(2, 0, 2)]))]),
            "/links/1/messages/1/copied_from",
        ),
        (
            json!([one(), later(json!([summary(1), copy(2, 0, 0)]))]),
            "/links/1/messages/1/copied_from",
        ),
        (
            json!([one(), later(json!([summary(1), copy(2, 1, 1)]))]),
            "/links/1/messages/1/copied_from",
        ),
        (
            json!([one(), later(json!([summary(1), copy(2, -1, 1)]))]),
            "/links/1/messages/1/copied_from",
        ),
        (
            json!([
                one(),
                later(
                    json!([summary(1), {"seq": 2, "role": "user", "copied_from": {"link": 0, "seq": 1}}])
                )
            ]),
            "/links/1/messages/1/copied_from",
        ),
    ] {
        let error = read(json!({"links": links})).unwrap_err();
        assert_eq!(error.code, Code::InvalidValue, "{links}");
        assert_eq!(error.errors[0].pointer, pointer, "{links}");
    }
    let error = read(json!({"version": 2, "links": [one()]})).unwrap_err();
    assert_eq!(error.errors[0].pointer, "/version");
}

#[test]
fn no_document_is_too_large_and_no_refusal_too_long() {
    let many: Vec<Value> = (1..=20_001).map(|seq| user(seq, "a")).collect();
    let error = read(json!({"links": [first(json!(many))]})).unwrap_err();
    assert_eq!(error.errors[0].pointer, "/links");
    let wrong: Vec<Value> = (1..=500).map(|_| user(9, "a")).collect();
    let error = read(json!({"links": [first(json!(wrong))]})).unwrap_err();
    assert_eq!(error.errors.len(), MAX_ERRORS);
    let large = "x".repeat(1024 * 1024);
    let mut links = vec![first(json!([user(1, &large), user(2, &large)]))];
    links.extend((0..40).map(|_| later(json!([summary(1), copy(2, 0, 1), copy(3, 0, 2)]))));
    let error = read(json!({ "links": links })).unwrap_err();
    assert_eq!(error.errors[0].pointer, "/links");
    // As many characters as a text and its calls may have, each of four bytes.
    let most = "\u{1F600}".repeat(1024 * 1024);
    let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": most}});
    let message = json!({"seq": 1, "role": "assistant", "content": most, "tool_calls": [call]});
    let error = read(json!({"links": [first(json!([message]))]})).unwrap_err();
    assert_eq!(error.errors[0].pointer, "/links/0/messages/0/content");
}

#[test]
fn what_a_person_does_not_say_is_noticed() {
    for (message, theirs) in [
        (json!({"seq": 1, "role": "user", "content": "x"}), true),
        (
            json!({"seq": 1, "role": "user", "kind": "summary", "content": "x"}),
            true,
        ),
        (
            json!({"seq": 1, "role": "user", "kind": "notice", "content": "x"}),
            false,
        ),
        (
            json!({"seq": 1, "role": "user", "kind": "handoff", "content": "x"}),
            false,
        ),
        (
            json!({"seq": 1, "role": "assistant", "content": "x"}),
            false,
        ),
        (json!({"seq": 1, "role": "system", "content": "x"}), false),
    ] {
        let import = read(json!({"links": [first(json!([message]))]})).unwrap();
        assert_eq!(import.restricted_role.is_none(), theirs, "{message}");
    }
}
