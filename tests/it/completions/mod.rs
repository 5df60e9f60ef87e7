//! `/v1/chat/completions`: with and without a session, and what models answer.

mod chat;
mod model_answers;
mod model_script;
mod openai_client;
mod session_chat;
mod upstream_errors;
mod user_chat;
