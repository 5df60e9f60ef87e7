//! Erasing a user: the ids and names to search for after the user's rows are deleted.

use chrono::{DateTime, TimeDelta, Utc};

use crate::ids::{IdentityId, UserId};

/// Replaces the user's data in rows that also belong to others.
pub const ERASED: &str = "[erased]";

/// Every request that was running at the erasure has ended and written its rows by then.
pub const SETTLED_AFTER: TimeDelta = TimeDelta::minutes(5);

/// An erased user, of whom rows may be left.
#[derive(Debug, Clone)]
pub struct Erasure {
    pub user_id: UserId,
    /// The users that were merged into this one.
    pub merged_ids: Vec<UserId>,
    pub identity_ids: Vec<IdentityId>,
    /// The user's identities as `platform:external_id`.
    pub names: Vec<String>,
    pub erased_at: DateTime<Utc>,
}

impl Erasure {
    /// Whether a search that starts now finds the last rows.
    pub fn is_settled(&self, now: DateTime<Utc>) -> bool {
        now >= self.erased_at + SETTLED_AFTER
    }

    /// The user's id and the ids that were merged into it.
    pub fn user_ids(&self) -> Vec<UserId> {
        let merged = self.merged_ids.iter().copied();
        std::iter::once(self.user_id).chain(merged).collect()
    }

    /// The identities' ids as text: `idn_…`.
    pub fn identity_id_texts(&self) -> Vec<String> {
        self.identity_ids.iter().map(ToString::to_string).collect()
    }

    /// The users and identities a credential acted for, as the key of a stored response contains them.
    pub fn acted_for(&self) -> Vec<String> {
        let users = self.user_ids();
        let users = users.iter().map(ToString::to_string);
        users.chain(self.names.iter().cloned()).collect()
    }

    /// Whether a stored text contains an id or a name of the user.
    pub fn is_mentioned_in(&self, text: &str) -> bool {
        let ids = self.user_ids();
        let ids = ids
            .iter()
            .map(ToString::to_string)
            .chain(self.identity_id_texts());
        let names = self
            .names
            .iter()
            .map(|name| serde_json::Value::from(name.as_str()).to_string());
        ids.chain(names).any(|word| text.contains(&word))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn erasure() -> Erasure {
        Erasure {
            user_id: UserId::generate(),
            merged_ids: vec![UserId::generate()],
            identity_ids: vec![IdentityId::generate()],
            names: vec!["irc:\"5\"".to_owned()],
            erased_at: DateTime::UNIX_EPOCH,
        }
    }

    #[test]
    fn it_is_settled_when_no_earlier_request_can_be_running() {
        let erasure = erasure();
        let at = |minutes| DateTime::UNIX_EPOCH + TimeDelta::minutes(minutes);
        assert!(!erasure.is_settled(at(4)));
        assert!(erasure.is_settled(at(5)));
    }

    #[test]
    fn a_stored_text_mentions_the_user_by_any_id_or_whole_name() {
        let erasure = erasure();
        for (text, mentioned) in [
            (format!(r#"{{"user_id":"{}"}}"#, erasure.user_id), true),
            (format!(r#"["{}"]"#, erasure.merged_ids[0]), true),
            (format!(r#"["{}"]"#, erasure.identity_ids[0]), true),
            (r#"{"identities":["irc:\"5\""]}"#.to_owned(), true),
            (r#"{"identities":["irc:\"55\""]}"#.to_owned(), false),
            (format!(r#"["{}"]"#, UserId::generate()), false),
        ] {
            assert_eq!(erasure.is_mentioned_in(&text), mentioned, "{text}");
        }
    }
}
