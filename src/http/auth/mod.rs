//! Who calls: the check of the credential, and one extractor for each kind of caller.

pub(super) mod callers;
pub(super) mod conversation;
pub(super) mod identity;
