//! Pages that end early where their rows are large: what is read at once has a bound in bytes too.

use sqlx::Row;
use sqlx::postgres::PgRow;

use crate::error::Result;

/// The rows of a statement, each of which has its size as `bytes`, up to and with the one that passes 4 MiB. Names the
/// order of the rows first, by their columns. Each row knows whether others of the statement come after it.
macro_rules! within_page_bytes {
    ($order:literal, $($statement:tt)+) => {
        concat!(
            "select *
               from (select p.*, sum(p.bytes) over w - p.bytes as bytes_before,
                            lead(p.bytes) over w is not null as is_followed
                       from (", $($statement)+, ") p
                     window w as (order by ", $order, ")) p
              where p.bytes_before < 4194304
              order by ", $order
        )
    };
}
pub(super) use within_page_bytes;

/// Whether others come after the last of these rows.
pub fn is_followed(rows: &[PgRow]) -> Result<bool> {
    match rows.last() {
        Some(last) => Ok(last.try_get("is_followed")?),
        None => Ok(false),
    }
}
