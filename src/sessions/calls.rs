//! Tool calls that get no result. Models refuse a transcript in which a call has none.

use chrono::{DateTime, Utc};

use crate::domain::conversation::message::NewMessage;
use crate::domain::turn::interrupted_result;
use crate::error::Result;
use crate::ids::SessionId;
use crate::store::TenantTx;
use crate::store::conversation::open_calls;

/// Adds a result to every open call at the end of a session; it says why there is no real one. `tx` holds the
/// conversation's lock, and no turn is active in it.
pub async fn close_calls(
    tx: &mut TenantTx,
    session_id: SessionId,
    why: &str,
    now: DateTime<Utc>,
) -> Result<()> {
    let Some(open) = open_calls::find(tx, session_id).await? else {
        return Ok(());
    };
    let result = |id: &String| interrupted_result(id, why);
    let results: Vec<NewMessage> = open.ids.iter().map(result).collect();
    open_calls::insert_results(tx, session_id, open.turn_id, &results, now).await
}
