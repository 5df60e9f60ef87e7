//! Real processes of the program, for tests about starting, stopping and dying.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::support::servers::cluster::BINARY;

pub struct Process {
    child: Child,
}

impl Process {
    pub fn start(command: &mut Command) -> Self {
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self { child }
    }

    /// The same with what it prints and logs in a file.
    pub fn start_logged(command: &mut Command, log: &Path) -> Self {
        let log = std::fs::File::create(log).unwrap();
        let child = command
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        Self { child }
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).unwrap();
    }

    /// Waits for the end, which must come within `limit`.
    pub fn wait(&mut self, limit: Duration) -> ExitStatus {
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(started.elapsed() < limit, "still running after {limit:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The program with nothing of our own environment that it would read.
pub fn throughline(args: &[&str]) -> Command {
    let mut command = Command::new(BINARY);
    command.args(args);
    for (name, _) in std::env::vars() {
        let ours = name.starts_with("THROUGHLINE_");
        if ours && !name.ends_with("_BIN_DIR") && !name.ends_with("REDIS_SERVER") {
            command.env_remove(name);
        }
    }
    command
}

/// Waits for the file that `dev` writes when it is ready.
pub fn wait_for_ready_file(process: &mut Process, file: &Path) -> Value {
    let started = Instant::now();
    loop {
        if let Ok(text) = std::fs::read_to_string(file) {
            return serde_json::from_str(&text).unwrap();
        }
        let ended = process.child.try_wait().unwrap();
        assert!(ended.is_none(), "dev ended: {ended:?}");
        assert!(
            started.elapsed() < Duration::from_secs(60),
            "dev is not ready"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The ids of processes whose command line mentions `text`.
pub fn pids_mentioning(text: &str) -> Vec<i32> {
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    let mentions = |pid: &i32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline"));
        line.is_ok_and(|line| String::from_utf8_lossy(&line).contains(text))
    };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
        .filter(mentions)
        .collect()
}

/// Processes whose command line mentions `text`.
pub fn processes_mentioning(text: &str) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    let own = std::process::id().to_string();
    entries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy() != own)
        .filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok())
        .map(|line| String::from_utf8_lossy(&line).replace('\0', " "))
        .filter(|line| line.contains(text))
        .collect()
}

/// As Redis says it itself.
pub fn redis_pid(url: &str) -> Option<i32> {
    let url = reqwest::Url::parse(url).unwrap();
    let mut stream = TcpStream::connect(("127.0.0.1", url.port()?)).ok()?;
    stream
        .set_read_timeout(Some(Duration::from_secs(5)))
        .unwrap();
    let asked = format!("AUTH {}\r\nINFO server\r\nQUIT\r\n", url.password()?);
    stream.write_all(asked.as_bytes()).ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    let (_, rest) = text.split_once("process_id:")?;
    rest.split_whitespace().next()?.parse().ok()
}
