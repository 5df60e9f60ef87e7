//! What bridges bring in and take out: chats, commands, deliveries.

pub mod chat;
pub mod chat_text;
pub mod command;
pub mod delivery;
pub mod inbound;
