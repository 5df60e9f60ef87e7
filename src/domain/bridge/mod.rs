//! The exchange with bridges: chats, inbound messages, commands, deliveries.

pub mod chat;
pub mod chat_text;
pub mod command;
pub mod delivery;
pub mod inbound;
