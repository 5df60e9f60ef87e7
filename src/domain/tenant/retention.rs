//! How long conversations are kept, and the sweep that deletes those that are older.

use chrono::{DateTime, TimeDelta, Utc};

use crate::domain::tenant::MAX_RETENTION_DAYS;
use crate::error::FieldError;
use crate::ids::SessionId;

/// What was last written to before this is old at `now`.
pub fn cutoff(now: DateTime<Utc>, days: u32) -> DateTime<Utc> {
    now.checked_sub_signed(TimeDelta::days(i64::from(days)))
        .unwrap_or(DateTime::UNIX_EPOCH)
}

/// What is wrong with a number of days that a client gives.
pub fn check_days(days: u32, pointer: &str) -> Option<FieldError> {
    let detail = || format!("must be from 1 to {MAX_RETENTION_DAYS}, or null");
    (!(1..=MAX_RETENTION_DAYS).contains(&days)).then(|| FieldError::new(pointer, detail()))
}

/// A pass over a tenant's conversations: the running one, or the last one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sweep {
    pub cutoff: DateTime<Utc>,
    /// Also tells one sweep of a tenant from the next.
    pub started_at: DateTime<Utc>,
    pub finished_at: Option<DateTime<Utc>>,
    /// The last conversation that was looked at.
    pub reached: Option<SessionId>,
    pub examined: i64,
    pub deleted: i64,
}

impl Sweep {
    /// Whether all that it deletes is old by the tenant's present setting, too. Checked by the time of
    /// its start and not by now: clocks of nodes differ.
    pub fn matches_retention(&self, days: Option<u32>) -> bool {
        days.is_some_and(|days| self.cutoff <= cutoff(self.started_at, days))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sweep_goes_on_only_while_the_retention_is_not_longer() {
        let started_at = DateTime::UNIX_EPOCH + TimeDelta::days(1000);
        let sweep = Sweep {
            cutoff: cutoff(started_at, 30),
            started_at,
            finished_at: None,
            reached: None,
            examined: 0,
            deleted: 0,
        };
        for (days, keeps) in [
            (Some(30), true),
            (Some(1), true),
            (Some(31), false),
            (Some(u32::MAX), false),
            (None, false),
        ] {
            assert_eq!(sweep.matches_retention(days), keeps, "{days:?}");
        }
    }

    #[test]
    fn days_are_from_one_to_a_hundred_years() {
        for (days, fine) in [(0, false), (1, true), (36_500, true), (36_501, false)] {
            assert_eq!(check_days(days, "/days").is_none(), fine, "{days}");
        }
    }
}
