//! A Postgres and a Redis of one test alone, to be stopped and started again.

use std::path::PathBuf;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use throughline::config::MigrateConfig;
use throughline::dev::servers::{PostgresServer, RedisServer, Setup};
use throughline::store;

use crate::support::servers::cluster::{scratch_dir, setup};

const PASSWORD: &str = "pw-of-one-test";

/// A Postgres that keeps what it was told, and a Redis, of this test alone.
pub struct Servers {
    setup: Setup,
    pub postgres: PostgresServer,
    pub redis: Option<RedisServer>,
}

impl Servers {
    pub async fn start() -> Self {
        let setup = Setup {
            throwaway: false,
            ..setup(scratch_dir("own-postgres"))
        };
        let postgres = PostgresServer::start(&setup, PASSWORD).await.unwrap();
        let servers = Self {
            setup,
            postgres,
            redis: Some(Self::start_redis(None).await),
        };
        let superuser = servers.postgres.superuser("postgres");
        store::db::admin::ensure_database(&superuser, "throughline_owner", PASSWORD, "throughline")
            .await
            .unwrap();
        let config = MigrateConfig {
            owner_url: servers.url("throughline_owner").into(),
            service_url: servers.url("throughline").into(),
        };
        store::db::migrate::run(&config).await.unwrap();
        servers
    }

    pub async fn start_redis(port: Option<u16>) -> RedisServer {
        let setup = setup(scratch_dir("own-redis"));
        match port {
            Some(port) => RedisServer::start_on(&setup, PASSWORD, port).await.unwrap(),
            None => RedisServer::start(&setup, PASSWORD).await.unwrap(),
        }
    }

    pub fn url(&self, user: &str) -> String {
        self.postgres.url(user, PASSWORD, "throughline")
    }

    /// SIGINT ends it fast, SIGQUIT at once and without a word.
    pub async fn restart_postgres(&mut self, signal: Signal) {
        self.restart_postgres_after(signal, Duration::ZERO).await;
    }

    /// The same, with an outage of this length.
    pub async fn restart_postgres_after(&mut self, signal: Signal, outage: Duration) {
        let pid = self.postgres.child.pid();
        kill(Pid::from_raw(pid as i32), signal).unwrap();
        while !self.postgres.child.has_ended() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        tokio::time::sleep(outage).await;
        let port = self.postgres.port;
        let started = PostgresServer::start_on(&self.setup, PASSWORD, port).await;
        self.postgres = started.unwrap();
    }

    pub fn stop(self) {
        self.postgres.child.stop();
        drop(self.redis);
        let dir: PathBuf = self.setup.dir;
        std::fs::remove_dir_all(dir).unwrap();
    }
}
