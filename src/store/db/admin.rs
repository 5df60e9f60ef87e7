//! The owner role and the database that `migrate` works in. In production an administrator creates them; `dev`
//! creates its own.

use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, PgConnection};

use super::roles::{quote_ident, quote_literal};

/// Creates the owner, which may create roles, and its database, if they are missing.
pub async fn ensure_database(
    superuser: &PgConnectOptions,
    owner: &str,
    owner_password: &str,
    database: &str,
) -> anyhow::Result<()> {
    // The statement that creates a role contains its password.
    let mut admin = superuser
        .clone()
        .disable_statement_logging()
        .connect()
        .await?;
    let role_exists = "select exists (select 1 from pg_roles where rolname = $1)";
    if !exists(&mut admin, role_exists, owner).await? {
        let sql = format!(
            "create role {} login createrole password {}",
            quote_ident(owner),
            quote_literal(owner_password)
        );
        execute(&mut admin, sql).await?;
    }
    let database_exists = "select exists (select 1 from pg_database where datname = $1)";
    if !exists(&mut admin, database_exists, database).await? {
        let sql = format!(
            "create database {} owner {}",
            quote_ident(database),
            quote_ident(owner)
        );
        execute(&mut admin, sql).await?;
    }
    Ok(admin.close().await?)
}

async fn exists(
    connection: &mut PgConnection,
    sql: &'static str,
    name: &str,
) -> anyhow::Result<bool> {
    Ok(sqlx::query_scalar(sql)
        .bind(name)
        .fetch_one(connection)
        .await?)
}

async fn execute(connection: &mut PgConnection, sql: String) -> anyhow::Result<()> {
    sqlx::raw_sql(AssertSqlSafe(sql))
        .execute(connection)
        .await?;
    Ok(())
}
