//! The vocabulary: no type and no file has a name of the old dialect. docs/development/names.md has what to say instead.

use std::path::Path;

use super::docs::markdown::Page;
use crate::support::servers::cluster::project;
use Form::{Anywhere, WholeName};

/// Where a word is forbidden.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// As a name, and as a part of one.
    Anywhere,
    /// As a name alone: as a part it can be plain English.
    WholeName,
}

/// A word, and where it is forbidden.
const FORBIDDEN: [(&str, Form); 34] = [
    ("account", Anywhere),
    ("acting", Anywhere),
    ("anew", Anywhere),
    ("asked", Anywhere),
    ("asker", Anywhere),
    ("became", Anywhere),
    ("called", WholeName),
    ("claimed", WholeName),
    ("found", WholeName),
    ("heard", Anywhere),
    ("held", WholeName),
    ("joining", Anywhere),
    ("judge", Anywhere),
    ("judged", Anywhere),
    ("known", WholeName),
    ("need", WholeName),
    ("newest", WholeName),
    ("parting", Anywhere),
    ("past", Anywhere),
    ("person", WholeName),
    ("place", Anywhere),
    ("poke", Anywhere),
    ("reach", WholeName),
    ("said", Anywhere),
    ("shown", Anywhere),
    ("speaker", Anywhere),
    ("taken", Anywhere),
    ("telling", Anywhere),
    ("told", Anywhere),
    ("viewer", Anywhere),
    ("vouched", Anywhere),
    ("watching", WholeName),
    ("whoever", Anywhere),
    ("wrote", Anywhere),
];

/// The forbidden word in a name, given as its words in lower case.
fn forbidden(words: &[String]) -> Option<&'static str> {
    let is_in = |word: &str, reach: Form| match reach {
        Anywhere => words
            .iter()
            .any(|part| part == word || *part == format!("{word}s")),
        WholeName => words == [word],
    };
    let found = FORBIDDEN.iter().find(|(word, reach)| is_in(word, *reach));
    found.map(|(word, _)| *word)
}

/// `TurnLease` as `turn`, `lease`.
fn camel_words(name: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    for c in name.chars() {
        match words.last_mut() {
            Some(word) if !c.is_uppercase() => word.push(c),
            Some(_) | None => words.push(c.to_lowercase().collect()),
        }
    }
    words
}

/// The names of the types that a file defines.
fn types(code: &str) -> Vec<&str> {
    let mut names = Vec::new();
    for line in code.lines() {
        let mut words = line
            .split_whitespace()
            .skip_while(|word| word.starts_with("pub"));
        if let (Some("struct" | "enum" | "trait" | "type" | "union"), Some(name)) =
            (words.next(), words.next())
        {
            let end = name
                .find(|c: char| !c.is_alphanumeric())
                .unwrap_or(name.len());
            names.push(&name[..end]);
        }
    }
    names
}

fn violations(dir: &Path, found: &mut Vec<String>, seen: &mut usize) {
    for entry in std::fs::read_dir(dir).unwrap().flatten() {
        let path = entry.path();
        let stem = path.file_stem().unwrap().to_string_lossy().into_owned();
        let shown = path.strip_prefix(project()).unwrap().display().to_string();
        let words: Vec<String> = stem.split('_').map(str::to_owned).collect();
        found.extend(forbidden(&words).map(|word| format!("{shown}: {word}")));
        if path.is_dir() {
            violations(&path, found, seen);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let code = std::fs::read_to_string(&path).unwrap();
            for name in types(&code) {
                *seen += 1;
                let word = forbidden(&camel_words(name));
                found.extend(word.map(|_| format!("{shown}: {name}")));
            }
        }
    }
}

#[test]
fn no_type_and_no_file_has_a_forbidden_name() {
    let mut found = Vec::new();
    let mut seen = 0;
    for dir in ["src", "tests", "benches"] {
        violations(&project().join(dir), &mut found, &mut seen);
    }
    assert!(seen > 500, "saw only {seen} types");
    assert!(
        found.is_empty(),
        "docs/development/names.md has better words for these:\n{}",
        found.join("\n")
    );
}

#[test]
fn the_page_of_names_has_every_forbidden_word() {
    let page = Page::read("docs/development/names.md");
    let listed: Vec<&str> = page
        .text
        .lines()
        .filter_map(|row| row.strip_prefix('|')?.split('|').nth(2))
        .flat_map(|cell| cell.split('`').skip(1).step_by(2))
        .collect();
    let missing: Vec<&str> = FORBIDDEN
        .iter()
        .map(|(word, _)| *word)
        .filter(|word| !listed.contains(word))
        .collect();
    assert!(
        missing.is_empty(),
        "not in the third column of names.md: {missing:?}"
    );
}

#[test]
fn forbidden_names_are_noticed() {
    let types = types(
        "pub(crate) struct Told {\n    enum KnownId<T> {\npub type PlaceOf = u8;\n// a type Told\n",
    );
    assert_eq!(types, ["Told", "KnownId", "PlaceOf"]);
    for (name, is_forbidden) in [
        ("Told", true),
        ("ToldReset", true),
        ("KnownId", false),
        ("Known", true),
        ("Placement", false),
    ] {
        assert_eq!(
            forbidden(&camel_words(name)).is_some(),
            is_forbidden,
            "{name}"
        );
    }
}
