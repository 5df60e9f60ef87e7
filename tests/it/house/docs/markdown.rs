//! Pages, and the parts of Markdown that the tests read: headings, links, blocks of code.

use std::path::{Path, PathBuf};

use crate::support::servers::cluster::project;

/// A Markdown file of the project.
pub struct Page {
    /// From the project's root.
    pub path: PathBuf,
    pub text: String,
}

impl Page {
    pub fn read(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        let text = std::fs::read_to_string(project().join(&path)).unwrap();
        Self { path, text }
    }

    pub fn name(&self) -> String {
        self.path.display().to_string()
    }
}

/// The pages below a directory of the project.
pub fn pages_below(dir: &str) -> Vec<Page> {
    let mut files = Vec::new();
    walk(&project().join(dir), &mut files);
    files.sort();
    let path = |file: &PathBuf| file.strip_prefix(project()).unwrap().to_owned();
    files.iter().map(|file| Page::read(path(file))).collect()
}

fn walk(dir: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            walk(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            files.push(path);
        }
    }
}

/// A fenced block of code.
#[derive(Debug, PartialEq, Eq)]
pub struct Block {
    pub language: String,
    pub code: String,
}

/// The lines outside of fenced blocks, and the blocks.
pub fn split(text: &str) -> (Vec<&str>, Vec<Block>) {
    let mut prose = Vec::new();
    let mut blocks = Vec::new();
    let mut open: Option<(&str, Block)> = None;
    for line in text.lines() {
        let trimmed = line.trim_start();
        let fence = trimmed.len() - trimmed.trim_start_matches('`').len();
        match &mut open {
            Some((mark, _)) if trimmed.trim_end() == *mark => {
                blocks.extend(open.take().map(|(_, block)| block));
            }
            Some((_, block)) => {
                block.code.push_str(line);
                block.code.push('\n');
            }
            None if fence >= 3 => {
                let (mark, language) = trimmed.split_at(fence);
                let language = language.trim().to_owned();
                let code = String::new();
                open = Some((mark, Block { language, code }));
            }
            None => prose.push(line),
        }
    }
    assert!(open.is_none(), "a block of code has no end");
    (prose, blocks)
}

/// Prose without spans of code.
pub fn without_code_spans(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join("``")
}

/// The spans of code of a line.
pub fn code_spans(line: &str) -> Vec<&str> {
    line.split('`').skip(1).step_by(2).collect()
}

/// The anchors of a page: of its headings, and of `<a id="…">`.
pub fn anchors(text: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    for line in split(text).0 {
        let hashes = line.len() - line.trim_start_matches('#').len();
        if (1..=6).contains(&hashes) && line[hashes..].starts_with(' ') {
            let slug = slug(&line[hashes..]);
            let same = |other: &&String| **other == slug || other.starts_with(&format!("{slug}-"));
            let earlier = found.iter().filter(same).count();
            // The second heading of a name has `-1`.
            let is_new = !found.contains(&slug);
            found.push(if is_new {
                slug
            } else {
                format!("{slug}-{earlier}")
            });
        }
        for part in line.split("id=\"").skip(1) {
            found.extend(part.split('"').next().map(str::to_owned));
        }
    }
    found
}

/// The anchor of a heading, as GitHub and mdBook make it.
fn slug(heading: &str) -> String {
    let mut text = String::new();
    let mut rest = heading.trim();
    // Of a link, its text.
    while let Some((before, link)) = rest.split_once('[') {
        let (name, after) = link.split_once(']').unwrap_or((link, ""));
        text.push_str(before);
        text.push_str(name);
        rest = match after.strip_prefix('(') {
            Some(target) => target.split_once(')').map_or("", |(_, after)| after),
            None => after,
        };
    }
    text.push_str(rest);
    text.to_lowercase()
        .chars()
        .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
        .map(|c| if c == ' ' { '-' } else { c })
        .collect()
}

/// The targets of links and pictures, as they are written.
pub fn links(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for line in split(text).0 {
        let line = without_code_spans(line);
        for part in line.split("](").skip(1) {
            let target = part.split([')', ' ']).next().unwrap();
            found.push(target.trim_matches(['<', '>']).to_owned());
        }
        for attribute in ["href=\"", "src=\""] {
            let parts = line.split(attribute).skip(1);
            found.extend(parts.map(|part| part.split('"').next().unwrap().to_owned()));
        }
        let definition = line
            .strip_prefix('[')
            .and_then(|rest| rest.split_once("]: "));
        found.extend(definition.map(|(_, target)| target.trim().to_owned()));
    }
    found
}

#[test]
fn blocks_links_and_anchors_are_found_where_they_are() {
    let text = "# A `b` c!\n[x](y.md#z) and `[no](link)`\n```sh\n[no](link)\n# no\n```\n## [T](u)\n## T\n[r]: s.md\n";
    let (prose, blocks) = split(text);
    assert_eq!(prose.len(), 5);
    let code = "[no](link)\n# no\n".to_owned();
    let language = "sh".to_owned();
    assert_eq!(blocks, [Block { language, code }]);
    assert_eq!(links(text), ["y.md#z", "u", "s.md"]);
    assert_eq!(anchors(text), ["a-b-c", "t", "t-1"]);
}
