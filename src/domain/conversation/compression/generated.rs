//! Transcripts for tests: written by hand, and generated.

use proptest::prelude::*;

use super::budget::Budget;
use super::outline::Outline;
use crate::domain::conversation::message::{MessageKind, Role};
use crate::domain::tenant::agent::AgentSpec;

/// With the default settings: threshold 0.5, tail 0.2.
pub fn budget_of(window: u32, fixed: i64) -> Budget {
    let mut spec = AgentSpec::demo();
    spec.context_window = window;
    Budget::new(&spec, fixed, None)
}

/// `u`, `a`, `s`: user, assistant, system; `c` calls a tool, `c2` two, `r` is a result; `S` is a summary, `n` a
/// notice, `N` one that calls; `U` and `R` have an image. `u=900` has its own size.
pub fn outlines(text: &str, tokens: i32) -> Vec<Outline> {
    let words = text.split_whitespace().zip(1..);
    let outline = |(word, seq): (&str, i64)| {
        let (word, tokens) = match word.split_once('=') {
            Some((word, tokens)) => (word, tokens.parse().unwrap()),
            None => (word, tokens),
        };
        let (role, kind) = match &word[..1] {
            "u" | "U" => (Role::User, MessageKind::Normal),
            "S" => (Role::User, MessageKind::Summary),
            "s" => (Role::System, MessageKind::Normal),
            "r" | "R" => (Role::Tool, MessageKind::Normal),
            "n" | "N" => (Role::Assistant, MessageKind::Notice),
            _ => (Role::Assistant, MessageKind::Normal),
        };
        let calls = match word {
            "c" | "N" => 1,
            _ => word
                .strip_prefix('c')
                .map_or(0, |calls| calls.parse().unwrap()),
        };
        Outline {
            seq,
            tokens,
            role,
            kind,
            calls,
            has_image: matches!(word, "U" | "R"),
        }
    };
    words.map(outline).collect()
}

/// A message, with the ids that a plan does not see.
#[derive(Debug, Clone)]
pub struct TestMessage {
    pub outline: Outline,
    pub call_ids: Vec<usize>,
    pub result_id: Option<usize>,
}

impl TestMessage {
    pub fn new(role: Role, kind: MessageKind, tokens: i32) -> Self {
        Self {
            outline: Outline {
                seq: 0,
                tokens,
                role,
                kind,
                calls: 0,
                has_image: false,
            },
            call_ids: Vec::new(),
            result_id: None,
        }
    }

    fn with_image(mut self, has_image: bool) -> Self {
        self.outline.has_image = has_image;
        self
    }
}

pub fn numbered(messages: Vec<TestMessage>) -> Vec<TestMessage> {
    let mut messages = messages;
    for (message, seq) in messages.iter_mut().zip(1..) {
        message.outline.seq = seq;
    }
    messages
}

pub fn outlines_of(messages: &[TestMessage]) -> Vec<Outline> {
    messages.iter().map(|message| message.outline).collect()
}

/// Mostly small, sometimes bulky, rarely larger than any window.
fn tokens() -> impl Strategy<Value = i32> {
    prop_oneof![20 => 0..300, 4 => 300..5000, 1 => 100_000..300_000]
}

/// A call, its results and what stands between them. Ids begin at 0 in each answer.
fn group() -> impl Strategy<Value = Vec<TestMessage>> {
    let calls = prop_oneof![10 => 1_usize..4, 1 => Just(200)];
    let result = (tokens(), prop::bool::weighted(0.1), 0..10);
    let results = prop::collection::vec(result, 0..5);
    (
        calls,
        tokens(),
        results,
        prop_oneof![5 => Just(1), 1 => Just(100)],
    )
        .prop_map(|(calls, size, results, repeats)| {
            let mut caller = TestMessage::new(Role::Assistant, MessageKind::Normal, size);
            caller.outline.calls = u8::try_from(calls).unwrap();
            caller.call_ids = (0..calls).collect();
            let mut messages = vec![caller];
            let all = std::iter::repeat_n(results, repeats).flatten();
            for (index, (size, has_image, between)) in all.enumerate() {
                match between {
                    0 => messages.push(TestMessage::new(Role::Assistant, MessageKind::Notice, 9)),
                    1 => messages.push(TestMessage::new(Role::User, MessageKind::Notice, 9)),
                    2 => messages.push(TestMessage::new(Role::User, MessageKind::Normal, 9)),
                    _ => {}
                }
                let message = TestMessage::new(Role::Tool, MessageKind::Normal, size);
                let mut message = message.with_image(has_image);
                message.result_id = Some(index % calls);
                messages.push(message);
            }
            messages
        })
}

fn one(role: Role, kind: MessageKind) -> impl Strategy<Value = Vec<TestMessage>> {
    let message = (tokens(), prop::bool::weighted(0.1));
    message.prop_map(move |(tokens, has_image)| {
        let has_image = has_image && role == Role::User && kind == MessageKind::Normal;
        vec![TestMessage::new(role, kind, tokens).with_image(has_image)]
    })
}

pub fn messages(most: usize) -> impl Strategy<Value = Vec<TestMessage>> {
    let part = prop_oneof![
        5 => one(Role::User, MessageKind::Normal),
        5 => one(Role::Assistant, MessageKind::Normal),
        5 => group(),
        1 => one(Role::System, MessageKind::Normal),
        1 => one(Role::Assistant, MessageKind::Notice),
        1 => one(Role::User, MessageKind::Handoff),
    ];
    prop::collection::vec(part, 0..most).prop_map(|parts| parts.into_iter().flatten().collect())
}

/// Rules at the beginning, perhaps a summary, and the rest.
pub fn transcripts() -> impl Strategy<Value = Vec<TestMessage>> {
    let head = prop::collection::vec(one(Role::System, MessageKind::Normal), 0..3);
    let summary = prop::collection::vec(one(Role::User, MessageKind::Summary), 0..2);
    (head, summary, messages(40)).prop_map(|(head, summary, rest)| {
        let beginning = head.into_iter().chain(summary).flatten();
        numbered(beginning.chain(rest).collect())
    })
}
