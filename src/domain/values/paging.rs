//! Pages of a list: the limit, the start and the position of the next page.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

pub const DEFAULT_LIMIT: u32 = 50;
pub const MAX_LIMIT: u32 = 200;

/// The position of a row in a list ordered by creation, newest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    pub created_at: DateTime<Utc>,
    pub id: Uuid,
}

/// The page of a list query: at most `limit` rows after `after`. `P` is the position in the list's order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageRequest<P = Position> {
    pub limit: u32,
    pub after: Option<P>,
}

impl<P> PageRequest<P> {
    /// One row more than the limit shows whether there is a next page.
    pub fn fetch_limit(&self) -> i64 {
        i64::from(self.limit) + 1
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page<T, P = Position> {
    pub rows: Vec<T>,
    pub next: Option<P>,
}

impl<T, P> Page<T, P> {
    /// Truncates the rows of a query with `fetch_limit` to the page, with the position of the next one.
    pub fn cut(rows: Vec<T>, request: &PageRequest<P>, position: impl Fn(&T) -> P) -> Self {
        Self::cut_early(rows, request, position, false)
    }

    /// The same for incomplete rows: `is_followed` says whether more rows follow them.
    pub fn cut_early(
        mut rows: Vec<T>,
        request: &PageRequest<P>,
        position: impl Fn(&T) -> P,
        is_followed: bool,
    ) -> Self {
        let limit = request.limit as usize;
        let has_next = is_followed || rows.len() > limit;
        rows.truncate(limit);
        let next = if has_next {
            rows.last().map(position)
        } else {
            None
        };
        Self { rows, next }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_the_position_of_the_next_one() {
        let request = PageRequest {
            limit: 2,
            after: None,
        };
        let at = |id: &u128| Position {
            created_at: DateTime::UNIX_EPOCH,
            id: Uuid::from_u128(*id),
        };
        assert_eq!(Page::cut(vec![3, 2], &request, at).next, None);
        let page = Page::cut(vec![3, 2, 1], &request, at);
        assert_eq!(page.rows, [3, 2]);
        assert_eq!(page.next, Some(at(&2)));
        let page = Page::cut_early(vec![3], &request, at, true);
        assert_eq!(page.next, Some(at(&3)));
    }
}
