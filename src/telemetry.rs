//! Logs and metrics. Nothing here, and nothing that calls it, may write a secret or a message's text.

use std::io::IsTerminal;

use anyhow::Context;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tracing_subscriber::EnvFilter;

use crate::config::{LogConfig, LogFormat};

/// Logs go to standard error: standard output belongs to what a command answers.
pub fn init_logs(config: &LogConfig) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(&config.filter)
        .context("THROUGHLINE_LOG: must be a filter like info or throughline=debug,info")?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    let json = match config.format {
        LogFormat::Json => true,
        LogFormat::Text => false,
        LogFormat::Auto => !std::io::stderr().is_terminal(),
    };
    let installed = if json {
        builder
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .with_span_list(false)
            .try_init()
    } else {
        builder.with_target(false).try_init()
    };
    installed.map_err(|error| anyhow::anyhow!("logging was set up already: {error}"))
}

const REQUEST_SECONDS: &str = "http_server_request_duration_seconds";
const BUCKETS: [f64; 11] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0,
];

/// Installs the process's one recorder.
pub fn init_metrics() -> anyhow::Result<PrometheusHandle> {
    let handle = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Full(REQUEST_SECONDS.to_owned()), &BUCKETS)?
        .install_recorder()?;
    metrics::describe_histogram!(
        REQUEST_SECONDS,
        metrics::Unit::Seconds,
        "Time until a request's answer began, by method, route and status"
    );
    Ok(handle)
}

const METHODS: [&str; 7] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"];

/// One answered request. Labels have few values: no tenant, no id, nothing as it was sent.
pub fn record_request(method: &str, route: &str, status: u16, seconds: f64) {
    let known = METHODS.iter().find(|known| **known == method);
    metrics::histogram!(
        REQUEST_SECONDS,
        "method" => *known.unwrap_or(&"other"),
        "route" => route.to_owned(),
        "status" => status.to_string(),
    )
    .record(seconds);
}
