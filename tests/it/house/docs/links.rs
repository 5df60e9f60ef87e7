//! Every link between the project's documents leads to a file, and to a heading in it.

use std::path::{Component, Path, PathBuf};

use super::markdown::{Page, anchors, links, pages_below};
use crate::support::servers::cluster::project;

fn pages() -> Vec<Page> {
    let mut pages = Vec::new();
    for name in [
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
    ] {
        pages.push(Page::read(name));
    }
    for dir in ["docs", "src", "benches"] {
        pages.extend(pages_below(dir));
    }
    pages
}

/// What is wrong with a link on the page `from`.
fn fault(from: &Path, link: &str) -> Option<String> {
    if link.contains("://") || link.starts_with("mailto:") {
        return None;
    }
    let (file, anchor) = match link.split_once('#') {
        Some((file, anchor)) => (file, Some(anchor)),
        None => (link, None),
    };
    let dir = from.parent().unwrap();
    let target = match file {
        "" => from.to_owned(),
        file => without_dots(&dir.join(file)),
    };
    let path = project().join(&target);
    if file.starts_with('/') || !path.exists() {
        return Some(format!("{}: no file {link}", from.display()));
    }
    let anchor = anchor?;
    let text = std::fs::read_to_string(&path).unwrap_or_default();
    let is_there = anchors(&text).iter().any(|known| known == anchor);
    (!is_there).then(|| format!("{}: no heading {link}", from.display()))
}

fn without_dots(path: &Path) -> PathBuf {
    let mut clean = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => {
                clean.pop();
            }
            Component::CurDir => {}
            Component::Normal(_) | Component::RootDir | Component::Prefix(_) => {
                clean.push(component);
            }
        }
    }
    clean
}

#[test]
fn every_link_leads_somewhere() {
    let mut faults = Vec::new();
    let mut seen = 0;
    for page in pages() {
        for link in links(&page.text) {
            seen += 1;
            faults.extend(fault(&page.path, &link));
        }
    }
    assert!(seen > 10, "saw only {seen} links");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn a_wrong_link_is_noticed() {
    let from = Path::new("docs/reference/errors.md");
    for (link, is_wrong) in [
        ("limits.md", false),
        ("../../README.md", false),
        ("#no-such-heading", true),
        ("limits.md#no-such-heading", true),
        ("nowhere.md", true),
        ("/README.md", true),
        ("https://nowhere.example/#x", false),
    ] {
        assert_eq!(fault(from, link).is_some(), is_wrong, "{link}");
    }
}
