//! Compression: how much of a conversation fits a model, and which messages the next link of a chain keeps. Pure
//! rules over an outline of the transcript: they never see a text, and change no row.

pub mod budget;
pub mod outline;
pub mod plan;
pub mod shortening;
mod transcript;

#[cfg(test)]
mod generated;
#[cfg(test)]
mod properties;
