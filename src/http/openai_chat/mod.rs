//! The OpenAI-compatible surface. Its wire shapes never leave it.

mod chunks;
pub mod completions;
pub mod models;
mod session_chat;
mod session_turn;
