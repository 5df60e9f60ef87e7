//! Throughline: one assistant conversation across every platform, for many tenants at once.
//!
//! The rooms, from the street inwards. Imports go one way, downwards; `tests/it/house/architecture.rs` holds
//! the table of allowed edges.
//!
//! - `server`, `dev`: start listeners and background loops; start everything for a developer
//! - `http`, `jobs`: the surfaces: requests and background work
//! - `inbound`: what bridges bring in
//! - `turns`: the turn engine; `chat`: a model asked without a session
//! - `people`, `sessions`, `tenants`, `api_keys`, `issuers`, `agents`, `audit`, `idempotency`: use cases, one room each
//! - `secrets`: which secret keys stored data needs, and resealing it
//! - `app`: what they all work with
//! - `model`: a tenant's agents, ready to be asked
//! - `streams`: what the open streams of a node share
//! - `usage`: how much a tenant has used
//! - `auth`: who calls; a caller is what opens a tenant's transaction
//! - `limits`: how much a tenant may use; `live`: who watches what on this node
//! - `store`, `redis`: the only rooms with SQL and with Redis
//! - `upstream`: the only way out to a URL that a tenant gives
//! - `domain`: types and rules, without IO
//! - `ids`, `clock`, `crypto`, `error`, `config`, `telemetry`, `guard`, `recent`, `shutdown`, `descriptors`,
//!   `fair_queue`, `wire_text`: the ground

#[macro_use]
mod wire_text;

pub mod cache;
pub mod child_guard;
pub mod clock;
pub mod config;
pub mod crypto;
pub mod descriptors;
pub mod error;
pub mod fair_queue;
pub mod ids;
pub mod recent;
pub mod shutdown;
pub mod telemetry;

pub mod domain;

pub mod redis;
pub mod store;
pub mod upstream;

pub mod limits;
pub mod notifications;

pub mod auth;

pub mod agent_runtime;
pub mod streams;
pub mod usage;

pub mod app;

pub mod audit;
pub mod completions;
pub mod idempotency;
pub mod inbound;
pub mod people;
pub mod secrets;
pub mod sessions;
pub mod tenants;
pub mod turns;

pub mod http;
pub mod jobs;

pub mod dev;
pub mod server;
