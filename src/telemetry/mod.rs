//! Logs and metrics. Nothing here, and nothing that calls it, may write a secret or a message's text.

use std::io::IsTerminal;
use std::time::Duration;

use anyhow::Context;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tracing_subscriber::EnvFilter;

use crate::config::{LogConfig, LogFormat};
use crate::error::FailedCall;
use crate::ids::TurnId;
use lines::{JsonLines, JsonMembers, ShortLines};

mod lines;
mod spans;

pub use spans::{record_tenant, request_span, turn_span};

/// The target of the one line about each request.
pub const REQUESTS: &str = "throughline::telemetry::requests";

/// Logs go to standard error: standard output belongs to what a command answers.
pub fn init_logs(config: &LogConfig) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(filter_text(&config.filter))
        .context("THROUGHLINE_LOG: must be a filter like info or throughline=debug,info")?;
    let is_terminal = std::io::stderr().is_terminal();
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    // On a terminal the library decides: it reads NO_COLOR.
    let builder = if is_terminal {
        builder
    } else {
        builder.with_ansi(false)
    };
    let format = match config.format {
        LogFormat::Auto if is_terminal => LogFormat::Text,
        LogFormat::Auto => LogFormat::Json,
        chosen @ (LogFormat::Json | LogFormat::Text | LogFormat::Short) => chosen,
    };
    let installed = match format {
        LogFormat::Json | LogFormat::Auto => builder
            .fmt_fields(JsonMembers)
            .event_format(JsonLines)
            .try_init(),
        LogFormat::Text => builder.with_target(false).try_init(),
        LogFormat::Short => builder.event_format(ShortLines).try_init(),
    };
    installed.map_err(|error| anyhow::anyhow!("logging was set up already: {error}"))
}

/// The HTTP library logs an ERROR for each request that it cannot read, and anybody can send those: they are
/// answered with 400, and logged only where somebody asks for it by name.
fn filter_text(filter: &str) -> String {
    if filter.contains("actix_http") {
        return filter.to_owned();
    }
    format!("{filter},actix_http::h1::dispatcher=off")
}

/// What a model was called for.
#[derive(Debug, Clone, Copy)]
pub enum CalledFor<'a> {
    Turn(TurnId),
    /// A request without a session, by its id.
    Request(&'a str),
}

/// The one line about a call of a model that failed.
pub fn warn_of_failed_call(failed: &FailedCall, called_for: CalledFor) {
    let (turn, request_id) = match called_for {
        CalledFor::Turn(turn) => (Some(turn), None),
        CalledFor::Request(request_id) => (None, Some(request_id)),
    };
    tracing::warn!(
        tenant = %failed.tenant_id,
        agent = %failed.agent,
        turn = turn.map(tracing::field::display),
        request_id,
        host = %failed.host,
        reason = %failed.reason,
        "model call failed"
    );
}

const REQUEST_SECONDS: &str = "http_server_request_duration_seconds";
const BUCKETS: [f64; 11] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0,
];

const TURN_SECONDS: &str = "turn_duration_seconds";
const QUEUE_SECONDS: &str = "turn_queue_seconds";
const FIRST_TOKEN_SECONDS: &str = "turn_first_token_seconds";
const TURNS: &str = "turns_total";
const RECOVERIES: &str = "turn_recoveries_total";
const FENCE_REJECTIONS: &str = "turn_fence_rejections_total";
const DROPPED_TRANSACTIONS: &str = "db_dropped_transactions_total";

/// Installs the process's one recorder.
pub fn init_metrics() -> anyhow::Result<PrometheusHandle> {
    let mut builder = PrometheusBuilder::new();
    for name in [
        REQUEST_SECONDS,
        TURN_SECONDS,
        QUEUE_SECONDS,
        FIRST_TOKEN_SECONDS,
    ] {
        builder = builder.set_buckets_for_metric(Matcher::Full(name.to_owned()), &BUCKETS)?;
    }
    let handle = builder.install_recorder()?;
    for (name, told) in [
        (
            TURN_SECONDS,
            "Time that a turn ran on this node, its queue not counted",
        ),
        (
            QUEUE_SECONDS,
            "Time between a turn's acceptance and its start on a node",
        ),
        (
            FIRST_TOKEN_SECONDS,
            "Time between the call of a model and its first word",
        ),
    ] {
        metrics::describe_histogram!(name, metrics::Unit::Seconds, told);
    }
    for (name, told) in [
        (TURNS, "Turns that ended on this node, by state"),
        (RECOVERIES, "Turns that this node took over from another"),
        (
            FENCE_REJECTIONS,
            "Writes of turns that were refused because another has the turn",
        ),
        (
            DROPPED_TRANSACTIONS,
            "Transactions that ended without a commit, as after an error, and were rolled back",
        ),
    ] {
        metrics::describe_counter!(name, told);
    }
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

/// A turn that ran on this node.
pub fn record_turn(time: Duration) {
    metrics::histogram!(TURN_SECONDS).record(time.as_secs_f64());
}

/// How long a turn waited before it ran.
pub fn record_queue(waited: chrono::TimeDelta) {
    let seconds = waited.to_std().unwrap_or_default().as_secs_f64();
    metrics::histogram!(QUEUE_SECONDS).record(seconds);
}

pub fn record_first_token(time: Duration) {
    metrics::histogram!(FIRST_TOKEN_SECONDS).record(time.as_secs_f64());
}

pub fn count_turn(state: &'static str) {
    metrics::counter!(TURNS, "state" => state).increment(1);
}

pub fn count_recovery() {
    metrics::counter!(RECOVERIES).increment(1);
}

pub fn count_fence_rejection() {
    metrics::counter!(FENCE_REJECTIONS).increment(1);
}

pub fn count_dropped_transaction() {
    metrics::counter!(DROPPED_TRANSACTIONS).increment(1);
}
