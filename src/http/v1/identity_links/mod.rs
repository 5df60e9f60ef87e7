//! Linking identities: codes, and the document of all links.

pub mod document;
pub mod link_codes;
