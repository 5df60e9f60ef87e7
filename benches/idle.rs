//! The cost of an idle node: its memory, and the time from its start until `/readyz` answers, on a
//! migrated database. Fails when a median is over its bar.
//!
//! The nodes run from a copy of the program: PSS divides a page among all processes that map its file,
//! and `dev`, whose Postgres and Redis they use, maps the original.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use throughline::dev::servers::free_port;

mod dev;

use dev::{Dev, PROGRAM};

const RUNS: usize = 7;
const IDLE: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(1);
const NODE_WAIT: Duration = Duration::from_secs(10);

/// In megabytes and milliseconds.
struct Limit {
    goal: f64,
    bar: f64,
}

const MEMORY: Limit = Limit {
    goal: 20.0,
    bar: 40.0,
};
const START: Limit = Limit {
    goal: 150.0,
    bar: 300.0,
};

fn main() -> anyhow::Result<ExitCode> {
    if cfg!(debug_assertions) {
        println!("Only a release build gives useful figures: cargo bench --bench idle");
        return Ok(ExitCode::SUCCESS);
    }
    println!("$ cargo bench --bench idle   # {RUNS} starts of an idle node\n");
    let dev = Dev::start("idle")?;
    let program = Program::copy(&dev)?;
    let runs = (0..RUNS)
        .map(|_| measure(&program))
        .collect::<anyhow::Result<Vec<Run>>>()?;
    dev.stop()?;

    println!("                            median      min      max     goal      bar");
    let pss = report("memory, PSS (MB)", &runs, |run| run.pss, Some(MEMORY));
    report("memory, RSS (MB)", &runs, |run| run.rss, None);
    let start = report("until /readyz (ms)", &runs, |run| run.start, Some(START));
    Ok(if pss && start {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Prints one line; returns whether the median is within the bar.
fn report(name: &str, runs: &[Run], of: impl Fn(&Run) -> f64, limit: Option<Limit>) -> bool {
    let mut values: Vec<f64> = runs.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    let median = values[values.len() / 2];
    let min = values[0];
    let max = values[values.len() - 1];
    print!("{name:<25} {median:>8.1} {min:>8.1} {max:>8.1}");
    let Some(Limit { goal, bar }) = limit else {
        println!();
        return true;
    };
    let verdict = if median <= goal {
        "goal met"
    } else if median <= bar {
        "within the bar"
    } else {
        "over the bar"
    };
    println!(" {goal:>8.0} {bar:>8.0}  {verdict}");
    median <= bar
}

struct Run {
    pss: f64,
    rss: f64,
    start: f64,
}

/// A copy of the program, and the environment of a node of `dev`.
struct Program {
    copy: PathBuf,
    env: BTreeMap<String, String>,
}

impl Program {
    fn copy(dev: &Dev) -> anyhow::Result<Self> {
        let copy = dev.dir.join("throughline");
        fs::copy(PROGRAM, &copy)?;
        let env = serde_json::from_value(dev.ready["env"].clone());
        Ok(Self {
            copy,
            env: env.context("env of the ready file")?,
        })
    }
}

fn measure(program: &Program) -> anyhow::Result<Run> {
    let listen = loopback(free_port()?);
    let metrics = loopback(free_port()?);
    let mut command = Command::new(&program.copy);
    command
        .arg("serve")
        .envs(&program.env)
        .env("THROUGHLINE_LISTEN", listen.to_string())
        .env("THROUGHLINE_METRICS_LISTEN", metrics.to_string())
        .env("THROUGHLINE_DRAIN_MS", "0")
        .env("THROUGHLINE_LOG", "warn");
    let began = Instant::now();
    let mut node = Node(command.spawn().context("cannot start a node")?);
    while !is_ready(listen) {
        if let Some(status) = node.0.try_wait()? {
            bail!("a node ended before it was ready: {status}");
        }
        ensure!(began.elapsed() < NODE_WAIT, "a node is not getting ready");
        sleep(POLL);
    }
    let start = began.elapsed().as_secs_f64() * 1000.0;
    sleep(IDLE);
    let rollup = fs::read_to_string(format!("/proc/{}/smaps_rollup", node.0.id()))?;
    let run = Run {
        pss: megabytes(&rollup, "Pss:")?,
        rss: megabytes(&rollup, "Rss:")?,
        start,
    };
    node.stop()?;
    Ok(run)
}

fn loopback(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, port))
}

fn is_ready(address: SocketAddr) -> bool {
    let request_status = || -> std::io::Result<[u8; 12]> {
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(NODE_WAIT))?;
        stream
            .write_all(b"GET /readyz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")?;
        let mut status = [0; 12];
        stream.read_exact(&mut status)?;
        Ok(status)
    };
    request_status().is_ok_and(|status| &status == b"HTTP/1.1 200")
}

/// The kernel's "kB" are 1,024 bytes; these megabytes are 1,000,000.
fn megabytes(rollup: &str, name: &str) -> anyhow::Result<f64> {
    let line = rollup.lines().find_map(|line| line.strip_prefix(name));
    let number = line.and_then(|rest| rest.split_whitespace().next());
    let kib: f64 = number.context("smaps_rollup has changed")?.parse()?;
    Ok(kib * 1024.0 / 1e6)
}

/// A node, killed when it is dropped by a failed measurement.
struct Node(Child);

impl Node {
    fn stop(mut self) -> anyhow::Result<()> {
        kill(Pid::from_raw(i32::try_from(self.0.id())?), Signal::SIGTERM)?;
        let status = self.0.wait()?;
        ensure!(status.success(), "a node failed on SIGTERM: {status}");
        Ok(())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
