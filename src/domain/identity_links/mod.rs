//! Merging users and unlinking identities: the rules, the limits and the results.

pub mod document;
pub mod group;
pub mod link_code;
pub mod plan;

use chrono::{DateTime, TimeDelta, Utc};
use serde::Serialize;

use crate::domain::people::user::{IdentityRecord, MAX_IDENTITIES};
use crate::domain::values::text_enum::text_enum;
use crate::error::{Code, Error, Result};
use crate::ids::{IdentityId, UserId};

/// How long an unlink can be undone.
pub const UNDO_WINDOW: TimeDelta = TimeDelta::days(30);
const MERGE_WINDOW: TimeDelta = TimeDelta::days(1);
/// The most users that may be merged into one within `MERGE_WINDOW`.
const MAX_MERGES: i64 = 20;

text_enum!(
    /// The reason of an identity's move to another user.
    MoveKind {
        Code = "code",
        Merge = "merge",
        Import = "import",
        Unlink = "unlink",
        Undo = "undo",
    }
);

impl MoveKind {
    /// Whether two users with a login each may be merged this way. Only the tenant's admin may: a code
    /// proves access to two chats, not that two logins belong to one user.
    fn may_merge_logins(self) -> bool {
        match self {
            Self::Merge | Self::Import | Self::Undo => true,
            Self::Code | Self::Unlink => false,
        }
    }

    /// The moves that count towards a user's limit per day. A tenant's document merges as many as it lists.
    pub const COUNTED: [Self; 2] = [Self::Code, Self::Merge];
}

/// Two users before their merge, with the facts that decide whether it is allowed.
#[derive(Debug, Clone)]
pub struct MergeCandidates {
    pub kind: MoveKind,
    pub into: Vec<IdentityRecord>,
    pub from: Vec<IdentityRecord>,
    /// The number of users that were merged into the survivor since `merges_since`.
    pub recent_merges: i64,
}

/// The start of the window in which merges count.
pub fn merges_since(now: DateTime<Utc>) -> DateTime<Utc> {
    now - MERGE_WINDOW
}

impl MergeCandidates {
    pub fn check(&self) -> Result<()> {
        let has_login = |side: &[IdentityRecord]| side.iter().any(|one| one.issuer.is_some());
        if !self.kind.may_merge_logins() && has_login(&self.into) && has_login(&self.from) {
            let detail = "both users sign in with an issuer: only an admin may merge them";
            return Err(Error::new(Code::MergeRequired, detail));
        }
        if self.into.len() + self.from.len() > MAX_IDENTITIES {
            let detail = format!("a user has at most {MAX_IDENTITIES} identities");
            return Err(Error::new(Code::TooManyIdentities, detail));
        }
        if MoveKind::COUNTED.contains(&self.kind) && self.recent_merges >= MAX_MERGES {
            let detail = format!("at most {MAX_MERGES} users are merged into one within a day");
            return Err(Error::new(Code::TooManyMerges, detail));
        }
        Ok(())
    }
}

/// The numbers of objects that a merge moves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub struct MergeCounts {
    pub identities: i64,
    pub session_keys: i64,
    pub conversations: i64,
    pub home_channels: i64,
    pub grants: i64,
}

/// The preview of a merge, or its result.
#[derive(Debug, Clone)]
pub struct Merge {
    /// The survivor.
    pub into: UserId,
    /// The merged user, whose id then resolves to the survivor.
    pub from: UserId,
    pub identities: Vec<IdentityRecord>,
    pub counts: MergeCounts,
}

/// An unlinked identity, and the end of the time in which the unlink can be undone.
#[derive(Debug, Clone)]
pub struct Unlink {
    pub identity_id: IdentityId,
    pub from_user: UserId,
    pub to_user: UserId,
    pub undo_until: DateTime<Utc>,
}

/// A user may unlink the sending identity or a newer one: an attacker who took over an old identity must
/// not be able to unlink the others.
pub fn check_unlink(sender: Option<&IdentityRecord>, target: &IdentityRecord) -> Result<()> {
    let is_allowed = sender.is_some_and(|sender| {
        sender.id == target.id
            || (target.linked_at, target.created_at) > (sender.linked_at, sender.created_at)
    });
    if is_allowed {
        Ok(())
    } else {
        Err(Error::new(
            Code::OlderIdentity,
            "a user may unlink the sending identity, or a newer one",
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(issuer: Option<&str>, linked: i64, created: i64) -> IdentityRecord {
        let at = |seconds| DateTime::from_timestamp(seconds, 0).unwrap();
        IdentityRecord {
            id: IdentityId::generate(),
            user_id: UserId::generate(),
            name: "web:x".parse().unwrap(),
            raw: "x".to_owned(),
            issuer: issuer.map(str::to_owned),
            imported: false,
            linked_at: at(linked),
            created_at: at(created),
        }
    }

    #[test]
    fn two_logins_many_identities_and_many_merges_are_refused() {
        let side = |logins: usize, others: usize| {
            let logins = std::iter::repeat_n(Some("idp"), logins);
            let others = std::iter::repeat_n(None, others);
            logins
                .chain(others)
                .map(|issuer| identity(issuer, 1, 1))
                .collect::<Vec<_>>()
        };
        for (kind, into, from, recent_merges, expected) in [
            (MoveKind::Code, side(1, 1), side(0, 1), 19, None),
            (
                MoveKind::Code,
                side(1, 0),
                side(1, 0),
                0,
                Some(Code::MergeRequired),
            ),
            (MoveKind::Merge, side(1, 0), side(1, 0), 0, None),
            (MoveKind::Code, side(0, 99), side(0, 1), 0, None),
            (
                MoveKind::Merge,
                side(0, 99),
                side(0, 2),
                0,
                Some(Code::TooManyIdentities),
            ),
            (
                MoveKind::Code,
                side(0, 1),
                side(0, 1),
                20,
                Some(Code::TooManyMerges),
            ),
            (MoveKind::Import, side(0, 1), side(0, 1), 20, None),
        ] {
            let candidates = MergeCandidates {
                kind,
                into,
                from,
                recent_merges,
            };
            assert_eq!(
                candidates.check().err().map(|error| error.code),
                expected,
                "{kind:?}"
            );
        }
    }

    #[test]
    fn a_user_may_unlink_the_sending_identity_and_newer_ones() {
        let old = identity(None, 1, 1);
        let new = identity(None, 5, 2);
        let code = |sender, target| check_unlink(sender, target).err().map(|error| error.code);
        assert_eq!(code(Some(&old), &old), None);
        assert_eq!(code(Some(&old), &new), None);
        assert_eq!(code(Some(&new), &old), Some(Code::OlderIdentity));
        assert_eq!(code(None, &new), Some(Code::OlderIdentity));
    }
}
