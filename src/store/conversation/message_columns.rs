//! Messages as columns, for statements that insert several with `unnest`.

use serde::Serialize;

use crate::domain::conversation::message::{MessageKind, NewMessage, Role};
use crate::error::{Error, Result};

/// One value of each column for each message, in their order.
pub(in crate::store) struct MessageColumns<'a> {
    pub roles: Vec<&'a str>,
    pub kinds: Vec<&'a str>,
    pub contents: Vec<Option<String>>,
    pub tool_calls: Vec<Option<String>>,
    pub tool_call_ids: Vec<Option<&'a str>>,
    pub tokens: Vec<i32>,
    /// Whether a user wrote it, and not only a role of that name: then it has a sender.
    pub is_spoken: Vec<bool>,
    pub extras: Vec<Option<String>>,
}

impl<'a> MessageColumns<'a> {
    pub fn new(messages: &'a [NewMessage]) -> Result<Self> {
        let mut columns = Self {
            roles: Vec::with_capacity(messages.len()),
            kinds: Vec::with_capacity(messages.len()),
            contents: Vec::with_capacity(messages.len()),
            tool_calls: Vec::with_capacity(messages.len()),
            tool_call_ids: Vec::with_capacity(messages.len()),
            tokens: Vec::with_capacity(messages.len()),
            is_spoken: Vec::with_capacity(messages.len()),
            extras: Vec::with_capacity(messages.len()),
        };
        for message in messages {
            columns.roles.push(message.role.as_str());
            columns.kinds.push(message.kind.as_str());
            columns.contents.push(to_json(message.content.as_ref())?);
            columns
                .tool_calls
                .push(to_json(message.tool_calls.as_ref())?);
            columns.tool_call_ids.push(message.tool_call_id.as_deref());
            columns.tokens.push(message.tokens());
            columns
                .is_spoken
                .push(message.role == Role::User && message.kind == MessageKind::Normal);
            columns.extras.push(to_json(message.extra.as_ref())?);
        }
        Ok(columns)
    }

    pub fn token_sum(&self) -> i64 {
        self.tokens.iter().copied().map(i64::from).sum()
    }

    pub fn has_spoken(&self) -> bool {
        self.is_spoken.contains(&true)
    }
}

pub(in crate::store) fn to_json<T: Serialize>(value: Option<&T>) -> Result<Option<String>> {
    value
        .map(|value| serde_json::to_string(value).map_err(Error::internal))
        .transpose()
}
