//! Migrations: forward only, run by one process at a time, by the owner and never by the service.

use std::time::Duration;

use anyhow::Context;
use sqlx::migrate::Migrator;
use sqlx::{ConnectOptions, Connection, PgConnection};

use super::roles;
use crate::config::MigrateConfig;
use crate::store::connect_options;

static MIGRATIONS: Migrator = sqlx::migrate!();

/// Any number that no other program uses for an advisory lock.
const MIGRATION_LOCK: i64 = 0x7468_726f_7567_686c;
const LOCK_WAIT: Duration = Duration::from_secs(60);

/// Creates the roles, then applies the missing migrations. Returns how many it applied.
pub async fn run(config: &MigrateConfig) -> anyhow::Result<usize> {
    let mut owner = connect_options(&config.owner_url, "MIGRATE_DATABASE_URL")?
        // The statement that creates a role contains its password.
        .disable_statement_logging()
        .connect()
        .await
        .context("cannot connect to Postgres (THROUGHLINE_MIGRATE_DATABASE_URL)")?;
    lock(&mut owner).await?;
    let migrated = migrate(&mut owner, config).await;
    owner.close().await?;
    migrated
}

async fn migrate(owner: &mut PgConnection, config: &MigrateConfig) -> anyhow::Result<usize> {
    roles::ensure(owner, &config.service_url).await?;
    let before = applied(owner).await?.len();
    let mut migrator = Migrator {
        migrations: MIGRATIONS.migrations.clone(),
        ..Migrator::DEFAULT
    };
    // We use our own lock: sqlx's waits inside Postgres, where an index that the lock's owner builds concurrently
    // deadlocks with the waiting process.
    migrator.set_locking(false);
    migrator.set_ignore_missing(true);
    migrator.run(&mut *owner).await?;
    // The service reads which migrations ran, so that it can refuse a schema older than itself.
    sqlx::query("grant select on _sqlx_migrations to throughline_service")
        .execute(&mut *owner)
        .await?;
    Ok(applied(owner).await?.len() - before)
}

/// Polls for the lock and never waits inside Postgres. The lock ends with the connection.
async fn lock(owner: &mut PgConnection) -> anyhow::Result<()> {
    let poll = async {
        loop {
            let locked: bool = sqlx::query_scalar("select pg_try_advisory_lock($1)")
                .bind(MIGRATION_LOCK)
                .fetch_one(&mut *owner)
                .await?;
            if locked {
                return anyhow::Ok(());
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    tokio::time::timeout(LOCK_WAIT, poll)
        .await
        .context("another process has been migrating this database for a minute")?
}

async fn applied(connection: &mut PgConnection) -> anyhow::Result<Vec<i64>> {
    let exists: bool =
        sqlx::query_scalar("select to_regclass('public._sqlx_migrations') is not null")
            .fetch_one(&mut *connection)
            .await?;
    if !exists {
        return Ok(Vec::new());
    }
    Ok(
        sqlx::query_scalar("select version from _sqlx_migrations where success order by version")
            .fetch_all(connection)
            .await?,
    )
}

/// The service runs on its own schema or a newer one, never on an older one, where its SQL would fail.
pub async fn refuse_old_schema(service: &mut PgConnection) -> anyhow::Result<()> {
    let applied = applied(service).await?;
    let missing = MIGRATIONS
        .iter()
        .filter(|migration| !applied.contains(&migration.version))
        .count();
    anyhow::ensure!(
        missing == 0,
        "the database lacks {missing} migrations: run `throughline migrate`"
    );
    Ok(())
}
