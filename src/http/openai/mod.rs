//! The OpenAI-compatible surface. Its wire shapes never leave it.

mod chat_turn;
mod chunks;
pub mod completions;
pub mod models;
