//! The service itself: what every answer has, its commands, jobs, connections and ends.

mod answers;
mod bad_input;
mod dev_command;
mod draining;
mod idempotency;
mod jobs;
mod node_ports;
mod notifications;
mod pool;
mod rolling_restart;
mod serve_command;
mod silent_redis;
