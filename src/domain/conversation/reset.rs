//! Automatic resets of a conversation: after an idle time of the user, or at an hour of the user's day. A
//! pure function of its times, which never reads a clock.

use std::fmt;
use std::str::FromStr;

use chrono::{DateTime, Days, NaiveDate, NaiveTime, TimeDelta, TimeZone as _, Utc};
use chrono_tz::{GapInfo, Tz};
use serde::{Serialize, Serializer};

use crate::domain::people::platform::PlatformScope;
use crate::domain::tenant::agent::{ChatType, ResetMode, ResetPolicy, ResetRule};
use crate::domain::values::text_enum::text_enum;

const MAX_ZONE_CHARS: usize = 64;

impl ResetPolicy {
    /// The most specific rule: of the platform's scope, the platform, the type of chat, or the agent.
    pub fn rule_for(
        &self,
        platform: Option<&PlatformScope>,
        chat_type: Option<ChatType>,
    ) -> ResetRule {
        let of_platform = platform.and_then(|platform| {
            let scoped = self.by_platform.get(&platform.to_string());
            scoped.or_else(|| self.by_platform.get(platform.platform()))
        });
        let of_chat_type = || chat_type.and_then(|chat_type| self.by_chat_type.get(&chat_type));
        of_platform
            .or_else(of_chat_type)
            .cloned()
            .unwrap_or(ResetRule {
                mode: self.mode,
                idle_minutes: self.idle_minutes,
                at_hour: self.at_hour,
            })
    }
}

text_enum!(
    /// Why a conversation was reset.
    ResetReason { Idle = "idle", Daily = "daily" }
);

/// Whether a message at `now` resets a conversation whose user last wrote at `last_user_at`, and for
/// which reason: the earlier of the two.
pub fn due_reset(
    rule: &ResetRule,
    zone: TimeZone,
    last_user_at: DateTime<Utc>,
    now: DateTime<Utc>,
) -> Option<ResetReason> {
    let idle = || {
        let idle_for = TimeDelta::minutes(i64::from(rule.idle_minutes));
        let at = last_user_at.checked_add_signed(idle_for)?;
        Some((at, ResetReason::Idle))
    };
    let daily = || {
        let at = boundary_after(last_user_at, zone, rule.at_hour)?;
        Some((at, ResetReason::Daily))
    };
    let (ended_at, reason) = match rule.mode {
        ResetMode::None => None,
        ResetMode::Idle => idle(),
        ResetMode::Daily => daily(),
        ResetMode::Both => idle().into_iter().chain(daily()).min_by_key(|(at, _)| *at),
    }?;
    // Both times are after the user's last message, so a message that another node's clock puts into
    // the future resets nothing.
    (ended_at <= now).then_some(reason)
}

/// The first boundary after `time`. It has passed at `now` exactly if the latest boundary up to `now` is
/// after `time`, and only the first decides whether the day or the idle time ended earlier.
fn boundary_after(time: DateTime<Utc>, zone: TimeZone, at_hour: u32) -> Option<DateTime<Utc>> {
    let today = time.with_timezone(&zone.0).date_naive();
    // Today's may have passed, and tomorrow's too where clocks went back over midnight; tomorrow may also
    // be a day that the zone skipped.
    (0..=2)
        .filter_map(|days| boundary_of(today.checked_add_days(Days::new(days))?, zone, at_hour))
        .find(|boundary| *boundary > time)
}

/// The first time of the hour on a local day; `None` for a day that the zone skipped.
fn boundary_of(day: NaiveDate, zone: TimeZone, at_hour: u32) -> Option<DateTime<Utc>> {
    let local = day.and_hms_opt(at_hour, 0, 0)?;
    if let Some(first) = zone.0.from_local_datetime(&local).earliest() {
        return Some(first.to_utc());
    }
    let gap = GapInfo::new(&local, &zone.0)?;
    let (from, _) = gap.begin?;
    let until = gap.end?;
    let day_exists = from > day.and_time(NaiveTime::MIN) || until.date_naive() == day;
    day_exists.then(|| until.to_utc())
}

/// A time zone, named as in the IANA database.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TimeZone(Tz);

wire_text!(TimeZone, "^[A-Za-z0-9_+/-]+$", 1, MAX_ZONE_CHARS);

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must be a time zone of the IANA database, like Europe/Berlin")]
pub struct UnknownTimeZone;

impl TimeZone {
    pub const UTC: Self = Self(Tz::UTC);

    pub fn name(self) -> &'static str {
        self.0.name()
    }

    /// Reads a column. UTC for null and for a name that this version lacks: a stored name must never
    /// keep a user from writing.
    pub fn from_column(stored: Option<&str>) -> Self {
        stored
            .and_then(|name| name.parse().ok())
            .unwrap_or(Self::UTC)
    }
}

impl FromStr for TimeZone {
    type Err = UnknownTimeZone;

    fn from_str(text: &str) -> Result<Self, UnknownTimeZone> {
        text.parse().map(Self).map_err(|_| UnknownTimeZone)
    }
}

impl fmt::Display for TimeZone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for TimeZone {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::json;

    use super::*;

    const SECOND: TimeDelta = TimeDelta::seconds(1);
    const HOUR: TimeDelta = TimeDelta::hours(1);

    fn rule(mode: ResetMode, idle_minutes: u32, at_hour: u32) -> ResetRule {
        ResetRule {
            mode,
            idle_minutes,
            at_hour,
        }
    }

    fn daily(at_hour: u32) -> ResetRule {
        rule(ResetMode::Daily, 1, at_hour)
    }

    fn zone(name: &str) -> TimeZone {
        name.parse().unwrap()
    }

    /// `2026-03-29 01:00`, with or without seconds, in UTC.
    fn at(text: &str) -> DateTime<Utc> {
        let seconds = if text.len() == 16 { ":00" } else { "" };
        format!("{text}{seconds}Z").parse().unwrap()
    }

    #[test]
    fn the_most_specific_rule_applies() {
        let policy: ResetPolicy = serde_json::from_value(json!({
            "mode": "both", "idle_minutes": 1, "at_hour": 1,
            "by_platform": {
                "slack": {"mode": "idle", "idle_minutes": 2},
                "slack@T1": {"mode": "daily", "at_hour": 3},
                "irc@a": {"mode": "none"},
            },
            "by_chat_type": {"dm": {"mode": "idle", "idle_minutes": 5}},
        }))
        .unwrap();
        let own = rule(ResetMode::Both, 1, 1);
        let slack = rule(ResetMode::Idle, 2, 4);
        let t1 = rule(ResetMode::Daily, 1440, 3);
        let irc_a = rule(ResetMode::None, 1440, 4);
        let dm = rule(ResetMode::Idle, 5, 4);
        let check = |platform: Option<&str>, chat_type, expected: &ResetRule| {
            let parsed: Option<PlatformScope> = platform.map(|text| text.parse().unwrap());
            let found = policy.rule_for(parsed.as_ref(), chat_type);
            assert_eq!(&found, expected, "{platform:?} {chat_type:?}");
        };
        for (platform, chat_type, expected) in [
            (None, None, &own),
            (None, Some(ChatType::Dm), &dm),
            (None, Some(ChatType::Group), &own),
            (Some("slack@T1"), Some(ChatType::Dm), &t1),
            (Some("slack@T1"), None, &t1),
            (Some("slack@T2"), Some(ChatType::Dm), &slack),
            (Some("slack"), Some(ChatType::Thread), &slack),
            (Some("irc@a"), Some(ChatType::Dm), &irc_a),
            (Some("irc@b"), Some(ChatType::Dm), &dm),
            (Some("irc"), Some(ChatType::Channel), &own),
            (Some("telegram"), Some(ChatType::Dm), &dm),
            (Some("telegram"), None, &own),
        ] {
            check(platform, chat_type, expected);
        }
        let default = ResetPolicy::default().rule_for(None, Some(ChatType::Dm));
        assert_eq!(default, rule(ResetMode::None, 1440, 4));
    }

    #[test]
    fn a_conversation_ends_at_the_earlier_time() {
        use ResetMode::{Both, Daily, Idle, None as Never};
        const YEAR: u32 = 365 * 24 * 60;
        let check = |mode, idle_minutes, at_hour, last: &str, now: &str, expected| {
            let rule = rule(mode, idle_minutes, at_hour);
            let found = due_reset(&rule, TimeZone::UTC, at(last), at(now));
            assert_eq!(found, expected, "{rule:?} {last} {now}");
        };
        let idle = Some(ResetReason::Idle);
        let daily = Some(ResetReason::Daily);
        for (mode, idle_minutes, at_hour, last, now, expected) in [
            (Never, 1, 0, "2026-05-01 10:00", "2027-05-01 10:00", None),
            (Idle, 1, 4, "2026-05-01 10:00", "2026-05-01 10:00:59", None),
            (Idle, 1, 4, "2026-05-01 10:00", "2026-05-01 10:01", idle),
            (Idle, 30, 4, "2026-05-01 10:00:01", "2026-05-01 10:30", None),
            (Idle, 30, 4, "2026-05-01 10:00", "2026-05-01 10:30", idle),
            (Idle, YEAR, 4, "2026-05-01 10:00", "2027-05-01 09:59", None),
            (Idle, YEAR, 4, "2026-05-01 10:00", "2027-05-01 10:00", idle),
            (Daily, 1, 4, "2026-05-01 03:59", "2026-05-01 04:00", daily),
            (Daily, 1, 4, "2026-05-01 04:00", "2026-05-02 03:59:59", None),
            (Daily, 1, 4, "2026-05-01 04:00", "2026-05-02 04:00", daily),
            (Daily, 1, 4, "2026-05-01 04:00", "2026-07-01 03:00", daily),
            (Daily, 1, 0, "2026-12-31 23:59", "2027-01-01 00:00", daily),
            (Daily, 1, 24, "2026-05-01 04:00", "2026-07-01 03:00", None),
            (Both, 60, 4, "2026-05-01 03:30", "2026-05-01 03:59:59", None),
            (Both, 60, 4, "2026-05-01 03:30", "2026-05-01 04:15", daily),
            (Both, 60, 4, "2026-05-01 03:30", "2026-05-01 04:45", daily),
            (Both, 60, 4, "2026-05-01 02:30", "2026-05-01 03:45", idle),
            (Both, 60, 4, "2026-05-01 02:30", "2026-05-01 04:15", idle),
            (Both, 60, 4, "2026-05-01 03:00", "2026-05-01 04:00", idle),
            // The idle time ended before the latest boundary, and after the first.
            (Both, 1440, 4, "2026-05-01 10:00", "2026-05-03 09:00", daily),
            // Clocks of nodes differ.
            (Idle, 1, 4, "2026-05-01 10:05", "2026-05-01 10:00", None),
            (Daily, 1, 4, "2026-05-01 04:01", "2026-05-01 03:59", None),
            (Daily, 1, 4, "2026-05-02 04:01", "2026-05-01 04:01", None),
            (Both, 1, 4, "2026-05-02 04:01", "2026-05-01 04:01", None),
        ] {
            check(mode, idle_minutes, at_hour, last, now, expected);
        }
    }

    #[test]
    fn a_day_ends_at_the_hour_of_the_zone() {
        /// `zone hour: all boundaries of some days, in UTC`.
        fn check(line: &str) {
            let (rule, boundaries) = line.split_once(": ").unwrap();
            let (name, at_hour) = rule.split_once(' ').unwrap();
            let zone = zone(name);
            let rule = daily(at_hour.parse().unwrap());
            let due = |last, now| due_reset(&rule, zone, last, now);
            let boundaries: Vec<_> = boundaries.split(", ").map(at).collect();
            for &boundary in &boundaries {
                let reset = due(boundary - SECOND, boundary);
                assert_eq!(reset, Some(ResetReason::Daily), "{line}");
                assert_eq!(due(boundary, boundary), None, "{line}");
            }
            for pair in boundaries.windows(2) {
                let boundary = pair[0];
                let next = pair[1];
                for minute in 0..(next - boundary).num_minutes() {
                    let time = boundary + TimeDelta::minutes(minute);
                    assert_eq!(due(boundary, time), None, "{line} {time}");
                    assert_eq!(due(time, next - SECOND), None, "{line} {time}");
                    let reset = due(time, next);
                    assert_eq!(reset, Some(ResetReason::Daily), "{line} {time}");
                }
            }
        }
        for line in [
            "UTC 4: 2026-02-28 04:00, 2026-03-01 04:00, 2026-03-02 04:00",
            "Asia/Kolkata 4: 2026-05-01 22:30, 2026-05-02 22:30, 2026-05-03 22:30",
            // 02:00 to 03:00 is skipped, or repeated.
            "Europe/Berlin 2: 2026-03-28 01:00, 2026-03-29 01:00, 2026-03-30 00:00",
            "Europe/Berlin 3: 2026-03-28 02:00, 2026-03-29 01:00, 2026-03-30 01:00",
            "Europe/Berlin 2: 2026-10-24 00:00, 2026-10-25 00:00, 2026-10-26 01:00",
            "Europe/Berlin 3: 2026-10-24 01:00, 2026-10-25 02:00, 2026-10-26 02:00",
            "America/New_York 2: 2026-03-07 07:00, 2026-03-08 07:00, 2026-03-09 06:00",
            "America/New_York 1: 2026-10-31 05:00, 2026-11-01 05:00, 2026-11-02 06:00",
            // Half an hour.
            "Australia/Lord_Howe 2: 2026-10-02 15:30, 2026-10-03 15:30, 2026-10-04 15:00",
            "Australia/Lord_Howe 2: 2026-04-03 15:00, 2026-04-04 15:30, 2026-04-05 15:30",
            // 00:00 to 01:00 is skipped; in Cairo 23:00 to 24:00 is repeated in autumn.
            "America/Sao_Paulo 0: 2018-11-03 03:00, 2018-11-04 03:00, 2018-11-05 02:00",
            "Asia/Beirut 0: 2026-03-27 22:00, 2026-03-28 22:00, 2026-03-29 21:00",
            "Africa/Cairo 0: 2026-04-22 22:00, 2026-04-23 22:00, 2026-04-24 21:00",
            "Africa/Cairo 0: 2026-10-28 21:00, 2026-10-29 22:00, 2026-10-30 22:00",
            "Africa/Cairo 23: 2026-10-28 20:00, 2026-10-29 20:00, 2026-10-30 21:00",
            // 23:00 to 24:00 is skipped: that day ends when the next begins.
            "America/Nuuk 23: 2026-03-28 01:00, 2026-03-29 01:00, 2026-03-30 00:00",
            // At 00:01 the clock went back to 23:01.
            "America/St_Johns 0: 2010-11-06 02:30, 2010-11-07 02:30, 2010-11-08 03:30",
            // 30 December was skipped.
            "Pacific/Apia 4: 2011-12-29 14:00, 2011-12-30 14:00, 2011-12-31 14:00",
            "Pacific/Apia 0: 2011-12-29 10:00, 2011-12-30 10:00, 2011-12-31 10:00",
            "Pacific/Apia 23: 2011-12-29 09:00, 2011-12-30 09:00, 2011-12-31 09:00",
        ] {
            check(line);
        }
    }

    #[test]
    fn every_local_day_has_one_boundary() {
        fn check(name: &str, from: &str, at_hour: u32) {
            let zone = zone(name);
            let from = at(from);
            let rule = daily(at_hour);
            let local = |time: DateTime<Utc>| time.with_timezone(&zone.0).naive_local();
            let mut days = BTreeSet::new();
            let mut ended = Vec::new();
            for hour in 0..2 * 365 * 24 {
                let before = from + HOUR * hour;
                let after = from + HOUR * (hour + 1);
                days.insert(local(before).date());
                if due_reset(&rule, zone, before, after).is_some() {
                    // A gap may move the boundary, even into the next day.
                    ended.push((local(after) - HOUR * at_hour.cast_signed()).date());
                }
            }
            // The first and the last day are cut off.
            let first = days.pop_first().unwrap();
            let last = days.pop_last().unwrap();
            ended.retain(|day| first < *day && *day < last);
            assert_eq!(ended, Vec::from_iter(days), "{name} {at_hour}");
        }
        for (name, from) in [
            ("UTC", "2026-01-01 00:00"),
            ("Europe/Berlin", "2026-01-01 00:00"),
            ("America/New_York", "2026-01-01 00:00"),
            ("America/Nuuk", "2026-01-01 00:00"),
            ("Africa/Cairo", "2026-01-01 00:00"),
            ("Asia/Kolkata", "2026-01-01 00:00"),
            ("Australia/Lord_Howe", "2026-01-01 00:00"),
            ("America/Sao_Paulo", "2018-01-01 00:00"),
            ("Pacific/Apia", "2011-01-01 00:00"),
        ] {
            for at_hour in [0, 2, 23] {
                check(name, from, at_hour);
            }
        }
    }

    #[test]
    fn a_time_zone_is_a_name_of_the_database() {
        let pattern = |c: char| c.is_ascii_alphanumeric() || "_+/-".contains(c);
        for listed in chrono_tz::TZ_VARIANTS {
            let name = listed.name();
            assert!(
                name.len() <= MAX_ZONE_CHARS && name.chars().all(pattern),
                "{name}"
            );
            let zone: TimeZone = serde_json::from_value(json!(name)).unwrap();
            assert_eq!(
                (zone.to_string().as_str(), json!(zone)),
                (name, json!(name))
            );
        }
        for bad in [
            "",
            "Berlin",
            "europe/berlin",
            "Europe/Berlin ",
            "+01:00",
            "Mars/Base",
        ] {
            assert_eq!(bad.parse::<TimeZone>(), Err(UnknownTimeZone), "{bad}");
        }
        for (stored, expected) in [
            (None, "UTC"),
            (Some(""), "UTC"),
            (Some("Mars/Base"), "UTC"),
            (Some("Asia/Calcutta"), "Asia/Calcutta"),
        ] {
            assert_eq!(TimeZone::from_column(stored).name(), expected);
        }
        assert_eq!(TimeZone::default(), TimeZone::UTC);
    }

    #[test]
    fn a_reason_is_stored_as_it_is_serialized() {
        for reason in [ResetReason::Idle, ResetReason::Daily] {
            assert_eq!(json!(reason), reason.as_str());
        }
    }
}
