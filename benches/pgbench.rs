//! The other side: pgbench, which comes with Postgres, as the service's login. Its scripts are built from
//! the service's statements, so that they cannot diverge.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};
use throughline::clock::Clock;
use throughline::config::{ProgramDirs, environment};
use throughline::dev::programs;
use url::Url;
use uuid::Uuid;

use crate::database;
use crate::dev::Dev;
use crate::figures::{Part, Sample, Times};

/// The time in which a new connection to Postgres reads its catalogs and plans the statements, with a margin.
const LEARNING: Duration = Duration::from_millis(40);

pub struct Pgbench {
    program: PathBuf,
    /// The directory of scripts and logs.
    dir: PathBuf,
    url: Url,
    pub tenant: Uuid,
}

impl Pgbench {
    pub fn new(dev: &Dev) -> anyhow::Result<Self> {
        let programs = programs::find(&ProgramDirs::from_lookup(&environment))?;
        let program = programs.initdb.with_file_name("pgbench");
        ensure!(program.exists(), "there is no {}", program.display());
        Ok(Self {
            program,
            dir: dev.dir.clone(),
            url: database::database_url(dev)?,
            tenant: database::tenant_id(dev)?.as_uuid(),
        })
    }

    /// Runs the scripts. Each client chooses among them at random.
    pub fn run(&self, scripts: &[String], clients: u32, times: Times) -> anyhow::Result<Part> {
        let threads = std::thread::available_parallelism()?
            .get()
            .min(clients as usize);
        let times = Times {
            warm_up: times.warm_up + LEARNING * clients,
            ..times
        };
        // pgbench's time starts before it connects, and is set in whole seconds.
        let connecting = Duration::from_secs(1 + u64::from(clients / 64));
        let time = times.warm_up + times.measured + connecting;
        let time = Duration::from_secs_f64(time.as_secs_f64().ceil());
        let prefix = self.dir.join("pgbench-log");
        let mut command = Command::new(&self.program);
        command
            .args(["--no-vacuum", "--protocol=prepared", "--log"])
            .arg(format!("--log-prefix={}", prefix.display()))
            .arg(format!("--client={clients}"))
            .arg(format!("--jobs={threads}"))
            .arg(format!("--time={}", time.as_secs()))
            .env("PGHOST", self.url.host_str().unwrap_or_default())
            .env("PGPORT", self.url.port().unwrap_or_default().to_string())
            .env("PGUSER", self.url.username())
            .env("PGPASSWORD", self.url.password().unwrap_or_default())
            .env("PGDATABASE", self.url.path().trim_start_matches('/'))
            .env("PGOPTIONS", self.options());
        for (index, script) in scripts.iter().enumerate() {
            let file = self.dir.join(format!("pgbench-{index}.sql"));
            fs::write(&file, script)?;
            command.arg("--file").arg(file);
        }
        let began = since_1970()?;
        let output = command.output().context("cannot run pgbench")?;
        let text = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "pgbench failed: {}", text.trim());
        let samples = self.take_logs(began)?;
        let first = samples.iter().map(|sample| sample.ended - sample.took);
        let start = first.min().unwrap_or(time) + times.warm_up;
        let end = time.min(start + times.measured);
        ensure!(
            start + times.measured / 2 <= end,
            "this machine is too busy: pgbench takes too long to connect"
        );
        Part::new(&samples, scripts.len(), start..end)
    }

    /// The statement of a tip is alone in its script, without a transaction that sets the tenant. Plans are generic
    /// from the start: the service's connections have passed their first executions, which Postgres plans individually.
    fn options(&self) -> String {
        let tenant = self.tenant;
        format!("-c app.tenant_id={tenant} -c plan_cache_mode=force_generic_plan")
    }

    /// The statements in a plain transaction of the tenant: each line is a round trip.
    pub fn transaction(&self, statements: &str) -> String {
        format!(
            "begin;\n\
             set local app.tenant_id = '{}';\n\
             {statements}\
             commit;\n",
            self.tenant
        )
    }

    /// Reads and removes the logs of pgbench's threads.
    fn take_logs(&self, began: Duration) -> anyhow::Result<Vec<Sample>> {
        let mut rows = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            if entry
                .file_name()
                .to_string_lossy()
                .starts_with("pgbench-log.")
            {
                let text = fs::read_to_string(entry.path())?;
                let read = text.lines().map(LogRow::read).collect::<Option<Vec<_>>>();
                rows.extend(read.context("pgbench's log has changed")?);
                fs::remove_file(entry.path())?;
            }
        }
        let sample = |row: LogRow| Sample {
            task: row.script,
            took: row.took,
            ended: row.ended - began,
        };
        Ok(rows.into_iter().map(sample).collect())
    }
}

/// One transaction in pgbench's log.
struct LogRow {
    script: usize,
    took: Duration,
    /// Since 1970.
    ended: Duration,
}

impl LogRow {
    /// Parses "client transaction took-us script ended-s ended-us".
    fn read(line: &str) -> Option<Self> {
        let numbers = line.split(' ').map(|word| word.parse().ok());
        let numbers = numbers.collect::<Option<Vec<u64>>>()?;
        let [_, _, took, script, seconds, micros] = numbers[..] else {
            return None;
        };
        Some(Self {
            script: usize::try_from(script).ok()?,
            took: Duration::from_micros(took),
            ended: Duration::from_secs(seconds) + Duration::from_micros(micros),
        })
    }
}

fn since_1970() -> anyhow::Result<Duration> {
    let micros = Clock::system().now().timestamp_micros();
    Ok(Duration::from_micros(u64::try_from(micros)?))
}

/// The statement with constants in place of its parameters.
pub fn with_values(sql: &str, values: &[&str]) -> String {
    let replace = |sql: String, (index, value): (usize, &&str)| {
        sql.replace(&format!("${}", index + 1), value)
    };
    // From the last to the first: $1 is a prefix of $10.
    values
        .iter()
        .enumerate()
        .rev()
        .fold(sql.to_owned(), replace)
        + ";\n"
}

/// A text in SQL. pgbench parses a name after a colon as a variable, even within quotes.
#[allow(dead_code, reason = "not every bench has texts in its scripts")]
pub fn quoted(text: &str) -> String {
    let text = text.replace('\\', "\\\\").replace('\'', "''");
    format!("E'{}'", text.replace(':', "\\x3a"))
}
