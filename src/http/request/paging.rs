//! Lists over HTTP: `limit`, and cursors that are opaque, signed, and valid only for the list, the filter and the
//! caller they were created for.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::auth::{KeyCaller, OperatorCaller};
use crate::crypto::Keyring;
use crate::domain::values::paging::{DEFAULT_LIMIT, MAX_LIMIT, Page, PageRequest};
use crate::error::{Code, Error, FieldError, Result};
use crate::http::auth::conversation::CallerContext;

const SIGNATURE: usize = 16;

/// What a list takes that has no filter. Their bounds are in the document of every list: `http::openapi`.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct PageParams {
    pub limit: Option<u32>,
    pub cursor: Option<String>,
}

/// One page of a list.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct ListResponse<T> {
    pub data: Vec<T>,
    /// Send it as `?cursor=` for the next page; null on the last page.
    pub next_cursor: Option<String>,
}

impl<T> ListResponse<T> {
    /// A list without rows.
    pub fn empty() -> Self {
        Self {
            data: Vec::new(),
            next_cursor: None,
        }
    }

    /// A list that is short by nature: one page has all rows.
    pub fn whole<R>(rows: Vec<R>, render: impl Fn(R) -> T) -> Self {
        Self {
            data: rows.into_iter().map(render).collect(),
            next_cursor: None,
        }
    }
}

/// Identifies the list of a cursor. Everything that changes the rows of the list must be in it.
pub struct ListName {
    /// Tenant and credential.
    caller: String,
    /// The list and its filters.
    list: String,
}

impl ListName {
    /// A list of a tenant's objects.
    pub fn for_key(caller: &KeyCaller, list: impl Into<String>) -> Self {
        Self {
            caller: format!("{}/{}", caller.tenant_id(), caller.principal()),
            list: list.into(),
        }
    }

    /// A list of the conversations that a call may see.
    pub fn for_context(context: &CallerContext, list: impl Into<String>) -> Self {
        Self {
            caller: format!("{}/{}", context.tenant_id(), context.principal()),
            list: list.into(),
        }
    }

    /// A list of the operator's objects.
    pub fn for_operator(caller: &OperatorCaller, list: impl Into<String>) -> Self {
        Self {
            caller: caller.principal(),
            list: list.into(),
        }
    }

    fn context(&self) -> String {
        format!("cursor/{}/{}", self.caller, self.list)
    }

    /// Reads `?limit=` and `?cursor=`.
    pub fn open<P: DeserializeOwned>(
        &self,
        keyring: &Keyring,
        limit: Option<u32>,
        cursor: Option<&str>,
    ) -> Result<PageRequest<P>> {
        let limit = limit.unwrap_or(DEFAULT_LIMIT);
        if !(1..=MAX_LIMIT).contains(&limit) {
            let detail = format!("must be from 1 to {MAX_LIMIT}");
            let error = FieldError::new("/query/limit", detail);
            return Err(Error::fields(Code::InvalidRequest, vec![error]));
        }
        let after = cursor
            .map(|cursor| self.read_cursor(keyring, cursor).ok_or_else(invalid_cursor))
            .transpose()?;
        Ok(PageRequest { limit, after })
    }

    /// Renders a page with the cursor of the next one.
    pub fn close<T, R, P: Serialize>(
        &self,
        keyring: &Keyring,
        page: Page<T, P>,
        render: impl Fn(T) -> R,
    ) -> Result<ListResponse<R>> {
        let next_cursor = page
            .next
            .map(|position| self.write_cursor(keyring, &position))
            .transpose()?;
        Ok(ListResponse {
            data: page.rows.into_iter().map(render).collect(),
            next_cursor,
        })
    }

    fn write_cursor(&self, keyring: &Keyring, position: &impl Serialize) -> Result<String> {
        let position = serde_json::to_vec(position).map_err(Error::internal)?;
        let mut bytes = keyring.sign(&self.context(), &position).to_vec();
        bytes.extend_from_slice(&position);
        Ok(URL_SAFE_NO_PAD.encode(bytes))
    }

    fn read_cursor<P: DeserializeOwned>(&self, keyring: &Keyring, cursor: &str) -> Option<P> {
        let bytes = URL_SAFE_NO_PAD.decode(cursor).ok()?;
        let (signature, position) = bytes.split_at_checked(SIGNATURE)?;
        if !keyring.verify(&self.context(), position, signature) {
            return None;
        }
        serde_json::from_slice(position).ok()
    }
}

fn invalid_cursor() -> Error {
    let detail = "the cursor belongs to another list, filter or credential";
    let error = FieldError::new("/query/cursor", detail);
    Error::fields(Code::InvalidCursor, vec![error])
}

#[cfg(test)]
mod tests {
    use chrono::DateTime;
    use uuid::Uuid;

    use super::*;
    use crate::domain::values::paging::Position;

    #[test]
    fn a_cursor_is_good_only_for_its_own_list_and_caller() {
        let keyring = Keyring::new(&["x".repeat(32).into()]).unwrap();
        let name = |caller: &str, list: &str| ListName {
            caller: caller.to_owned(),
            list: list.to_owned(),
        };
        let position = Position {
            created_at: DateTime::UNIX_EPOCH,
            id: Uuid::from_u128(7),
        };
        let mine = name("a", "keys");
        let cursor = mine.write_cursor(&keyring, &position).unwrap();
        assert_eq!(mine.read_cursor(&keyring, &cursor), Some(position));
        for other in [name("b", "keys"), name("a", "keys?archived")] {
            assert_eq!(other.read_cursor::<Position>(&keyring, &cursor), None);
        }
        for damaged in ["", "AAAA", "ü", &cursor[1..], &format!("{cursor}A")] {
            let read = mine.read_cursor::<Position>(&keyring, damaged);
            assert_eq!(read, None, "{damaged}");
        }
    }
}
