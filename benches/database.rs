//! The database behind `throughline dev`, for benches that seed rows and run pgbench.

use anyhow::Context;
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions, PgConnection};
use throughline::ids::TenantId;
use url::Url;

use crate::dev::Dev;

/// The demo tenant.
pub fn tenant_id(dev: &Dev) -> anyhow::Result<TenantId> {
    let text = dev.ready["tenant_id"].as_str().context("no tenant_id")?;
    text.parse().context("tenant_id")
}

/// The URL of Postgres with the service's login.
pub fn database_url(dev: &Dev) -> anyhow::Result<Url> {
    let text = dev.ready["database_url"].as_str();
    Ok(Url::parse(text.context("no database_url")?)?)
}

/// The superuser's connection, which bypasses row-level security.
pub async fn superuser(dev: &Dev) -> anyhow::Result<PgConnection> {
    let url = database_url(dev)?;
    let state = std::fs::read_to_string(dev.dir.join("dev.json"))?;
    let state: serde_json::Value = serde_json::from_str(&state)?;
    let password = state["superuser_password"].as_str();
    let options = PgConnectOptions::new()
        .host(url.host_str().context("no host")?)
        .port(url.port().context("no port")?)
        .username("postgres")
        .password(password.context("no superuser_password")?)
        .database(url.path().trim_start_matches('/'));
    Ok(options.connect().await?)
}
