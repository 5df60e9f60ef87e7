//! The header by which a deployment knows a call of its own that comes back to it.

pub const HEADER: &str = "x-throughline-hop";
