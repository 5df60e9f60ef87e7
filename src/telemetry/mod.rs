//! Logs and metrics. Nothing here, and nothing that calls it, may write a secret or a message's text.

use std::io::IsTerminal;

use anyhow::Context;
use tracing_subscriber::EnvFilter;

use crate::config::{LogConfig, LogFormat};
use crate::error::FailedCall;
use crate::ids::TurnId;
use lines::{JsonLines, JsonMembers, ShortLines};

mod lines;
pub mod metrics;
mod spans;

pub use metrics::{
    count_dropped_transaction, count_fence_rejection, count_recovery, count_turn, init_metrics,
    record_first_token, record_queue, record_request, record_turn,
};
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
pub enum CallPurpose<'a> {
    Turn(TurnId),
    /// A request without a session, by its id.
    Request(&'a str),
}

/// The one line about a call of a model that failed.
pub fn warn_of_failed_call(failed: &FailedCall, call_purpose: CallPurpose) {
    let (turn, request_id) = match call_purpose {
        CallPurpose::Turn(turn) => (Some(turn), None),
        CallPurpose::Request(request_id) => (None, Some(request_id)),
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
