//! The integration tests: one binary, one Postgres and one Redis for the whole run, a database of its
//! own for every test. They speak HTTP to real nodes.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    reason = "a test that cannot go on panics, and tests may look at the real clock and environment"
)]

mod support;

mod abandoned_turns;
mod admin_keys;
mod agent_changes;
mod agents;
mod api_keys;
mod architecture;
mod audit;
mod authorization;
mod background_plans;
mod bad_input;
mod branches;
mod bridge_example;
mod bursts;
mod chaos;
mod chat;
mod command_faults;
mod cors;
mod deliveries;
mod dev_command;
mod disclosure;
mod draining;
mod ended_rights;
mod erased_answers;
mod expiry;
mod idempotency;
mod identity_links;
mod idle_streams;
mod inbound;
mod inbound_faults;
mod inbound_parting;
mod inbound_retries;
mod jobs;
mod key_sets;
mod large_tenant;
mod limits;
mod link_codes;
mod linking;
mod migrations;
mod model_answers;
mod model_script;
mod names;
mod node_ports;
mod noisy_tenants;
mod notifications;
mod openai_client;
mod openapi;
mod operator;
mod outside_text;
mod people_erasure;
mod people_export;
mod people_races;
mod pool;
mod resolve;
mod retention;
mod rolling_restart;
mod secrets;
mod serve_command;
mod service;
mod session_chains;
mod session_chat;
mod session_export;
mod session_grants;
mod session_import;
mod session_keys;
mod session_locks;
mod session_messages;
mod session_transfer;
mod sessions;
mod silent_redis;
mod tenancy;
mod tenancy_bridges;
mod tenancy_conversations;
mod tenancy_people;
mod tenancy_turns;
mod tenants;
mod turn_events;
mod turn_faults;
mod turn_limits;
mod turn_outages;
mod turn_races;
mod turn_recovery;
mod turn_scale;
mod turn_starts;
mod turn_tools;
mod turns;
mod unlink_races;
mod upstream_errors;
mod user_chat;
mod user_token_proof;
mod user_tokens;
mod waiting_callers;
mod whoami;
