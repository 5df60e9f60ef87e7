//! `throughline dev` in a directory of its own, for benches. The guard stops it and removes the directory,
//! however the bench ends.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use throughline::child_guard::{GuardedChild, Spec, StopSignal};

pub const PROGRAM: &str = env!("CARGO_BIN_EXE_throughline");
const POLL: Duration = Duration::from_millis(1);
const DEV_WAIT: Duration = Duration::from_secs(60);

pub struct Dev {
    guarded: GuardedChild,
    log: PathBuf,
    /// Its data directory, which is removed at its end.
    #[allow(dead_code, reason = "not every bench uses it")]
    pub dir: PathBuf,
    /// The content of its ready file.
    pub ready: serde_json::Value,
}

impl Dev {
    pub fn start(bench: &str) -> anyhow::Result<Self> {
        let name = format!("throughline-{bench}-{}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        // Postgres runs as another user when the bench runs as root, and must enter the directory.
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o711))?;
        let ready_file = dir.join("ready.json");
        // Next to the directory: it says why `dev` ended after the directory is removed.
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
        let mut guarded = GuardedChild::start(Path::new(PROGRAM), &spec)?;
        let began = Instant::now();
        while !ready_file.exists() {
            if guarded.has_ended() || began.elapsed() > DEV_WAIT {
                bail!("`throughline dev` does not start, see {}", log.display());
            }
            sleep(POLL);
        }
        let ready = serde_json::from_str(&fs::read_to_string(&ready_file)?)?;
        Ok(Self {
            guarded,
            log,
            dir,
            ready,
        })
    }

    pub fn stop(self) -> anyhow::Result<()> {
        self.guarded.stop();
        Ok(fs::remove_file(self.log)?)
    }
}
