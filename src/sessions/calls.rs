//! Calls of tools that nobody will answer. Models refuse a transcript in which a call has no result.

use chrono::{DateTime, Utc};

use crate::domain::message::NewMessage;
use crate::domain::turn::interrupted_result;
use crate::error::Result;
use crate::ids::SessionId;
use crate::store::TenantTx;
use crate::store::messages::{self, Append};

/// Gives every call at the end of a session a result that says why there is none. `tx` holds the conversation, and
/// no turn is active in it.
pub async fn close_calls(
    tx: &mut TenantTx,
    session_id: SessionId,
    why: &str,
    now: DateTime<Utc>,
) -> Result<()> {
    let open = messages::list_open_calls(tx, session_id).await?;
    if open.is_empty() {
        return Ok(());
    }
    let result = |id: &String| interrupted_result(id, why);
    let results: Vec<NewMessage> = open.iter().map(result).collect();
    let append = Append {
        session_id,
        messages: &results,
        speaker: None,
        expected_last: None,
    };
    messages::append(tx, &append, now).await?;
    Ok(())
}
