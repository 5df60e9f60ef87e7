//! Use cases of people: recognising whoever speaks, joining accounts into one person and parting them,
//! and what belongs to a person. Each runs in one transaction of the caller's and leaves the commit to
//! it, but for the counting of wrong codes, which must outlive a refusal. Locks are taken in one order:
//! users by id, slots by id, conversations by id.

mod codes;
mod erase;
mod export;
mod home_channels;
mod identity_links;
mod merge;
mod message_slot;
mod notices;
mod resolve;
mod unlink;
mod users;

pub use crate::domain::people::erasure::SETTLED_AFTER;
pub use crate::people::identity_links::{Imported, ImportedChange, import};
pub use crate::people::users::{NewUser, UserChange, create, find_present_user, update};
pub use codes::{
    Redeem, Redeemed, consume, discard_partial, mint, redeem, void, with_charged_attempt,
};
pub use erase::{ERASE_JOB, Erased, erase};
pub use export::{UserExport, export};
pub use home_channels::{NewHomeChannel, delete as delete_home_channel, put as put_home_channel};
pub use merge::{MergeRequest, check_reason, merge};
pub use resolve::{ResolveRequest, Resolved, resolve};
pub use unlink::{Unlinked, find_seen as find_identity, undo_unlink, unlink};
