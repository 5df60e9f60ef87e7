//! Reading requests: bodies, queries, pages, preconditions, idempotency keys.

pub(super) mod documents;
pub(super) mod extract;
pub(super) mod idempotency_key;
pub(super) mod json_body;
pub(super) mod objects;
pub(super) mod paging;
pub(super) mod precondition;
