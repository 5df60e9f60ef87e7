//! How a log line is written: as JSON with the fields of its spans, or short for a developer's terminal.

use std::fmt;
use std::io;

use serde::Serialize;
use tracing::field::{Field, Visit};
use tracing::span::Record;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, FormattedFields};
use tracing_subscriber::registry::LookupSpan;

use super::REQUESTS;

/// Fields as members of a JSON object, a line each: `,"name":value`. JSON has no line end within a value, so that a
/// span's members can be told apart again.
pub struct JsonMembers;

impl<'writer> FormatFields<'writer> for JsonMembers {
    fn format_fields<R: RecordFields>(&self, writer: Writer<'writer>, fields: R) -> fmt::Result {
        let mut members = MemberWriter::new(writer);
        fields.record(&mut members);
        members.outcome
    }

    fn add_fields(
        &self,
        current: &'writer mut FormattedFields<Self>,
        fields: &Record<'_>,
    ) -> fmt::Result {
        self.format_fields(current.as_writer(), fields)
    }
}

struct MemberWriter<'w> {
    writer: Writer<'w>,
    outcome: fmt::Result,
}

impl<'w> MemberWriter<'w> {
    fn new(writer: Writer<'w>) -> Self {
        Self {
            writer,
            outcome: Ok(()),
        }
    }

    fn write(&mut self, field: &Field, value: impl Serialize) {
        if self.outcome.is_ok() {
            self.outcome = self.try_write(field.name(), value);
        }
    }

    fn try_write(&mut self, name: &str, value: impl Serialize) -> fmt::Result {
        self.writer.write_str(",\"")?;
        self.writer.write_str(name.trim_start_matches("r#"))?;
        self.writer.write_str("\":")?;
        serde_json::to_writer(JsonOut(&mut self.writer), &value).map_err(|_| fmt::Error)?;
        self.writer.write_char('\n')
    }
}

impl Visit for MemberWriter<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.write(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.write(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.write(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.write(field, value);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.write(field, value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.write(field, format!("{value:?}"));
    }
}

/// Hands what serde_json writes to a formatter: it splits no character.
struct JsonOut<'a, 'w>(&'a mut Writer<'w>);

impl io::Write for JsonOut<'_, '_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = std::str::from_utf8(bytes).map_err(io::Error::other)?;
        self.0.write_str(text).map_err(io::Error::other)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// One JSON object a line: time, level, the event's fields, its target, and the fields of its spans. Where two have a
/// name in common, the event's is written, then the inner span's.
pub struct JsonLines;

impl<S> FormatEvent<S, JsonMembers> for JsonLines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, JsonMembers>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let metadata = event.metadata();
        writer.write_str("{\"timestamp\":\"")?;
        SystemTime.format_time(&mut writer)?;
        write!(writer, "\",\"level\":\"{}\"", metadata.level())?;
        let mut fields = String::new();
        context.format_fields(Writer::new(&mut fields), event)?;
        let mut written = Vec::with_capacity(16);
        written.extend(["timestamp", "level", "target"]);
        write_members(&mut writer, &fields, &mut written)?;
        write!(writer, ",\"target\":\"{}\"", metadata.target())?;
        // Owned: the text of a span is behind a lock only while it is read.
        let mut of_spans = String::new();
        for span in context.event_scope().into_iter().flatten() {
            let extensions = span.extensions();
            if let Some(fields) = extensions.get::<FormattedFields<JsonMembers>>() {
                of_spans.push_str(&fields.fields);
            }
        }
        write_members(&mut writer, &of_spans, &mut written)?;
        writer.write_str("}\n")
    }
}

/// Writes the members whose names are not there yet.
fn write_members<'a>(
    writer: &mut Writer<'_>,
    members: &'a str,
    written: &mut Vec<&'a str>,
) -> fmt::Result {
    for member in members.lines() {
        let name = member.split('"').nth(1).unwrap_or_default();
        // Few: looking through them is quicker than hashing.
        if !written.contains(&name) {
            written.push(name);
            writer.write_str(member)?;
        }
    }
    Ok(())
}

/// Lines for a developer's terminal: `POST /v1/inbound 200 12ms`. Other events have level, text and fields.
pub struct ShortLines;

impl<S, N> FormatEvent<S, N> for ShortLines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        if event.metadata().target() != REQUESTS {
            write_level(&mut writer, *event.metadata().level())?;
            context.format_fields(writer.by_ref(), event)?;
            return writeln!(writer);
        }
        let mut line = RequestLine::default();
        event.record(&mut line);
        writeln!(writer, "{line}")
    }
}

fn write_level(writer: &mut Writer<'_>, level: Level) -> fmt::Result {
    if !writer.has_ansi_escapes() {
        return write!(writer, "{level:>5} ");
    }
    let colour = match level {
        Level::ERROR => 31,
        Level::WARN => 33,
        Level::INFO => 32,
        Level::DEBUG => 34,
        Level::TRACE => 35,
    };
    write!(writer, "\x1b[{colour}m{level:>5}\x1b[0m ")
}

/// The fields of a request's line that a developer reads.
#[derive(Debug, Default)]
struct RequestLine {
    method: String,
    route: String,
    status: u64,
    code: Option<String>,
    duration_ms: f64,
}

impl fmt::Display for RequestLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {} {} {:.0}ms",
            self.method, self.route, self.status, self.duration_ms
        )?;
        match &self.code {
            Some(code) => write!(f, " code={code}"),
            None => Ok(()),
        }
    }
}

impl Visit for RequestLine {
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "method" => self.method = value.to_owned(),
            "route" => self.route = value.to_owned(),
            "code" => self.code = Some(value.to_owned()),
            _ => {}
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "status" {
            self.status = value;
        }
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        if field.name() == "duration_ms" {
            self.duration_ms = value;
        }
    }

    fn record_debug(&mut self, _field: &Field, _value: &dyn fmt::Debug) {}
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use serde_json::Value;
    use tracing_subscriber::fmt::MakeWriter;

    use super::*;

    #[test]
    fn a_request_is_one_short_line_with_a_code_only_where_it_failed() {
        let mut line = RequestLine {
            method: "POST".to_owned(),
            route: "/v1/inbound".to_owned(),
            status: 200,
            code: None,
            duration_ms: 12.34,
        };
        assert_eq!(line.to_string(), "POST /v1/inbound 200 12ms");
        line.status = 403;
        line.code = Some("origin_not_allowed".to_owned());
        assert_eq!(
            line.to_string(),
            "POST /v1/inbound 403 12ms code=origin_not_allowed"
        );
    }

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl<'a> MakeWriter<'a> for Lines {
        type Writer = Self;

        fn make_writer(&'a self) -> Self {
            self.clone()
        }
    }

    impl Lines {
        fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    fn log_something() {
        let outer = tracing::info_span!(
            "request",
            request_id = "r\"1",
            tenant = tracing::field::Empty
        );
        let _entered = outer.enter();
        outer.record("tenant", tracing::field::display("ten_1"));
        let inner = tracing::info_span!("turn", turn = "trn_1", tenant = "ten_2");
        let _entered = inner.enter();
        tracing::warn!(count = 3, turn = "trn_3", "two\nlines \"quoted\" é");
    }

    #[test]
    fn a_json_line_has_the_fields_of_its_spans_once_and_the_nearest_wins() {
        let lines = Lines::default();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(lines.clone())
            .fmt_fields(JsonMembers)
            .event_format(JsonLines)
            .finish();
        tracing::subscriber::with_default(subscriber, log_something);
        let text = lines.text();
        assert_eq!(text.lines().count(), 1, "{text}");
        assert_eq!(text.matches("\"tenant\"").count(), 1, "{text}");
        let line: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(line["message"], "two\nlines \"quoted\" é");
        assert_eq!(line["level"], "WARN");
        assert_eq!(line["count"], 3);
        assert_eq!(line["turn"], "trn_3");
        assert_eq!(line["tenant"], "ten_2");
        assert_eq!(line["request_id"], "r\"1");
    }

    #[test]
    fn a_short_line_has_no_spans() {
        let lines = Lines::default();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(lines.clone())
            .with_ansi(false)
            .event_format(ShortLines)
            .finish();
        tracing::subscriber::with_default(subscriber, log_something);
        let text = lines.text();
        assert!(text.starts_with(" WARN two"), "{text}");
        assert!(text.contains("turn=\"trn_3\""), "{text}");
        assert!(!text.contains("request_id"), "{text}");
    }
}
