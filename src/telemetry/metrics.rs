//! The metrics of a node. `ALL` is their table; nothing else is recorded. Labels have few values: no tenant, no id,
//! nothing as it was sent.

use std::time::Duration;

use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};

/// A metric, as `/metrics` and the reference describe it.
#[derive(Debug, Clone, Copy)]
pub struct Metric {
    pub name: &'static str,
    pub kind: Kind,
    pub labels: &'static [&'static str],
    pub meaning: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Counter,
    /// A histogram of seconds.
    Seconds,
}

macro_rules! metrics_table {
    ($($constant:ident, $name:literal, $kind:ident, $labels:expr, $meaning:literal;)+) => {
        $(const $constant: &str = $name;)+

        /// Every metric.
        pub const ALL: &[Metric] = &[
            $(Metric { name: $constant, kind: Kind::$kind, labels: &$labels, meaning: $meaning }),+
        ];
    };
}

metrics_table! {
    REQUEST_SECONDS, "http_server_request_duration_seconds", Seconds, ["method", "route", "status"],
        "Time until a request's answer began, by method, route and status";
    TURN_SECONDS, "turn_duration_seconds", Seconds, [],
        "Time that a turn ran on this node, its queue not counted";
    QUEUE_SECONDS, "turn_queue_seconds", Seconds, [],
        "Time between a turn's acceptance and its start on a node";
    FIRST_TOKEN_SECONDS, "turn_first_token_seconds", Seconds, [],
        "Time between the call of a model and its first token";
    TURNS, "turns_total", Counter, ["state"],
        "Turns that ended on this node, by state";
    RECOVERIES, "turn_recoveries_total", Counter, [],
        "Turns that this node took over from another";
    FENCE_REJECTIONS, "turn_fence_rejections_total", Counter, [],
        "Writes of turns that were refused because another node has the turn's lease";
    DROPPED_TRANSACTIONS, "db_dropped_transactions_total", Counter, [],
        "Transactions that ended without a commit, as after an error, and were rolled back";
}

/// Upper bounds of the histograms, in seconds.
pub const BUCKETS: [f64; 11] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0,
];

/// Installs the process's one recorder.
pub fn init_metrics() -> anyhow::Result<PrometheusHandle> {
    let handle = builder()?.install_recorder()?;
    describe();
    Ok(handle)
}

fn builder() -> Result<PrometheusBuilder, BuildError> {
    let mut builder = PrometheusBuilder::new();
    for metric in ALL.iter().filter(|metric| metric.kind == Kind::Seconds) {
        let name = Matcher::Full(metric.name.to_owned());
        builder = builder.set_buckets_for_metric(name, &BUCKETS)?;
    }
    Ok(builder)
}

fn describe() {
    for metric in ALL {
        match metric.kind {
            Kind::Counter => metrics::describe_counter!(metric.name, metric.meaning),
            Kind::Seconds => {
                metrics::describe_histogram!(metric.name, metrics::Unit::Seconds, metric.meaning);
            }
        }
    }
}

const METHODS: [&str; 7] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"];

/// One answered request.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_recorded_has_the_names_types_and_labels_of_the_table() {
        let recorder = builder().unwrap().build_recorder();
        metrics::with_local_recorder(&recorder, || {
            describe();
            record_request("GET", "/v1/tenant", 200, 0.1);
            record_turn(Duration::ZERO);
            record_queue(chrono::TimeDelta::zero());
            record_first_token(Duration::ZERO);
            count_turn("completed");
            count_recovery();
            count_fence_rejection();
            count_dropped_transaction();
        });
        let page = recorder.handle().render();
        let mut seen = 0;
        for line in page.lines().filter(|line| !line.starts_with('#')) {
            let Some((name, rest)) = line.split_once(['{', ' ']) else {
                continue;
            };
            let metric = ALL.iter().find(|metric| match metric.kind {
                Kind::Counter => name == metric.name,
                Kind::Seconds => name.strip_suffix("_count") == Some(metric.name),
            });
            let Some(metric) = metric else {
                let is_part = name.ends_with("_bucket") || name.ends_with("_sum");
                assert!(is_part, "not in the table: {line}");
                continue;
            };
            seen += 1;
            let labels = rest.split_once('}').map_or("", |(labels, _)| labels);
            let labels: Vec<&str> = labels
                .split(',')
                .filter_map(|label| Some(label.split_once('=')?.0))
                .collect();
            assert_eq!(labels, metric.labels, "{line}");
        }
        assert_eq!(seen, ALL.len(), "{page}");
    }
}
