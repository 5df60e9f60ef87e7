//! Users, identities, presence, home channels, erasure.

pub mod erased_people;
pub mod erased_summaries;
pub mod erasures;
pub mod home_channels;
pub mod identities;
pub mod presence;
pub mod resolve;
pub mod stream_rights;
pub mod user_records;
pub mod users;
