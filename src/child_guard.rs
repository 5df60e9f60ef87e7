//! A child process that cannot outlive us. A small guard process starts the child and holds the other end of a pipe:
//! however we end, SIGKILL included, the pipe closes and the guard stops the child's whole process group. The guard is
//! this program again (`throughline guard`), so nothing has to run between fork and exec.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::Context;
use nix::sys::signal::{SigSet, Signal, killpg};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

/// How long a child may take to stop before its group is killed.
const STOP_GRACE: Duration = Duration::from_secs(10);

/// The unprivileged account of a child when we run as root.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct UnixUser {
    pub uid: u32,
    pub gid: u32,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub enum StopSignal {
    Interrupt,
    Terminate,
}

/// The program to run, and how to stop it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Spec {
    pub program: PathBuf,
    pub args: Vec<String>,
    pub run_as: Option<UnixUser>,
    pub stop_signal: StopSignal,
    /// Standard output and error of the child are appended here.
    pub log: PathBuf,
    /// Held while the child lives: a second guard waits until the first child is gone.
    pub lock: PathBuf,
    /// Removed when the child has ended.
    pub remove: Option<PathBuf>,
}

/// A child behind a guard. Dropping it stops the child without waiting; `stop` waits.
pub struct GuardedChild {
    guard: Child,
    pipe: Option<ChildStdin>,
    pid: u32,
}

impl GuardedChild {
    /// Starts `spec` behind a guard; `guard_program` is this program's own file.
    pub fn start(guard_program: &Path, spec: &Spec) -> anyhow::Result<Self> {
        let mut guard = Command::new(guard_program)
            .arg("guard")
            .arg(serde_json::to_string(spec)?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {}", guard_program.display()))?;
        let pipe = guard.stdin.take();
        let mut line = String::new();
        if let Some(output) = guard.stdout.take() {
            BufReader::new(output).read_line(&mut line)?;
        }
        let pid = line
            .trim()
            .parse()
            .with_context(|| format!("{} did not start", spec.program.display()))?;
        Ok(Self { guard, pipe, pid })
    }

    /// The child's process id, which is also its group's.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether the child, and with it the guard, has ended.
    pub fn has_ended(&mut self) -> bool {
        !matches!(self.guard.try_wait(), Ok(None))
    }

    /// For a guard that has ended: kills the rest of its child's group. A killed guard could not do so.
    pub fn clear(mut self) {
        drop(self.pipe.take());
        let in_order = self.guard.wait().is_ok_and(|status| status.success());
        if !in_order && let Ok(group) = i32::try_from(self.pid) {
            let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
        }
    }

    /// Stops the child and waits until its whole group is gone.
    pub fn stop(mut self) {
        drop(self.pipe.take());
        if let Err(error) = self.guard.wait() {
            tracing::warn!(%error, "child guard wait failed");
        }
    }
}

enum Event {
    Stop,
    Ended,
}

/// The guard process itself.
pub fn run(spec: &str) -> anyhow::Result<()> {
    let spec: Spec =
        serde_json::from_str(spec).context("a guard is started by Throughline itself")?;
    let (events, received) = mpsc::channel();
    let parent_gone = events.clone();
    thread::spawn(move || {
        let mut rest = Vec::new();
        let _ = std::io::stdin().read_to_end(&mut rest);
        let _ = parent_gone.send(Event::Stop);
    });
    let Some(_lock) = wait_for_lock(&spec.lock, &received)? else {
        return Ok(());
    };
    let mut child = spawn(&spec)?;
    let group = Pid::from_raw(i32::try_from(child.id())?);
    stop_on_signals(events.clone());
    println!("{}", child.id());
    std::io::stdout().flush()?;
    thread::spawn(move || {
        let _ = child.wait();
        let _ = events.send(Event::Ended);
    });
    if let Ok(Event::Stop) = received.recv() {
        let signal = match spec.stop_signal {
            StopSignal::Interrupt => Signal::SIGINT,
            StopSignal::Terminate => Signal::SIGTERM,
        };
        let _ = killpg(group, signal);
        while let Ok(Event::Stop) = received.recv_timeout(STOP_GRACE) {}
    }
    // Processes the child left in its group; usually none.
    let _ = killpg(group, Signal::SIGKILL);
    if let Some(dir) = &spec.remove {
        let _ = std::fs::remove_dir_all(dir);
    }
    Ok(())
}

/// `None` if our parent ended while we waited for an earlier child.
fn wait_for_lock(path: &Path, events: &mpsc::Receiver<Event>) -> anyhow::Result<Option<File>> {
    let file = OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
        .with_context(|| format!("cannot open {}", path.display()))?;
    while file.try_lock().is_err() {
        if events.recv_timeout(Duration::from_millis(50)).is_ok() {
            return Ok(None);
        }
    }
    Ok(Some(file))
}

fn spawn(spec: &Spec) -> anyhow::Result<Child> {
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .open(&spec.log)?;
    let mut command = Command::new(&spec.program);
    command
        .args(&spec.args)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .process_group(0)
        .current_dir("/");
    if let Some(account) = spec.run_as {
        command.uid(account.uid).gid(account.gid);
    }
    command
        .spawn()
        .with_context(|| format!("cannot start {}", spec.program.display()))
}

/// A signal to the guard stops the child. The signals are blocked only after the child was started: it would inherit
/// the mask and miss its own stop signal.
fn stop_on_signals(events: mpsc::Sender<Event>) {
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        signals.add(signal);
    }
    if signals.thread_block().is_ok() {
        thread::spawn(move || {
            while signals.wait().is_ok() {
                let _ = events.send(Event::Stop);
            }
        });
    }
}
