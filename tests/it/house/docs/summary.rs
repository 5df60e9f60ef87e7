//! The contents of the book: every page of docs/ is in SUMMARY.md, and it names no other.

use std::collections::BTreeSet;

use super::markdown::{Page, links, pages_below};

#[test]
fn the_summary_has_every_page_and_no_other() {
    let summary = Page::read("docs/SUMMARY.md");
    let listed: BTreeSet<String> = links(&summary.text)
        .iter()
        .map(|link| format!("docs/{}", link.trim_start_matches("./")))
        .collect();
    let pages: BTreeSet<String> = pages_below("docs")
        .iter()
        .map(Page::name)
        .filter(|name| name != "docs/SUMMARY.md")
        .collect();
    let missing: Vec<&String> = pages.difference(&listed).collect();
    let unknown: Vec<&String> = listed.difference(&pages).collect();
    assert!(missing.is_empty(), "not in docs/SUMMARY.md: {missing:?}");
    assert!(
        unknown.is_empty(),
        "in docs/SUMMARY.md, but no page: {unknown:?}"
    );
}
