//! The log lines that operators watch for: docs/reference/metrics-and-logs.md has every WARN and ERROR line of the
//! code, and no other.

use std::collections::BTreeSet;

use super::markdown::{Page, code_spans};
use crate::support::servers::cluster::project;

/// A level and a message.
type Line = (String, String);

/// Those of the page: rows of tables that begin with a level.
fn documented(page: &str) -> BTreeSet<Line> {
    let mut lines = BTreeSet::new();
    for row in page.lines() {
        let Some(rest) = row.strip_prefix("| ") else {
            continue;
        };
        let (level, rest) = rest.split_once(' ').unwrap();
        if ["WARN", "ERROR"].contains(&level) {
            let message = code_spans(rest)[0].to_owned();
            lines.insert((level.to_owned(), message));
        }
    }
    lines
}

/// Those of the code: the last text in each call of the macros.
fn logged(code: &str) -> BTreeSet<Line> {
    let mut lines = BTreeSet::new();
    for (call, level) in [("tracing::warn!(", "WARN"), ("tracing::error!(", "ERROR")] {
        for part in code.split(call).skip(1) {
            let message = last_text(part).unwrap_or_else(|| panic!("no message in {part}"));
            lines.insert((level.to_owned(), message));
        }
    }
    lines
}

/// The last text before the bracket that ends the call.
fn last_text(call: &str) -> Option<String> {
    let mut last = None;
    let mut open: Option<String> = None;
    let mut depth = 1;
    for c in call.chars() {
        match (&mut open, c) {
            (Some(_), '"') => last = open.take(),
            (Some(text), c) => text.push(c),
            (None, '"') => open = Some(String::new()),
            (None, '(') => depth += 1,
            (None, ')') => depth -= 1,
            (None, _) => {}
        }
        if depth == 0 {
            break;
        }
    }
    last
}

fn code() -> String {
    fn walk(dir: &std::path::Path, code: &mut String) {
        for entry in std::fs::read_dir(dir).unwrap().flatten() {
            let path = entry.path();
            if path.is_dir() {
                walk(&path, code);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(path).unwrap();
                code.push_str(text.split("#[cfg(test)]\nmod tests {").next().unwrap());
            }
        }
    }
    let mut code = String::new();
    walk(&project().join("src"), &mut code);
    code
}

#[test]
fn the_page_has_every_warning_and_error_and_no_other() {
    let page = Page::read("docs/reference/metrics-and-logs.md");
    let documented = documented(&page.text);
    let logged = logged(&code());
    assert!(logged.len() > 20, "saw only {} lines", logged.len());
    let missing: Vec<&Line> = logged.difference(&documented).collect();
    let unknown: Vec<&Line> = documented.difference(&logged).collect();
    assert!(missing.is_empty(), "not on the page: {missing:?}");
    assert!(
        unknown.is_empty(),
        "on the page, but not in src: {unknown:?}"
    );
}

#[test]
fn the_message_is_the_last_text_of_the_call() {
    let code =
        "tracing::warn!(error = format!(\"{e:#}\"), \"a failed\"); tracing::error!(x, \"b (c)\")";
    let line = |level: &str, message: &str| (level.to_owned(), message.to_owned());
    let expected = BTreeSet::from([line("WARN", "a failed"), line("ERROR", "b (c)")]);
    assert_eq!(logged(code), expected);
    assert_eq!(
        documented("| WARN | `a failed` | x |\n| level | `no` |\n"),
        BTreeSet::from([line("WARN", "a failed")])
    );
}
