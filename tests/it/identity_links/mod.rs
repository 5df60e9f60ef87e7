//! Identities of one user: the document of links, link codes, merging and unlinking.

mod document;
mod document_faults;
mod document_races;
mod link_codes;
mod linking;
mod summaries;
mod unlink_races;
mod unlinking;
