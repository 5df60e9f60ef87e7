//! CPU time and memory of processes, from /proc.

use std::collections::HashMap;
use std::fs;
use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::Context;

use crate::figures::Times;

/// /proc counts in hundredths of a second, independent of the kernel's own clock.
const TICK: Duration = Duration::from_millis(10);

/// CPU time of one process, user and system.
pub fn cpu_of(pid: u32) -> anyhow::Result<Duration> {
    let stat = Stat::of(pid).context("a measured process has ended")?;
    Ok(TICK * u32::try_from(stat.own)?)
}

/// CPU time of one process during the measurement, and the measurement's start and end since `began`.
pub async fn cpu_while(
    pid: u32,
    began: Instant,
    times: Times,
) -> anyhow::Result<(Range<Duration>, Duration)> {
    let warm = began + times.warm_up;
    tokio::time::sleep_until(warm.into()).await;
    let from = began.elapsed();
    let cpu = cpu_of(pid)?;
    tokio::time::sleep_until((warm + times.measured).into()).await;
    let to = began.elapsed();
    let used = cpu_of(pid)?.saturating_sub(cpu);
    Ok((from..to, used))
}

/// The memory of a process in megabytes.
#[derive(Debug, Clone, Copy)]
pub struct Memory {
    pub pss: f64,
    pub rss: f64,
}

impl Memory {
    pub fn of(pid: u32) -> anyhow::Result<Self> {
        let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
        // The kernel's "kB" are 1,024 bytes; these megabytes are 1,000,000.
        let megabytes = |name: &str| {
            let line = rollup.lines().find_map(|line| line.strip_prefix(name));
            let number = line.and_then(|rest| rest.split_whitespace().next());
            let kib: f64 = number.context("smaps_rollup has changed")?.parse()?;
            anyhow::Ok(kib * 1024.0 / 1e6)
        };
        Ok(Self {
            pss: megabytes("Pss:")?,
            rss: megabytes("Rss:")?,
        })
    }
}

/// The CPU time of the machine up to a moment, in ticks.
#[derive(Debug, Clone, Copy)]
pub struct Machine {
    at: Instant,
    busy: u64,
    /// This process and everything it has started.
    tree: u64,
    postgres: u64,
}

impl Machine {
    pub fn now() -> anyhow::Result<Self> {
        let stat = fs::read_to_string("/proc/stat")?;
        let all = stat.lines().next().context("/proc/stat has changed")?;
        let numbers: Vec<u64> = all
            .split_whitespace()
            .skip(1)
            .flat_map(str::parse)
            .collect();
        // user, nice, system; steal. Interrupts belong to no process.
        let busy = [0, 1, 2, 7]
            .iter()
            .filter_map(|index| numbers.get(*index))
            .sum();
        let mut processes = HashMap::new();
        for entry in fs::read_dir("/proc")? {
            let name = entry?.file_name();
            let pid: Option<u32> = name.to_str().and_then(|name| name.parse().ok());
            if let Some((pid, stat)) = pid.and_then(|pid| Some((pid, Stat::of(pid)?))) {
                processes.insert(pid, stat);
            }
        }
        let root = std::process::id();
        let is_ours = |mut pid: u32| loop {
            match processes.get(&pid) {
                _ if pid == root => break true,
                Some(stat) if stat.parent > 1 => pid = stat.parent,
                Some(_) | None => break false,
            }
        };
        let ours: Vec<&Stat> = processes
            .iter()
            .filter(|(pid, _)| is_ours(**pid))
            .map(|(_, stat)| stat)
            .collect();
        let sum = |stats: &mut dyn Iterator<Item = &&Stat>| {
            stats.map(|stat| stat.own + stat.reaped).sum()
        };
        Ok(Self {
            at: Instant::now(),
            busy,
            tree: sum(&mut ours.iter()),
            postgres: sum(&mut ours.iter().filter(|stat| stat.name.starts_with("postgres"))),
        })
    }

    /// The share of the machine that other processes used since `before`.
    pub fn foreign_since(&self, before: &Self) -> anyhow::Result<f64> {
        let foreign =
            (self.busy - before.busy).saturating_sub(self.tree.saturating_sub(before.tree));
        let cores = std::thread::available_parallelism()?.get() as f64;
        let passed = self.at.duration_since(before.at).as_secs_f64() / TICK.as_secs_f64();
        Ok(foreign as f64 / (cores * passed))
    }

    /// The CPU time of Postgres since `before`.
    pub fn postgres_since(&self, before: &Self) -> Duration {
        let ticks = self.postgres.saturating_sub(before.postgres);
        TICK * u32::try_from(ticks).unwrap_or(u32::MAX)
    }
}

struct Stat {
    name: String,
    parent: u32,
    own: u64,
    /// The CPU time of ended children.
    reaped: u64,
}

impl Stat {
    fn of(pid: u32) -> Option<Self> {
        let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let (head, rest) = text.rsplit_once(") ")?;
        let (_, name) = head.split_once('(')?;
        let fields: Vec<&str> = rest.split(' ').collect();
        // From the third field on: state, ppid, …, utime, stime, cutime, cstime.
        let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
        Some(Self {
            name: name.to_owned(),
            parent: u32::try_from(number(1)?).ok()?,
            own: number(11)? + number(12)?,
            reaped: number(13)? + number(14)?,
        })
    }
}
