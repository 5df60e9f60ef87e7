//! Writing answers: problems, event streams, downloads, and clients that read slowly.

pub(super) mod download;
pub(super) mod event_stream;
pub(super) mod held_answer;
pub(super) mod in_span;
pub(super) mod problem;
pub(super) mod reader;
pub(super) mod slow_readers;
pub(super) mod sse;
