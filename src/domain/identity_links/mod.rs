//! Joining accounts into one person and parting them: what may be joined, and what it is worth telling.

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

/// How long a parting can be taken back.
pub const UNDO_WINDOW: TimeDelta = TimeDelta::days(30);
const MERGE_WINDOW: TimeDelta = TimeDelta::days(1);
/// How many people may be joined into one within that.
const MAX_MERGES: i64 = 20;

text_enum!(
    /// Why an account changed its person.
    MoveKind {
        Code = "code",
        Merge = "merge",
        Import = "import",
        Unlink = "unlink",
        Undo = "undo",
    }
);

impl MoveKind {
    /// Whether two people who each have a login may be joined this way. Only who answers for the
    /// tenant may: a code proves two chats, not that two logins are one person.
    fn joins_logins(self) -> bool {
        match self {
            Self::Merge | Self::Import | Self::Undo => true,
            Self::Code | Self::Unlink => false,
        }
    }

    /// Those of which a person has only so many a day. A document of the tenant's joins as many as it lists.
    pub const COUNTED: [Self; 2] = [Self::Code, Self::Merge];
}

/// What has to be known of two people before they are joined.
#[derive(Debug, Clone)]
pub struct MergeCandidates {
    pub kind: MoveKind,
    pub into: Vec<IdentityRecord>,
    pub from: Vec<IdentityRecord>,
    /// How many were joined into the survivor since `merges_since`.
    pub merges_lately: i64,
}

/// From when merges count.
pub fn merges_since(now: DateTime<Utc>) -> DateTime<Utc> {
    now - MERGE_WINDOW
}

impl MergeCandidates {
    pub fn check(&self) -> Result<()> {
        let has_login = |side: &[IdentityRecord]| side.iter().any(|one| one.issuer.is_some());
        if !self.kind.joins_logins() && has_login(&self.into) && has_login(&self.from) {
            let detail = "both users sign in with an issuer: only an admin may merge them";
            return Err(Error::new(Code::MergeRequired, detail));
        }
        if self.into.len() + self.from.len() > MAX_IDENTITIES {
            let detail = format!("a user has at most {MAX_IDENTITIES} identities");
            return Err(Error::new(Code::TooManyIdentities, detail));
        }
        if MoveKind::COUNTED.contains(&self.kind) && self.merges_lately >= MAX_MERGES {
            let detail = format!("at most {MAX_MERGES} users are merged into one within a day");
            return Err(Error::new(Code::TooManyMerges, detail));
        }
        Ok(())
    }
}

/// What a merge moves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub struct MergeCounts {
    pub identities: i64,
    pub session_keys: i64,
    pub conversations: i64,
    pub home_channels: i64,
    pub grants: i64,
}

/// Who joins whom; the preview of a merge, and its outcome.
#[derive(Debug, Clone)]
pub struct Merge {
    /// Stays.
    pub into: UserId,
    /// Is no more; its id answers as the survivor.
    pub from: UserId,
    pub identities: Vec<IdentityRecord>,
    pub counts: MergeCounts,
}

/// An account that was parted from its person, and until when that can be taken back.
#[derive(Debug, Clone)]
pub struct Unlink {
    pub identity_id: IdentityId,
    pub from_user: UserId,
    pub to_user: UserId,
    pub undo_until: DateTime<Utc>,
}

/// A person parts from the account that speaks or from a newer one: whoever took over an old account
/// must not be able to throw the others out.
pub fn check_unlink(speaker: Option<&IdentityRecord>, target: &IdentityRecord) -> Result<()> {
    let may = speaker.is_some_and(|speaker| {
        speaker.id == target.id
            || (target.linked_at, target.created_at) > (speaker.linked_at, speaker.created_at)
    });
    if may {
        Ok(())
    } else {
        Err(Error::new(
            Code::OlderIdentity,
            "a user may unlink the calling identity, or a newer one",
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account(issuer: Option<&str>, linked: i64, created: i64) -> IdentityRecord {
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
    fn two_logins_many_accounts_and_many_merges_are_refused() {
        let side = |logins: usize, others: usize| {
            let logins = std::iter::repeat_n(Some("idp"), logins);
            let others = std::iter::repeat_n(None, others);
            logins
                .chain(others)
                .map(|issuer| account(issuer, 1, 1))
                .collect::<Vec<_>>()
        };
        for (kind, into, from, merges_lately, refused) in [
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
            let joining = MergeCandidates {
                kind,
                into,
                from,
                merges_lately,
            };
            assert_eq!(
                joining.check().err().map(|error| error.code),
                refused,
                "{kind:?}"
            );
        }
    }

    #[test]
    fn a_person_parts_from_the_speaking_account_and_newer_ones() {
        let old = account(None, 1, 1);
        let new = account(None, 5, 2);
        let code = |speaker, target| check_unlink(speaker, target).err().map(|error| error.code);
        assert_eq!(code(Some(&old), &old), None);
        assert_eq!(code(Some(&old), &new), None);
        assert_eq!(code(Some(&new), &old), Some(Code::OlderIdentity));
        assert_eq!(code(None, &new), Some(Code::OlderIdentity));
    }
}
