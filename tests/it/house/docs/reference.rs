//! The tables of docs/reference: each stands between `<!-- generated: NAME -->` and `<!-- end -->`, and says what the
//! code says. `make docs` writes them.

use throughline::config::variables::{self, DefaultValue, Variable};
use throughline::domain::bridge::command;
use throughline::domain::tenant::limits;
use throughline::domain::turn::{StopReason, event};
use throughline::error::Code;
use throughline::telemetry::metrics::{self, Kind};

use super::markdown::{Page, pages_below};
use crate::support::servers::cluster::project;

const BEGIN: &str = "<!-- generated: ";
const END: &str = "<!-- end -->";

/// Each table by its name.
fn tables() -> Vec<(&'static str, String)> {
    vec![
        ("variables", variables()),
        ("errors", errors()),
        ("events", events()),
        ("stop reasons", stop_reasons()),
        ("limits", limits()),
        ("slash commands", slash_commands()),
        ("metrics", metrics()),
        ("buckets", buckets()),
    ]
}

fn table(head: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut text = format!("| {} |\n|{}\n", head.join(" | "), "---|".repeat(head.len()));
    for row in rows {
        let cells: Vec<String> = row
            .iter()
            .map(|cell| cell.trim().replace('|', "\\|"))
            .collect();
        text.push_str(&format!("| {} |\n", cells.join(" | ")));
    }
    text
}

fn code(text: &str) -> String {
    format!("`{text}`")
}

fn list(words: &[&str]) -> String {
    let words: Vec<String> = words.iter().map(|word| code(word)).collect();
    words.join(", ")
}

fn variables() -> String {
    let row = |variable: &Variable| {
        let default = match variable.default {
            DefaultValue::Required => "required".to_owned(),
            DefaultValue::Unset => "not set".to_owned(),
            DefaultValue::Text(text) => code(text),
            DefaultValue::Computed(text) => text.to_owned(),
        };
        let in_dev = variable.in_dev.map(|text| format!("; `{text}` in `dev`"));
        vec![
            code(variable.name),
            format!("{default}{}", in_dev.unwrap_or_default()),
            variable.meaning.to_owned(),
            variable.scope.commands().to_owned(),
        ]
    };
    let head = ["variable", "default", "meaning", "read by"];
    table(&head, variables::ALL.iter().map(row))
}

fn errors() -> String {
    let row = |error: &Code| {
        let retry = if error.retry_helps() { "yes" } else { "no" };
        vec![
            code(error.as_str()),
            error.status().to_string(),
            error.title().to_owned(),
            error.when().to_owned(),
            retry.to_owned(),
        ]
    };
    let head = ["code", "status", "title", "when", "retry"];
    table(&head, Code::ALL.iter().map(row))
}

fn events() -> String {
    let row =
        |kind: &event::Kind| vec![code(kind.name), list(kind.members), kind.meaning.to_owned()];
    let head = ["event", "members", "meaning"];
    table(&head, event::KINDS.iter().map(row))
}

fn stop_reasons() -> String {
    let row = |reason: &StopReason| {
        let end = event::of_end(reason.state());
        vec![code(reason.as_str()), code(end)]
    };
    table(&["reason", "event"], StopReason::ALL.iter().map(row))
}

fn limits() -> String {
    let row = |limit: &limits::Limit| {
        vec![
            code(limit.name),
            limit.default.to_string(),
            format!("{} to {}", limit.min, limit.max),
            limit.unit.to_owned(),
            limit.meaning.to_owned(),
        ]
    };
    let head = ["limit", "default", "range", "unit", "what counts"];
    table(&head, limits::ALL.iter().map(row))
}

fn slash_commands() -> String {
    let row = |row: &command::SlashCommand| {
        let typed = format!("/{} {}", row.name, row.argument);
        let place = match command::parse(&format!("/{} {}", row.name, row.argument)) {
            command::ParsedText::Command(command) if command.is_private() => "direct chats only",
            command::ParsedText::Command(_) => "everywhere",
            command::ParsedText::Text(_) => panic!("/{} is no command", row.name),
        };
        let help = row
            .help
            .unwrap_or("reserved: answers that it is not available yet");
        vec![code(typed.trim()), place.to_owned(), help.to_owned()]
    };
    let head = ["command", "where", "what it does"];
    table(&head, command::COMMANDS.iter().map(row))
}

fn metrics() -> String {
    let row = |metric: &metrics::Metric| {
        let kind = match metric.kind {
            Kind::Counter => "counter",
            Kind::Seconds => "histogram, seconds",
        };
        vec![
            code(metric.name),
            kind.to_owned(),
            list(metric.labels),
            metric.meaning.to_owned(),
        ]
    };
    let head = ["metric", "type", "labels", "meaning"];
    table(&head, metrics::ALL.iter().map(row))
}

fn buckets() -> String {
    let bounds: Vec<String> = metrics::BUCKETS.iter().map(f64::to_string).collect();
    format!("{}\n", bounds.join(", "))
}

/// The page with the present tables, and the names of those that it has.
fn with_tables(page: &Page, tables: &[(&'static str, String)]) -> (String, Vec<&'static str>) {
    let mut text = String::new();
    let mut names = Vec::new();
    let mut rest = page.text.as_str();
    while let Some((before, after)) = rest.split_once(BEGIN) {
        let (name, after) = after.split_once(" -->").unwrap();
        let (_, after) = after
            .split_once(END)
            .unwrap_or_else(|| panic!("{}: {name} has no end", page.name()));
        let (name, table) = tables
            .iter()
            .find(|(known, _)| *known == name)
            .unwrap_or_else(|| panic!("{}: no table {name}", page.name()));
        text.push_str(&format!("{before}{BEGIN}{name} -->\n\n{table}\n{END}"));
        names.push(*name);
        rest = after;
    }
    text.push_str(rest);
    (text, names)
}

#[test]
fn the_tables_are_those_of_the_code() {
    let tables = tables();
    let mut seen = Vec::new();
    for page in pages_below("docs/reference") {
        let (text, names) = with_tables(&page, &tables);
        assert!(
            text == page.text,
            "{} is not up to date: run make docs",
            page.name()
        );
        seen.extend(names);
    }
    let mut expected: Vec<&str> = tables.iter().map(|(name, _)| *name).collect();
    seen.sort_unstable();
    expected.sort_unstable();
    assert_eq!(seen, expected, "each table stands on one page");
}

#[test]
fn a_table_that_is_not_up_to_date_is_replaced() {
    let page = Page {
        path: "x.md".into(),
        text: "a\n<!-- generated: errors -->\nold\n<!-- end -->\nb\n".to_owned(),
    };
    let (text, names) = with_tables(&page, &[("errors", "new\n".to_owned())]);
    assert_eq!(
        text,
        "a\n<!-- generated: errors -->\n\nnew\n\n<!-- end -->\nb\n"
    );
    assert_eq!(names, ["errors"]);
}

/// An event is a text of the form `turn.started`; each in the code has its row.
#[test]
fn every_kind_of_event_in_the_code_has_its_row() {
    let known = |text: &str| event::KINDS.iter().any(|kind| kind.name == text);
    for file in [
        "domain/turn/event.rs",
        "turns/stream.rs",
        "store/turn/events.rs",
    ] {
        let text = std::fs::read_to_string(project().join("src").join(file)).unwrap();
        for literal in text.split('"').skip(1).step_by(2) {
            let is_kind = ["turn.", "message."]
                .iter()
                .any(|start| literal.starts_with(start));
            assert!(
                !is_kind || literal.contains(' ') || known(literal),
                "{literal}"
            );
        }
    }
}

/// Not a test: what `make docs` runs.
#[test]
#[ignore = "writes docs/reference; run by make docs"]
fn write() {
    let tables = tables();
    for page in pages_below("docs/reference") {
        let (text, _) = with_tables(&page, &tables);
        if text != page.text {
            std::fs::write(project().join(&page.path), text).unwrap();
            println!("{} written", page.name());
        }
    }
}
