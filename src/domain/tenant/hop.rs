//! The header by which a deployment recognises its own calls when they come back to it.

pub const HEADER: &str = "x-throughline-hop";
