//! Finding Postgres and Redis on a developer's machine: an override, the PATH, Debian's directories.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;

use crate::config::ProgramDirs;

const DEBIAN_POSTGRES: &str = "/usr/lib/postgresql";
const MIN_POSTGRES: u32 = 15;
const MIN_REDIS: (u32, u32) = (6, 2);

#[derive(Debug, Clone)]
pub struct Programs {
    pub initdb: PathBuf,
    pub postgres: PathBuf,
    pub redis_server: PathBuf,
}

pub fn find(dirs: &ProgramDirs) -> anyhow::Result<Programs> {
    let bin = find_postgres(dirs)?;
    Ok(Programs {
        initdb: bin.join("initdb"),
        postgres: bin.join("postgres"),
        redis_server: find_redis(dirs)?,
    })
}

/// The newest directory that has both `initdb` and `postgres`, new enough.
fn find_postgres(dirs: &ProgramDirs) -> anyhow::Result<PathBuf> {
    if let Some(dir) = &dirs.postgres_bin_dir {
        let version = postgres_version(dir).with_context(|| {
            format!(
                "THROUGHLINE_POSTGRES_BIN_DIR: {} has no initdb and postgres that run",
                dir.display()
            )
        })?;
        anyhow::ensure!(
            version >= MIN_POSTGRES,
            "THROUGHLINE_POSTGRES_BIN_DIR: Postgres {version} is too old, {MIN_POSTGRES} or newer is needed"
        );
        return Ok(dir.clone());
    }
    let versioned = std::fs::read_dir(DEBIAN_POSTGRES)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path().join("bin"));
    dirs.path
        .iter()
        .cloned()
        .chain(versioned)
        .filter_map(|dir| postgres_version(&dir).map(|version| (version, dir)))
        .filter(|(version, _)| *version >= MIN_POSTGRES)
        .max_by_key(|(version, _)| *version)
        .map(|(_, dir)| dir)
        .context(
            "Postgres 15 or newer was not found: install it (Debian: apt-get install postgresql), \
             or set THROUGHLINE_POSTGRES_BIN_DIR",
        )
}

fn postgres_version(dir: &Path) -> Option<u32> {
    if !dir.join("initdb").exists() {
        return None;
    }
    // "postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)"
    let text = version_text(&dir.join("postgres"))?;
    let number = text.split_whitespace().nth(2)?;
    number
        .split(|c: char| !c.is_ascii_digit())
        .next()?
        .parse()
        .ok()
}

fn find_redis(dirs: &ProgramDirs) -> anyhow::Result<PathBuf> {
    let new_enough =
        |program: &PathBuf| redis_version(program).is_some_and(|version| version >= MIN_REDIS);
    if let Some(program) = &dirs.redis_server {
        anyhow::ensure!(
            new_enough(program),
            "THROUGHLINE_REDIS_SERVER: {} is not a redis-server 6.2 or newer",
            program.display()
        );
        return Ok(program.clone());
    }
    let names = ["redis-server", "valkey-server"];
    dirs.path
        .iter()
        .flat_map(|dir| names.iter().map(move |name| dir.join(name)))
        .find(new_enough)
        .context(
            "Redis 6.2 or newer was not found: install it (Debian: apt-get install redis-server), \
             or set THROUGHLINE_REDIS_SERVER",
        )
}

fn redis_version(program: &Path) -> Option<(u32, u32)> {
    // "Redis server v=7.0.15 sha=…"
    let text = version_text(program)?;
    let (_, rest) = text.split_once("v=")?;
    let mut numbers = rest.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn version_text(program: &Path) -> Option<String> {
    let output = Command::new(program).arg("--version").output().ok()?;
    String::from_utf8(output.stdout).ok()
}
