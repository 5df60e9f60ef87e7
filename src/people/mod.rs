//! Use cases of users and their identities: recognise a sender, merge and unlink, and keep what belongs to a
//! user. All functions are steps: they take `&mut TenantTx` and never commit. One is an operation:
//! `with_charged_attempt` commits the charge of a code attempt on its own, because it must outlive a refusal. Locks
//! are acquired in one order: users by id, slots by id, conversations by id.

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
pub use crate::people::identity_links::{LinkImportChange, LinkImportResult, import};
pub use crate::people::users::{NewUser, UserChange, create, find_present_user, update};
pub use codes::{
    RedeemRequest, RedeemResult, consume, mint, redeem, void, void_codes_in, with_charged_attempt,
};
pub use erase::{ERASE_JOB, ErasureSummary, erase};
pub use export::{UserExport, export};
pub use home_channels::{NewHomeChannel, delete as delete_home_channel, put as put_home_channel};
pub use merge::{MergeRequest, check_reason, merge};
pub use resolve::{Resolution, ResolveRequest, resolve};
pub use unlink::{UnlinkResult, find_visible as find_identity, undo_unlink, unlink};
