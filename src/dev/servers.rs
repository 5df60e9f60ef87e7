//! Postgres and Redis of our own: in a directory, on a free loopback port, with a password, behind a guard. Used
//! by `throughline dev` and by the tests.

use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Context;
use deadpool_redis::redis;
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions, Connection};

use super::directory;
use super::programs::Programs;
use crate::child_guard::{GuardedChild, Spec, StopSignal, UnixUser};

const START_WAIT: Duration = Duration::from_secs(30);
const SUPERUSER: &str = "postgres";

/// The settings of both servers.
#[derive(Debug, Clone)]
pub struct Setup {
    pub programs: Programs,
    /// This program's own file, which the guards run.
    pub guard_program: PathBuf,
    pub account: Option<UnixUser>,
    /// Holds all files of the servers.
    pub dir: PathBuf,
    /// For tests: nothing is synced, and the directory is removed with the server.
    pub throwaway: bool,
}

pub struct PostgresServer {
    pub child: GuardedChild,
    pub port: u16,
    password: String,
}

impl PostgresServer {
    /// Creates the cluster if there is none, starts it, and waits until it answers.
    pub async fn start(setup: &Setup, password: &str) -> anyhow::Result<Self> {
        let port = free_port()?;
        Self::start_on(setup, password, port).await
    }

    /// On a given port: a test that stops a Postgres restarts it where its clients expect it.
    pub async fn start_on(setup: &Setup, password: &str, port: u16) -> anyhow::Result<Self> {
        directory::make_private_dir(&setup.dir, setup.account)?;
        let data = setup.dir.join("postgres");
        if !data.join("PG_VERSION").exists() {
            init_cluster(setup, &data, password)?;
        }
        let mut server = Self {
            child: GuardedChild::start(&setup.guard_program, &postgres_spec(setup, &data, port))?,
            port,
            password: password.to_owned(),
        };
        server.wait_until_ready().await.with_context(|| {
            format!(
                "Postgres did not start, see {}/postgres.log",
                setup.dir.display()
            )
        })?;
        Ok(server)
    }

    /// A connection as superuser, to create roles and databases.
    pub fn superuser(&self, database: &str) -> PgConnectOptions {
        PgConnectOptions::new()
            .host("127.0.0.1")
            .port(self.port)
            .username(SUPERUSER)
            .password(&self.password)
            .database(database)
    }

    pub fn url(&self, user: &str, password: &str, database: &str) -> String {
        format!(
            "postgres://{user}:{password}@127.0.0.1:{}/{database}",
            self.port
        )
    }

    async fn wait_until_ready(&mut self) -> anyhow::Result<()> {
        let options = self.superuser("postgres");
        poll(&mut self.child, async || {
            let connection = options.connect().await?;
            Ok(connection.close().await?)
        })
        .await
    }
}

/// An interrupted initdb leaves half a cluster: it runs in a draft directory, which is then renamed.
fn init_cluster(setup: &Setup, data: &Path, password: &str) -> anyhow::Result<()> {
    let draft = setup.dir.join("postgres.new");
    if draft.exists() {
        std::fs::remove_dir_all(&draft)?;
    }
    let password_file = setup.dir.join("initdb.password");
    directory::write_private(&password_file, password, setup.account)?;
    let mut command = Command::new(&setup.programs.initdb);
    command
        .arg("--pgdata")
        .arg(&draft)
        .args(["--username", SUPERUSER, "--auth", "scram-sha-256"])
        .args([
            "--encoding",
            "UTF8",
            "--locale",
            "C.UTF-8",
            "--no-instructions",
        ])
        .arg("--pwfile")
        .arg(&password_file)
        .current_dir("/");
    if setup.throwaway {
        command.arg("--no-sync");
    }
    if let Some(account) = setup.account {
        command.uid(account.uid).gid(account.gid);
    }
    let output = command.output().context("cannot run initdb")?;
    std::fs::remove_file(&password_file)?;
    anyhow::ensure!(
        output.status.success(),
        "initdb failed: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    std::fs::rename(&draft, data)?;
    Ok(())
}

fn postgres_spec(setup: &Setup, data: &Path, port: u16) -> Spec {
    let mut settings = vec![
        "listen_addresses=127.0.0.1".to_owned(),
        format!("port={port}"),
        // Loopback with passwords is enough, and a socket's path may be too long.
        "unix_socket_directories=".to_owned(),
        "max_connections=300".to_owned(),
        "shared_buffers=64MB".to_owned(),
    ];
    if setup.throwaway {
        for setting in [
            "fsync=off",
            "synchronous_commit=off",
            "full_page_writes=off",
        ] {
            settings.push(setting.to_owned());
        }
    }
    let mut args = vec!["-D".to_owned(), data.display().to_string()];
    for setting in settings {
        args.extend(["-c".to_owned(), setting]);
    }
    Spec {
        program: setup.programs.postgres.clone(),
        args,
        run_as: setup.account,
        // "Fast": sessions are ended, data is written.
        stop_signal: StopSignal::Interrupt,
        log: setup.dir.join("postgres.log"),
        lock: setup.dir.join("postgres.lock"),
        remove: setup.throwaway.then(|| setup.dir.clone()),
    }
}

pub struct RedisServer {
    pub child: GuardedChild,
    pub port: u16,
    pub url: String,
}

impl RedisServer {
    pub async fn start(setup: &Setup, password: &str) -> anyhow::Result<Self> {
        let port = free_port()?;
        Self::start_on(setup, password, port).await
    }

    /// On a given port: a test that stops a Redis restarts it where its clients expect it.
    pub async fn start_on(setup: &Setup, password: &str, port: u16) -> anyhow::Result<Self> {
        directory::make_private_dir(&setup.dir, setup.account)?;
        let config = setup.dir.join("redis.conf");
        directory::write_private(&config, &redis_config(setup, password, port), setup.account)?;
        let spec = Spec {
            program: setup.programs.redis_server.clone(),
            args: vec![config.display().to_string()],
            run_as: setup.account,
            stop_signal: StopSignal::Terminate,
            log: setup.dir.join("redis.log"),
            lock: setup.dir.join("redis.lock"),
            remove: setup.throwaway.then(|| setup.dir.clone()),
        };
        let mut server = Self {
            child: GuardedChild::start(&setup.guard_program, &spec)?,
            port,
            url: format!("redis://:{password}@127.0.0.1:{port}/0"),
        };
        server.wait_until_ready().await.with_context(|| {
            format!("Redis did not start, see {}/redis.log", setup.dir.display())
        })?;
        Ok(server)
    }

    async fn wait_until_ready(&mut self) -> anyhow::Result<()> {
        let client = redis::Client::open(self.url.as_str())?;
        poll(&mut self.child, async || {
            let mut connection = client.get_multiplexed_async_connection().await?;
            redis::cmd("PING").exec_async(&mut connection).await?;
            Ok(())
        })
        .await
    }
}

/// A file and not the command line, where every account could read the password.
fn redis_config(setup: &Setup, password: &str, port: u16) -> String {
    format!(
        "port {port}\nbind 127.0.0.1\nprotected-mode yes\nrequirepass {password}\n\
         dir {}\nsave \"\"\nappendonly no\nmaxmemory-policy noeviction\ndaemonize no\n",
        setup.dir.display()
    )
}

/// Retries until the server answers; fails when it has ended or takes too long.
async fn poll(
    child: &mut GuardedChild,
    attempt: impl AsyncFn() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let attempts = async {
        loop {
            match attempt().await {
                Ok(()) => return anyhow::Ok(()),
                Err(_) if child.has_ended() => anyhow::bail!("it ended at once"),
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    };
    tokio::time::timeout(START_WAIT, attempts)
        .await
        .context("no answer within 30 seconds")?
}

/// A loopback port that nothing listens on.
pub fn free_port() -> anyhow::Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("no free loopback port")?;
    Ok(listener.local_addr()?.port())
}
