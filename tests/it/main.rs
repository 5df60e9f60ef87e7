//! The integration tests: one binary, one Postgres and one Redis for the whole run, a database of its
//! own for every test. They speak HTTP to real nodes.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    reason = "a test that cannot go on panics, and tests may look at the real clock and environment"
)]

mod support;

mod auth;
mod bridge;
mod chaos;
mod completions;
mod conversation;
mod house;
mod identity_links;
mod limits;
mod people;
mod service;
mod tenancy;
mod tenant;
mod transfer;
mod turn;
