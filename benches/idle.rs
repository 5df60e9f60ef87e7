//! What a node costs while nobody talks to it: its memory, and the time from its start until
//! `/readyz` answers, on a migrated database. Fails when a median is over its bar.
//!
//! The nodes run from a copy of the program: PSS shares a page among all who map its file, and `dev`,
//! which lends them Postgres and Redis, maps the original.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use throughline::dev::servers::free_port;
use throughline::guard::{Guarded, Spec, StopSignal};

const PROGRAM: &str = env!("CARGO_BIN_EXE_throughline");
const RUNS: usize = 7;
const IDLE: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(1);
const NODE_WAIT: Duration = Duration::from_secs(10);
const DEV_WAIT: Duration = Duration::from_secs(60);

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
        println!("Only a release build tells something: cargo bench --bench idle");
        return Ok(ExitCode::SUCCESS);
    }
    println!("$ cargo bench --bench idle   # {RUNS} starts of an idle node\n");
    let dev = Dev::start()?;
    let runs = (0..RUNS)
        .map(|_| measure(&dev))
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

/// Prints one line; answers whether the median keeps the bar.
fn report(name: &str, runs: &[Run], of: impl Fn(&Run) -> f64, limit: Option<Limit>) -> bool {
    let mut values: Vec<f64> = runs.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    let median = values[values.len() / 2];
    let (min, max) = (values[0], values[values.len() - 1]);
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

fn measure(dev: &Dev) -> anyhow::Result<Run> {
    let listen = loopback(free_port()?);
    let metrics = loopback(free_port()?);
    let mut command = Command::new(&dev.copy);
    command
        .arg("serve")
        .envs(&dev.env)
        .env("THROUGHLINE_LISTEN", listen.to_string())
        .env("THROUGHLINE_METRICS_LISTEN", metrics.to_string())
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
    let ask = || -> std::io::Result<[u8; 12]> {
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(NODE_WAIT))?;
        stream
            .write_all(b"GET /readyz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")?;
        let mut status = [0; 12];
        stream.read_exact(&mut status)?;
        Ok(status)
    };
    ask().is_ok_and(|status| &status == b"HTTP/1.1 200")
}

/// The kernel's "kB" are 1,024 bytes; our megabytes are 1,000,000.
fn megabytes(rollup: &str, name: &str) -> anyhow::Result<f64> {
    let line = rollup.lines().find_map(|line| line.strip_prefix(name));
    let number = line.and_then(|rest| rest.split_whitespace().next());
    let kib: f64 = number.context("smaps_rollup has changed")?.parse()?;
    Ok(kib * 1024.0 / 1e6)
}

/// Killed when dropped, should a measurement fail.
struct Node(Child);

impl Node {
    fn stop(mut self) -> anyhow::Result<()> {
        kill(Pid::from_raw(i32::try_from(self.0.id())?), Signal::SIGTERM)?;
        let status = self.0.wait()?;
        ensure!(
            status.success(),
            "SIGTERM did not end a node well: {status}"
        );
        Ok(())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// `throughline dev` in a directory of its own. The guard ends it and removes the directory however we
/// end.
struct Dev {
    guarded: Guarded,
    log: PathBuf,
    copy: PathBuf,
    env: BTreeMap<String, String>,
}

impl Dev {
    fn start() -> anyhow::Result<Self> {
        let name = format!("throughline-idle-{}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        // Postgres, as another account when we are root, passes through.
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o711))?;
        let ready_file = dir.join("ready.json");
        // Beside the directory: it tells why `dev` ended when the directory is gone.
        let log = dir.with_extension("log");
        let args = ["dev", "--port", "0", "--data-dir"].map(str::to_owned);
        let more = [
            dir.display().to_string(),
            "--ready-file".to_owned(),
            ready_file.display().to_string(),
        ];
        let spec = Spec {
            program: PROGRAM.into(),
            args: args.into_iter().chain(more).collect(),
            run_as: None,
            stop_signal: StopSignal::Terminate,
            log: log.clone(),
            lock: dir.join("dev.lock"),
            remove: Some(dir.clone()),
        };
        let mut guarded = Guarded::start(Path::new(PROGRAM), &spec)?;
        let began = Instant::now();
        while !ready_file.exists() {
            if guarded.has_ended() || began.elapsed() > DEV_WAIT {
                bail!("`throughline dev` does not start, see {}", log.display());
            }
            sleep(POLL);
        }
        let copy = dir.join("throughline");
        fs::copy(PROGRAM, &copy)?;
        let ready: serde_json::Value = serde_json::from_str(&fs::read_to_string(&ready_file)?)?;
        let env = serde_json::from_value(ready["env"].clone()).context("env of the ready file")?;
        Ok(Self {
            guarded,
            log,
            copy,
            env,
        })
    }

    fn stop(self) -> anyhow::Result<()> {
        self.guarded.stop();
        Ok(fs::remove_file(self.log)?)
    }
}
