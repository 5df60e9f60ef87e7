//! Erasing a person: what has to be looked for after their rows are gone.

use chrono::{DateTime, TimeDelta, Utc};

use crate::ids::{IdentityId, UserId};

/// What stands where something of theirs stood, in what is others' too.
pub const ERASED: &str = "[erased]";

/// Whatever was under way when a person was erased has ended by then, and written what it writes.
pub const SETTLED_AFTER: TimeDelta = TimeDelta::minutes(5);

/// A person who is no more, and of whom something may be left.
#[derive(Debug, Clone)]
pub struct Erasure {
    pub user_id: UserId,
    /// Those who had been merged into them.
    pub merged_ids: Vec<UserId>,
    pub identity_ids: Vec<IdentityId>,
    /// Their accounts as `platform:external_id`.
    pub names: Vec<String>,
    pub erased_at: DateTime<Utc>,
}

impl Erasure {
    /// Whether one look that begins now finds the last of it.
    pub fn is_settled(&self, now: DateTime<Utc>) -> bool {
        now >= self.erased_at + SETTLED_AFTER
    }

    /// Every id the person had, and the ids that became theirs.
    pub fn user_ids(&self) -> Vec<UserId> {
        let merged = self.merged_ids.iter().copied();
        std::iter::once(self.user_id).chain(merged).collect()
    }

    /// As text: `idn_…`.
    pub fn identity_id_texts(&self) -> Vec<String> {
        self.identity_ids.iter().map(ToString::to_string).collect()
    }

    /// For whom a credential acted: what stands behind it in the name of a stored answer.
    pub fn acted_for(&self) -> Vec<String> {
        let users = self.user_ids();
        let users = users.iter().map(ToString::to_string);
        users.chain(self.names.iter().cloned()).collect()
    }

    /// Whether a text that was stored tells of the person.
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
    fn it_is_settled_when_nothing_from_before_can_be_under_way() {
        let erasure = erasure();
        let at = |minutes| DateTime::UNIX_EPOCH + TimeDelta::minutes(minutes);
        assert!(!erasure.is_settled(at(4)));
        assert!(erasure.is_settled(at(5)));
    }

    #[test]
    fn a_stored_text_mentions_them_by_any_id_or_whole_name() {
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
