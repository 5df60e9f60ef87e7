//! Summaries of conversations: what a model is asked, and what of its answer is stored. A transcript is cut
//! into pieces (`pieces`), each piece is quoted in a request without secrets (`source`, `redact`, `request`),
//! the answer is checked (`check`), and a stored summary is quoted in prompts (`frame`).

pub mod budget;
pub mod check;
pub mod evidence;
pub mod frame;
mod identifiers;
pub mod pieces;
pub mod redact;
pub mod request;
mod secret_assignments;
mod secret_tokens;
mod sections;
pub mod source;

#[cfg(test)]
mod hostile_tests;
