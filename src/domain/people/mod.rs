//! Users, their identities on platforms, and what a call may see of theirs.

pub mod access;
pub mod display_name;
pub mod erasure;
pub mod home_channel;
pub mod identity;
pub mod normalise;
pub mod platform;
pub mod presence;
pub mod user;
