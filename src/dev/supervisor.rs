//! Keeps the servers of `dev` running: one that ends is restarted, on its port and with its data, with a growing
//! backoff. Each start has a guard of its own, so that no server outlives `dev`.

use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::servers::{PostgresServer, RedisServer, Setup};
use super::state::State;
use crate::child_guard::GuardedChild;

const CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// Before the first restart. Each further one doubles it.
const FIRST_BACKOFF: Duration = Duration::from_millis(200);
/// Restarts without a steady run between them. Their backoffs add up to six seconds.
const MAX_STARTS: u32 = 5;
/// A server that ran this long has recovered.
const STEADY: Duration = Duration::from_secs(30);

pub struct Supervisor {
    setup: Setup,
    postgres: Server,
    redis: Server,
}

impl Supervisor {
    /// Supervises two running servers.
    pub fn new(setup: Setup, state: &State, postgres: PostgresServer, redis: RedisServer) -> Self {
        Self {
            setup,
            postgres: Server {
                kind: Kind::Postgres,
                port: postgres.port,
                password: state.superuser_password.clone(),
                child: Some(postgres.child),
                started_at: Instant::now(),
                starts: 0,
            },
            redis: Server {
                kind: Kind::Redis,
                port: redis.port,
                password: state.redis_password.clone(),
                child: Some(redis.child),
                started_at: Instant::now(),
                starts: 0,
            },
        }
    }

    /// Returns only when one of them cannot be kept running.
    pub async fn run(&mut self) -> anyhow::Error {
        let setup = &self.setup;
        tokio::select! {
            error = self.postgres.keep_running(setup) => error,
            error = self.redis.keep_running(setup) => error,
        }
    }

    /// Stops both and waits until all their processes are gone.
    pub fn stop(self) {
        for server in [self.postgres, self.redis] {
            if let Some(child) = server.child {
                child.stop();
            }
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Postgres,
    Redis,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Postgres => "Postgres",
            Self::Redis => "Redis",
        })
    }
}

struct Server {
    kind: Kind,
    port: u16,
    password: String,
    /// `None` while it is down.
    child: Option<GuardedChild>,
    started_at: Instant,
    /// Starts since the last steady run.
    starts: u32,
}

impl Server {
    async fn keep_running(&mut self, setup: &Setup) -> anyhow::Error {
        loop {
            if self.is_running() {
                if self.started_at.elapsed() > STEADY {
                    self.starts = 0;
                }
                tokio::time::sleep(CHECK_INTERVAL).await;
                continue;
            }
            let kind = self.kind;
            let log = self.log(setup);
            if let Some(child) = self.child.take() {
                child.clear();
                tracing::warn!(server = %kind, log = %log.display(), "server ended; restarting");
            }
            if self.starts == MAX_STARTS {
                return anyhow::anyhow!(
                    "{kind} does not stay up: {MAX_STARTS} starts in a row failed, see {}",
                    log.display()
                );
            }
            let backoff = FIRST_BACKOFF * 2u32.pow(self.starts);
            self.starts += 1;
            tokio::time::sleep(backoff).await;
            let started = Box::pin(self.start(setup)).await;
            match started {
                Ok(child) => {
                    self.child = Some(child);
                    self.started_at = Instant::now();
                    tracing::info!(server = %kind, "server restarted");
                }
                Err(error) => {
                    tracing::warn!(server = %kind, error = format!("{error:#}"), "server restart failed");
                }
            }
        }
    }

    fn is_running(&mut self) -> bool {
        let child = self.child.as_mut();
        child.is_some_and(|child| !child.has_ended())
    }

    async fn start(&self, setup: &Setup) -> anyhow::Result<GuardedChild> {
        let password = self.password.as_str();
        let port = self.port;
        match self.kind {
            Kind::Postgres => {
                let server = PostgresServer::start_on(setup, password, port).await?;
                Ok(server.child)
            }
            Kind::Redis => {
                let server = RedisServer::start_on(setup, password, port).await?;
                Ok(server.child)
            }
        }
    }

    fn log(&self, setup: &Setup) -> PathBuf {
        match self.kind {
            Kind::Postgres => setup.dir.join("postgres.log"),
            Kind::Redis => setup.dir.join("redis.log"),
        }
    }
}
