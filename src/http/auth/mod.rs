//! Who calls: the check of the credential, and one extractor for each kind of caller.

pub(super) mod conversation;
pub(super) mod credential;
pub(super) mod identity;
pub(super) mod keys;
pub(super) mod middleware;
