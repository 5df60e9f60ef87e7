//! Users, their identities on platforms, and the access of calls to their conversations.

pub mod access;
pub mod display_name;
pub mod erasure;
pub mod home_channel;
pub mod identity;
pub mod normalise;
pub mod platform;
pub mod presence;
pub mod user;
