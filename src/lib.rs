//! Throughline: one assistant conversation across every platform, for many tenants at once.
//!
//! The rooms, from the outside inwards. Imports go one way, downwards; `tests/it/house/architecture.rs` holds the table of
//! allowed edges.
//!
//! - `server`, `dev`: a node with its listeners and loops; a node with its own Postgres and Redis for a developer
//! - `http`, `jobs`: the surfaces: requests and background work
//! - `inbound`: use cases of messages that bridges deliver
//! - `turns`: the turn engine; `completions`: a model call without a session
//! - `people`, `sessions`, `tenants`, `audit`, `idempotency`, `secrets`: use cases, one room each
//! - `app`: the shared state of a node
//! - `agent_runtime`: a tenant's agents, ready to be called; `streams`: the shared state of a node's open streams;
//!   `usage`: usage counts
//! - `auth`: credentials and callers; only a caller opens a tenant's transaction
//! - `limits`: rate limits and shares; `notifications`: publish and subscribe within a node and between nodes
//! - `store`, `redis`: the only rooms with SQL and with Redis
//! - `upstream`: the only way out to a URL that a tenant gives
//! - `domain`: types and rules, without IO
//! - `ids`, `clock`, `error`, `config`, `crypto`, `cache`, `telemetry`, `recent`, `shutdown`, `fair_queue`,
//!   `descriptors`, `child_guard`, `wire_text`: the base, which every room may use

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
pub mod notification;
pub mod recent;
pub mod retry;
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
pub mod deliveries;
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
