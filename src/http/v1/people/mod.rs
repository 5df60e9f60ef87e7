//! Users and identities.

pub mod home_channels;
pub mod identities;
pub mod resolve;
pub mod user_export;
pub mod users;
