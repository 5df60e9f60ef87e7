//! A branch: a conversation of its own that begins with a copy of another conversation's transcript.

use chrono::{DateTime, Utc};

use super::{close_calls, find, insert};
use crate::domain::conversation::session::{Edge, NewConversation, Permission};
use crate::domain::conversation::session_name::SessionRef;
use crate::domain::people::access::Access;
use crate::error::{Error, FieldError, Result};
use crate::ids::SessionId;
use crate::store::TenantTx;
use crate::store::conversation::messages::{self, Copy, CopySelection};

pub struct Branch {
    /// The last message to copy. Without it, all messages but those of an active turn.
    pub from_seq: Option<i64>,
    pub title: Option<String>,
}

/// Branches off the tip. The branch belongs to the owner of the conversation, and not to its creator. Its session key
/// lists it, but does not make it the current one.
pub async fn branch(
    tx: &mut TenantTx,
    access: &Access,
    session: &SessionRef,
    request: Branch,
    now: DateTime<Utc>,
) -> Result<SessionId> {
    let tip = find(tx, access, session, Permission::Manage, now).await?;
    let last = tip.last_seq();
    if request
        .from_seq
        .is_some_and(|seq| !(1..=last).contains(&seq))
    {
        let detail = match last {
            0 => "the session has no messages".to_owned(),
            last => format!("must be from 1 to {last}"),
        };
        return Err(Error::invalid(vec![FieldError::new("/from_seq", detail)]));
    }
    let conversation = NewConversation {
        id: SessionId::generate(),
        slot_id: tip.slot_id,
        namespace: access.namespace,
        client_id: None,
        user_id: tip.owner.user_id,
        agent: tip.agent,
        title: request.title,
        origin: Some((tip.session_id, Edge::Branch)),
    };
    let id = insert(tx, &conversation, now).await?;
    let copy = Copy {
        from: tip.session_id,
        to: id,
        selection: request
            .from_seq
            .map_or(CopySelection::WithoutActiveTurn, CopySelection::Through),
        counted: true,
    };
    messages::copy(tx, &copy).await?;
    close_calls(tx, id, "the branch begins before its result", now).await?;
    Ok(id)
}
