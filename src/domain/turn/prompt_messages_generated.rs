//! Generated transcripts: legal and whole, before and after compressions, and each request the beginning of the next.

use proptest::prelude::*;

use super::*;

/// A step of a generated transcript.
#[derive(Debug, Clone)]
enum Step {
    Row(&'static str),
    Empty(&'static str),
    Image,
    Named(u8),
    Calls {
        count: usize,
        has_text: bool,
    },
    /// Of a call in any earlier group, or of none.
    Result(usize),
    /// A whole group: every call but one in so many has its result, and a note is among them.
    Group {
        count: usize,
        open_each: usize,
        has_note: bool,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let texts = vec![
        "user",
        "assistant",
        "system",
        "summary",
        "handoff",
        "notice",
    ];
    prop_oneof![
        12 => prop::sample::select(texts).prop_map(Step::Row),
        6 => Just(Step::Row("user")),
        6 => Just(Step::Row("assistant")),
        1 => prop::sample::select(vec!["user", "assistant"]).prop_map(Step::Empty),
        2 => Just(Step::Image),
        2 => (0..3u8).prop_map(Step::Named),
        3 => (1..4usize, any::<bool>())
            .prop_map(|(count, has_text)| Step::Calls { count, has_text }),
        6 => (0..4usize).prop_map(Step::Result),
        3 => (1..6usize, 1..9usize, any::<bool>()).prop_map(|(count, open_each, has_note)| {
            Step::Group { count, open_each, has_note }
        }),
        1 => (100..400usize, 50..500usize, any::<bool>()).prop_map(|(count, open_each, has_note)| {
            Step::Group { count, open_each, has_note }
        }),
    ]
}

/// The rows of the steps. The text of each names its number, and that of a result the number of its group.
fn rows_of(steps: &[Step]) -> Vec<Value> {
    let mut rows: Vec<Value> = Vec::new();
    let mut group = 0;
    let ids = |count: usize| (0..count).map(|n| format!("call_{n}")).collect::<Vec<_>>();
    let marked = |rows: &Vec<Value>| format!("@m{};", rows.len());
    let call_row = |rows: &Vec<Value>, count: usize, has_text: bool| {
        let text = has_text.then(|| marked(rows));
        let ids = ids(count);
        let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
        let mut row = calls(json!(text), &ids);
        for call in row["tool_calls"].as_array_mut().unwrap() {
            call["function"]["arguments"] = json!(format!("@g{};", rows.len()));
        }
        row
    };
    for step in steps {
        let text = marked(&rows);
        match *step {
            Step::Row(author) => rows.push(row(author, json!(text))),
            Step::Empty(author) => rows.push(row(author, json!(""))),
            Step::Image => {
                let image = json!({"type": "image_url", "image_url": {"url": "data:,"}});
                rows.push(row("user", json!([{"type": "text", "text": text}, image])));
            }
            Step::Named(n) => {
                let mut named = row("user", json!(text));
                named["extra"] = json!({ "name": format!("ada_{n}") });
                rows.push(named);
            }
            Step::Calls { count, has_text } => {
                group = rows.len();
                rows.push(call_row(&rows, count, has_text));
            }
            Step::Result(n) => {
                rows.push(result(&format!("call_{n}"), &format!("of @g{group};")));
            }
            Step::Group {
                count,
                open_each,
                has_note,
            } => {
                group = rows.len();
                rows.push(call_row(&rows, count, false));
                for n in (0..count).filter(|n| (n + 1) % open_each != 0) {
                    if has_note && n == count / 2 {
                        rows.push(row("notice", json!(marked(&rows))));
                    }
                    rows.push(result(&format!("call_{n}"), &format!("of @g{group};")));
                }
            }
        }
    }
    rows
}

/// The numbers of the marks with a letter, as `@m12;`, in the order of a text.
fn numbers(text: &str, letter: char) -> Vec<usize> {
    let marks = text.split('@').skip(1);
    let numbers = marks.filter_map(|mark| {
        let (number, _) = mark.strip_prefix(letter)?.split_once(';')?;
        number.parse().ok()
    });
    numbers.collect()
}

/// Every text is there once, and results stand with their own calls.
fn lost(rows: &[Value], messages: &[Value]) -> Option<String> {
    let text_of = |value: &[Value]| json!(value).to_string();
    let expected = numbers(&text_of(rows), 'm');
    let rendered = numbers(&text_of(messages), 'm');
    let mut sorted = rendered.clone();
    sorted.sort_unstable();
    let mut first = expected.clone();
    first.sort_unstable();
    if sorted != first {
        return Some(format!("{expected:?} became {rendered:?}"));
    }
    // Only notes among results are moved, behind their group.
    let is_own = |row: &&Value| row["kind"] == "normal" && row["role"] != "system";
    let own: Vec<Value> = rows.iter().filter(is_own).cloned().collect();
    let own = numbers(&text_of(&own), 'm');
    if !rendered
        .iter()
        .filter(|number| own.contains(number))
        .is_sorted()
    {
        return Some(format!("moved: {rendered:?}"));
    }
    let mut group = Vec::new();
    for message in messages {
        if let Some(calls) = message.get("tool_calls") {
            group = numbers(&calls[0].to_string(), 'g');
        }
        let of = numbers(&message["content"].to_string(), 'g');
        if message["role"] == "tool" && !of.is_empty() && of != group {
            return Some(format!("{message} is in the group {group:?}"));
        }
    }
    None
}

/// Whether a model is asked after these rows: a user wrote last, or the last call has its result.
fn is_request(rows: &[Value]) -> bool {
    let Some(last) = rows.last() else {
        return false;
    };
    let is_note = |row: &&Value| row["kind"] != "normal" || row["role"] == "system";
    let end = rows.iter().rev().filter(|row| !is_note(row));
    let results: Vec<&Value> = end
        .clone()
        .take_while(|row| row["role"] == "tool")
        .collect();
    let before = end.clone().nth(results.len());
    match (last["role"].as_str(), before) {
        (Some("user"), _) => last["kind"] == "normal",
        (Some("tool"), Some(before)) => {
            let calls = before["tool_calls"].as_array();
            let has_result = |call: &Value| {
                let answers = |row: &&Value| row["tool_call_id"] == call["id"];
                results.iter().any(answers)
            };
            calls.is_some_and(|calls| calls.len() <= results.len() && calls.iter().all(has_result))
        }
        _ => false,
    }
}

/// All texts of a content, as merging joins them.
fn joined(message: &Value) -> String {
    let content = &message["content"];
    match content.as_str() {
        Some(text) => text.to_owned(),
        None => display_text(content).replace('\n', "\n\n"),
    }
}

fn is_prefix(before: &[Value], after: &[Value]) -> bool {
    let Some((last, stable)) = before.split_last() else {
        return true;
    };
    let Some(next) = after.get(before.len() - 1) else {
        return false;
    };
    let is_extended = || {
        // The names of several authors stand in the text.
        let is_labelled = joined(next).contains("[from ");
        let texts = (
            joined(last).replace("\n\n", "\n"),
            joined(next).replace("\n\n", "\n"),
        );
        last["role"] == "user"
            && next["role"] == "user"
            && (is_labelled || texts.1.starts_with(&texts.0))
    };
    after.starts_with(stable) && (last == next || is_extended())
}

proptest! {
    #[test]
    fn every_transcript_is_legal_and_whole(steps in prop::collection::vec(step(), 0..30)) {
        let rows = rows_of(&steps);
        let messages = render_with("Be brief.", Some("In French."), &rows);
        prop_assert_eq!(illegal(&messages), None);
        prop_assert_eq!(lost(&rows, &messages), None);
        prop_assert_eq!(messages, render_with("Be brief.", Some("In French."), &rows));
    }

    #[test]
    fn a_summary_in_place_of_any_beginning_is_legal(
        steps in prop::collection::vec(step(), 1..20),
        cuts in prop::collection::vec(1..100usize, 1..6),
    ) {
        let mut rows = rows_of(&steps);
        let head = rows.iter().take_while(|row| row["role"] == "system" && row["kind"] == "normal");
        let head: Vec<Value> = head.cloned().collect();
        for (round, cut) in cuts.into_iter().enumerate() {
            let start = (head.len() + cut).min(rows.len());
            let summary = row("summary", json!(format!("@s{round};")));
            rows = [head.clone(), vec![summary], rows.split_off(start)].concat();
            let messages = render(&rows);
            prop_assert_eq!(illegal(&messages), None);
            prop_assert_eq!(numbers(&json!(messages).to_string(), 's'), [round]);
            prop_assert_eq!(lost(&rows, &messages), None);
        }
    }

    #[test]
    fn a_request_is_a_prefix_of_the_next_one(steps in prop::collection::vec(step(), 0..16)) {
        let rows = rows_of(&steps);
        let mut before = Vec::new();
        for end in (1..=rows.len()).filter(|end| is_request(&rows[..*end])) {
            let after = render_with("Be brief.", None, &rows[..end]);
            prop_assert!(
                is_prefix(&before, &after),
                "{} became {}",
                json!(before),
                json!(after)
            );
            before = after;
        }
    }
}
