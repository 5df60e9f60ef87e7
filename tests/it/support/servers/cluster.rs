//! The run's Postgres and Redis, started by the first test that needs them and gone with the process:
//! a guard stops them however the run ends.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use sqlx::{AssertSqlSafe, ConnectOptions, PgConnection};
use throughline::config::{MigrateConfig, ProgramDirs, environment};
use throughline::dev::servers::{PostgresServer, RedisServer, Setup};
use throughline::dev::{directory, programs};
use throughline::store;

pub const BINARY: &str = env!("CARGO_BIN_EXE_throughline");
const OWNER: &str = "throughline_owner";
const SERVICE: &str = "throughline";
const TEMPLATE: &str = "throughline_template";
/// Only this run's own servers know it, and they listen on loopback.
const PASSWORD: &str = "a-password-for-one-test-run";

pub struct Cluster {
    postgres: PostgresServer,
    postgres_log: PathBuf,
    redis: RedisServer,
    next: AtomicU32,
}

static CLUSTER: OnceLock<Cluster> = OnceLock::new();

/// The run's cluster. Started on a thread of its own, whose runtime may end: nothing of it is kept.
pub fn cluster() -> &'static Cluster {
    CLUSTER.get_or_init(|| {
        std::thread::spawn(|| {
            tokio::runtime::Runtime::new()
                .unwrap()
                .block_on(start())
                .unwrap()
        })
        .join()
        .unwrap()
    })
}

/// How to start another server of the tests' own, below `dir`.
pub fn setup(dir: PathBuf) -> Setup {
    Setup {
        programs: programs::find(&ProgramDirs::from_lookup(&environment)).unwrap(),
        guard_program: BINARY.into(),
        account: directory::account().unwrap(),
        dir,
        throwaway: true,
    }
}

/// A directory that an unprivileged server can reach, below the system's temporary one.
pub fn scratch_dir(name: &str) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let unique = format!(
        "throughline-test-{}-{}-{name}",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    );
    std::env::temp_dir().join(unique)
}

async fn start() -> anyhow::Result<Cluster> {
    let postgres_dir = scratch_dir("postgres");
    let postgres = PostgresServer::start(&setup(postgres_dir.clone()), PASSWORD).await?;
    let redis = RedisServer::start(&setup(scratch_dir("redis")), PASSWORD).await?;
    let cluster = Cluster {
        postgres,
        postgres_log: postgres_dir.join("postgres.log"),
        redis,
        next: AtomicU32::new(0),
    };
    cluster
        .admin_sql("alter system set log_line_prefix = 'database=%d '")
        .await;
    cluster.admin_sql("select pg_reload_conf()").await;
    let superuser = cluster.postgres.superuser("postgres");
    store::db::admin::ensure_database(&superuser, OWNER, PASSWORD, TEMPLATE).await?;
    store::db::migrate::run(&cluster.migrate_config(TEMPLATE)).await?;
    cluster
        .admin_sql(&format!(
            "alter database {TEMPLATE} allow_connections false"
        ))
        .await;
    Ok(cluster)
}

impl Cluster {
    /// A new migrated database, cloned from the template in some 30 ms.
    pub async fn new_database(&self) -> String {
        let name = self.unique_name();
        self.admin_sql(&format!(
            "create database {name} template {TEMPLATE} owner {OWNER}"
        ))
        .await;
        name
    }

    /// A new database with nothing in it.
    pub async fn new_empty_database(&self) -> String {
        let name = self.unique_name();
        self.admin_sql(&format!("create database {name} owner {OWNER}"))
            .await;
        name
    }

    fn unique_name(&self) -> String {
        format!("test_{}", self.next.fetch_add(1, Ordering::Relaxed))
    }

    pub async fn admin_sql(&self, sql: &str) {
        let mut admin = self.superuser("postgres").await;
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned()))
            .execute(&mut admin)
            .await
            .unwrap();
    }

    /// Fails the test whose database met a deadlock. Read from the log, where it is at once: the statistics
    /// show it up to a second later.
    pub fn assert_no_deadlock(&self, database: &str) {
        if std::thread::panicking() {
            return;
        }
        let log = std::fs::read_to_string(&self.postgres_log).unwrap_or_default();
        let prefix = format!("database={database} ");
        let lines: Vec<&str> = log.lines().collect();
        let is_one = |line: &&str| line.starts_with(&prefix) && line.contains("deadlock detected");
        if let Some(first) = lines.iter().position(is_one) {
            // The statements of both sides follow.
            let shown: Vec<&str> = lines.into_iter().skip(first).take(120).collect();
            panic!(
                "a deadlock in the database of this test:\n{}",
                shown.join("\n")
            );
        }
    }

    /// What Postgres has logged of a database.
    pub fn log_of(&self, database: &str) -> Vec<String> {
        let log = std::fs::read_to_string(&self.postgres_log).unwrap_or_default();
        let prefix = format!("database={database} ");
        let mut entries = Vec::new();
        let mut is_ours = false;
        for line in log.lines() {
            match line.strip_prefix('\t') {
                // A line that belongs to the one before.
                Some(rest) if is_ours => {
                    let entry: &mut String = entries.last_mut().unwrap();
                    entry.push('\n');
                    entry.push_str(rest);
                }
                Some(_) => {}
                None => {
                    is_ours = line.starts_with(&prefix);
                    if is_ours {
                        entries.push(line[prefix.len()..].to_owned());
                    }
                }
            }
        }
        entries
    }

    pub async fn superuser(&self, database: &str) -> PgConnection {
        self.postgres.superuser(database).connect().await.unwrap()
    }

    pub fn superuser_url(&self, database: &str) -> String {
        self.postgres.url("postgres", PASSWORD, database)
    }

    pub fn service_url(&self, database: &str) -> String {
        self.postgres.url(SERVICE, PASSWORD, database)
    }

    pub fn owner_url(&self, database: &str) -> String {
        self.postgres.url(OWNER, PASSWORD, database)
    }

    pub fn url_as(&self, user: &str, password: &str, database: &str) -> String {
        self.postgres.url(user, password, database)
    }

    pub fn redis_url(&self) -> &str {
        &self.redis.url
    }

    pub fn migrate_config(&self, database: &str) -> MigrateConfig {
        MigrateConfig {
            owner_url: self.owner_url(database).into(),
            service_url: self.service_url(database).into(),
        }
    }
}

/// The project's root, for tests that read its files.
pub fn project() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}
