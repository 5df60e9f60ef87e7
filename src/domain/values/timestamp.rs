//! Times from clients: strict RFC 3339, so that each can be stored and returned.

use std::borrow::Cow;

use chrono::{DateTime, Datelike, Utc};
use serde::de::{Deserialize, Deserializer, Error};

const RULE: &str = "must be a time of the years 0001 to 9999 like 2030-01-31T23:59:59Z";

/// For `#[serde(default, deserialize_with = "…")]`.
pub fn optional<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<DateTime<Utc>>, D::Error> {
    let text = Option::<Cow<'de, str>>::deserialize(deserializer)?;
    text.map(|text| parse(&text).ok_or_else(|| Error::custom(RULE)))
        .transpose()
}

/// Rounds down to microseconds, the precision of a column.
fn parse(text: &str) -> Option<DateTime<Utc>> {
    // The library also accepts a space here.
    if !matches!(text.as_bytes().get(10), Some(b'T' | b't')) {
        return None;
    }
    let time = DateTime::parse_from_rfc3339(text).ok()?;
    DateTime::from_timestamp_micros(time.timestamp_micros())
        .filter(|time| (1..=9999).contains(&time.year()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_normalised_as_it_is_stored() {
        for (text, expected) in [
            ("2030-01-01T00:00:00Z", "2030-01-01T00:00:00Z"),
            ("2030-01-01t01:00:00.5+01:00", "2030-01-01T00:00:00.500Z"),
            (
                "2030-01-01T00:00:00.123456789Z",
                "2030-01-01T00:00:00.123456Z",
            ),
            ("2030-12-31T23:59:60Z", "2031-01-01T00:00:00Z"),
        ] {
            let json = serde_json::to_value(parse(text)).unwrap();
            assert_eq!(json, expected, "{text}");
        }
    }

    #[test]
    fn invalid_and_out_of_range_times_are_refused() {
        for text in [
            "",
            "2030-01-01",
            "2030-01-01 00:00:00Z",
            "2030-01-01T00:00:00",
            "2030-01-01T00:00:00+0100",
            "2030-02-30T00:00:00Z",
            "+10000-01-01T00:00:00Z",
            "9999-12-31T23:59:59-01:00",
            "0000-06-01T00:00:00Z",
            "-5000-01-01T00:00:00Z",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
