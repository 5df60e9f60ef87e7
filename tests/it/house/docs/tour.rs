//! The commands of the documents, run as a reader runs them: each answer that a page shows is given.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::Signal;

use super::markdown::{Block, Page, split};
use crate::support::servers::cluster::{BINARY, scratch_dir};
use crate::support::servers::process::{Process, throughline, wait_for_ready_file};

/// Before the output of each block.
const MARK: &str = "@@ block ";

/// Commands to paste, and the answers that the page shows for them.
struct Step {
    code: String,
    answers: Option<String>,
}

/// The shell blocks of a page, each with the block of answers that follows it, which has this language.
fn steps(page: &Page, language: &str) -> Vec<Step> {
    let blocks = split(&page.text).1;
    let shown = |block: Option<&Block>| {
        let block = block.filter(|block| block.language == language);
        block.map(|block| block.code.clone())
    };
    blocks
        .iter()
        .enumerate()
        .filter(|(_, block)| block.language == "sh")
        .map(|(index, block)| Step {
            code: block.code.clone(),
            answers: shown(blocks.get(index + 1)),
        })
        .collect()
}

/// `dev`, as `make dev` starts it in `dir`.
struct Dev {
    process: Process,
    dir: PathBuf,
}

impl Dev {
    fn start(name: &str) -> Self {
        let dir = scratch_dir(name);
        std::fs::create_dir_all(&dir).unwrap();
        let mut command = throughline(&["dev", "--port", "0"]);
        let mut process = Process::start_logged(command.current_dir(&dir), &dir.join("dev.log"));
        wait_for_ready_file(&mut process, &dir.join(".throughline/ready.json"));
        Self { process, dir }
    }

    /// Runs the steps in one shell, and returns the output of each.
    fn run(&self, steps: &[Step]) -> Vec<String> {
        let mut script = String::new();
        for (number, step) in steps.iter().enumerate() {
            script.push_str(&format!("echo; echo '{MARK}{number}'\n{}", step.code));
        }
        let output = output_of(&script, &self.dir);
        let parts = output.text.split(MARK).skip(1);
        let parts: Vec<String> = parts
            .map(|part| {
                part.split_once('\n')
                    .map_or("", |(_, rest)| rest)
                    .to_owned()
            })
            .collect();
        let last = parts.len().saturating_sub(1);
        assert!(
            output.succeeded && parts.len() == steps.len(),
            "this block failed:\n{}\nits output:\n{}",
            steps[last].code,
            parts.last().map_or("", String::as_str)
        );
        parts
    }
}

impl Drop for Dev {
    fn drop(&mut self) {
        self.process.signal(Signal::SIGTERM);
        self.process.wait(Duration::from_secs(60));
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

struct Output {
    succeeded: bool,
    text: String,
}

fn output_of(script: &str, dir: &Path) -> Output {
    let file = dir.join("output.txt");
    let written = std::fs::File::create(&file).unwrap();
    let status = Command::new("bash")
        .args(["-euo", "pipefail", "-c", script])
        .current_dir(dir)
        // What the pages start with cargo.
        .env("THROUGHLINE", BINARY)
        .stdin(std::process::Stdio::null())
        .stdout(written.try_clone().unwrap())
        .stderr(written)
        .status()
        .unwrap();
    let text = String::from_utf8_lossy(&std::fs::read(&file).unwrap()).into_owned();
    Output {
        succeeded: status.success(),
        text,
    }
}

/// The first answer of the page that the output does not have, each in one line and in their order. An answer goes on
/// in lines that begin with a space.
fn missing_answer(answers: &str, output: &str) -> Option<String> {
    let mut shown: Vec<String> = Vec::new();
    for line in answers.lines() {
        match shown.last_mut() {
            Some(last) if line.starts_with(' ') => {
                last.push('…');
                last.push_str(line);
            }
            Some(_) | None => shown.push(line.to_owned()),
        }
    }
    let mut lines = output.lines();
    shown
        .into_iter()
        .find(|answer| !lines.any(|line| has_members(line, answer)))
}

/// Whether a line has each member of an answer. `…` is anything, and other members may stand between.
fn has_members(line: &str, answer: &str) -> bool {
    let parts = answer.split(['{', '}', '[', ']', ',', '…']);
    parts.into_iter().all(|part| line.contains(part.trim()))
}

fn check(steps: &[Step], outputs: &[String]) {
    let mut checked = 0;
    for (step, output) in steps.iter().zip(outputs) {
        let Some(answers) = &step.answers else {
            continue;
        };
        let missing = missing_answer(answers, output);
        assert!(
            missing.is_none(),
            "the page shows {}\nfor:\n{}\nbut it answered:\n{output}",
            missing.unwrap_or_default(),
            step.code
        );
        checked += 1;
    }
    assert!(checked > 0, "no answer was checked");
}

#[test]
fn the_quick_start_of_the_readme_gives_the_answers_that_it_shows() {
    let mut steps = steps(&Page::read("README.md"), "");
    steps.retain(|step| step.answers.is_some());
    assert_eq!(steps.len(), 1, "the readme has one block with an answer");
    let outputs = Dev::start("quick-start").run(&steps);
    let replies: Vec<&str> = outputs[0].lines().filter(|line| !line.is_empty()).collect();
    // On Slack, the second message of the conversation that began on Telegram.
    assert!(
        replies[0].contains("Argo") && replies[0].contains("message 1"),
        "{replies:?}"
    );
    assert!(replies[3].contains("message 2"), "{replies:?}");
    check(&steps, &outputs);
}

#[test]
fn the_tour_gives_the_answers_that_it_shows() {
    let steps = steps(&Page::read("docs/tour.md"), "json");
    assert!(steps.len() > 15, "the tour has only {} steps", steps.len());
    let outputs = Dev::start("tour").run(&steps);
    let redeemed = |output: &&String| output.contains("\"merged_user_id\"");
    let elsewhere = outputs.iter().find(redeemed).unwrap();
    assert!(elsewhere.contains("\"dry_run\":false"), "{elsewhere}");
    assert!(elsewhere.contains("\"linked\":true"), "{elsewhere}");
    // Of answers that differ each time, what stays.
    for line in [
        "idempotency-replayed: true",
        " entries, ok",
        "ratelimit-policy: ",
    ] {
        assert!(
            outputs.iter().any(|output| output.contains(line)),
            "no {line}"
        );
    }
    check(&steps, &outputs);
}

#[test]
fn a_wrong_answer_and_a_failed_command_are_noticed() {
    let output = "x\n{\"a\":1,\"b\":\"one two\"}\ny\n";
    assert_eq!(
        missing_answer("{\"a\":…,\n \"b\":\"one\n two\"}\ny\n", output),
        None
    );
    assert_eq!(missing_answer("y\nx\n", output).as_deref(), Some("x"));
    assert_eq!(
        missing_answer("{\"b\":2…}\n", output).as_deref(),
        Some("{\"b\":2…}")
    );
    let dir = std::env::temp_dir();
    for (script, succeeds) in [
        ("echo a", true),
        ("false | cat; echo b", false),
        ("echo $none", false),
    ] {
        assert_eq!(output_of(script, &dir).succeeded, succeeds, "{script}");
    }
}
