//! Who may do what: credentials, scopes, rights that end, and what an answer must not give away.

mod authorization;
mod cors;
mod disclosure;
mod ended_rights;
mod key_sets;
mod user_token_proof;
mod user_tokens;
mod waiting_callers;
mod whoami;
