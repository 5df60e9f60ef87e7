//! Keeps every processor awake while something is measured. In a virtual machine one that has nothing to do is
//! given back, and woken by the host when it pleases: a round trip to Postgres then takes four times as long,
//! with great variance, and that is what would be measured.

use std::io::Read;
use std::process::{Child, Command, Stdio};

use anyhow::Context;

/// With this argument the program only keeps a processor busy.
pub const ARGUMENT: &str = "awake";

/// Ended with us: they read from a pipe that we hold.
pub struct Awake {
    children: Vec<Child>,
}

impl Awake {
    /// One for each processor. They have what nobody else wants (`SCHED_IDLE`), and give it up at once.
    pub fn start() -> anyhow::Result<Self> {
        let start = |_| {
            Command::new("chrt")
                .args(["--idle", "0"])
                .arg(std::env::current_exe()?)
                .arg(ARGUMENT)
                .stdin(Stdio::piped())
                .spawn()
                .context("cannot keep the processors awake")
        };
        let cores = std::thread::available_parallelism()?.get();
        let children = (0..cores).map(start).collect::<anyhow::Result<_>>()?;
        Ok(Self { children })
    }
}

impl Drop for Awake {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

pub fn keep_awake() -> ! {
    std::thread::spawn(|| {
        let _ = std::io::stdin().read(&mut [0]);
        std::process::exit(0);
    });
    loop {
        std::hint::spin_loop();
    }
}
