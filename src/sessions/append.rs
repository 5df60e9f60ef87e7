//! Appends messages at the tip of a conversation, whichever of its ids was named.

use chrono::{DateTime, Utc};

use super::find;
use crate::domain::conversation::message::{self, NewMessage, Role};
use crate::domain::conversation::session::{Permission, Tip};
use crate::domain::conversation::session_name::{SessionRef, session_not_found};
use crate::domain::people::access::{Access, Visibility};
use crate::domain::turn::session_busy;
use crate::error::{Code, Error, FieldError, Result};
use crate::ids::SessionId;
use crate::store::TenantTx;
use crate::store::conversation::messages::{self, Append};
use crate::store::people::identities;
use crate::store::people::presence::PresenceUpdate;
use crate::store::turn::turns;

/// How often concurrent writers may move the tip before the request fails.
const ATTEMPTS: usize = 10;

#[derive(Debug)]
pub struct AppendResult {
    pub tip: Tip,
    pub first_seq: i64,
}

/// Appends to the tip, all or nothing. `expected_last` is the number of the last message the caller has.
pub async fn append(
    tx: &mut TenantTx,
    access: &Access,
    session: &SessionRef,
    messages: &[NewMessage],
    expected_last: Option<i64>,
    now: DateTime<Utc>,
) -> Result<AppendResult> {
    if messages.is_empty() {
        let error = FieldError::new("/messages", "give at least one message");
        return Err(Error::invalid(vec![error]));
    }
    message::check_all(messages, "/messages", access.may_write_any_role)?;
    for _ in 0..ATTEMPTS {
        let tip = find(tx, access, session, Permission::Participate, now).await?;
        let append = Append {
            session_id: tip.session_id,
            messages,
            sender: access.sender.as_ref(),
            expected_last,
        };
        if let Some(first_seq) = messages::append(tx, &append, now).await? {
            recheck_access(tx, access, &tip, now).await?;
            note_presence(tx, access, &tip, messages, now);
            return Ok(AppendResult { tip, first_seq });
        }
        // A turn is active, the tip moved, or its last number differs: the next lookup shows which.
        if let Some(turn_id) = turns::find_active(tx, tip.name.conversation_id).await? {
            return Err(session_busy(turn_id));
        }
        let again = find(tx, access, session, Permission::Participate, now).await?;
        let last = again.last_seq();
        if again.session_id == tip.session_id && expected_last.is_some_and(|seen| seen != last) {
            let detail = format!("the last message has the number {last}");
            return Err(Error::new(Code::PreconditionFailed, detail));
        }
    }
    let detail = "the conversation is compressed repeatedly";
    Err(Error::unavailable(
        "the conversation",
        anyhow::anyhow!(detail),
    ))
}

/// Checks a user's right again: the identity may have been unlinked while the append waited for the session.
async fn recheck_access(
    tx: &mut TenantTx,
    access: &Access,
    tip: &Tip,
    now: DateTime<Utc>,
) -> Result<()> {
    let (Visibility::User(_), Some(sender)) = (access.visibility, &access.sender) else {
        return Ok(());
    };
    let user_id = identities::find_user(tx, sender.id).await?;
    let present = access.merged_into(user_id.ok_or_else(session_not_found)?);
    let session = SessionRef::Id(tip.session_id);
    find(tx, &present, &session, Permission::Participate, now).await?;
    Ok(())
}

/// Notes where the sender is present: in the slot of the conversation.
fn note_presence(
    tx: &mut TenantTx,
    access: &Access,
    tip: &Tip,
    messages: &[NewMessage],
    now: DateTime<Utc>,
) {
    let from_user = messages.iter().any(|message| message.role == Role::User);
    if let Some(sender) = &access.sender
        && from_user
    {
        tx.note_presence(PresenceUpdate {
            identity_id: sender.id,
            slot_id: tip.slot_id,
            at: now,
        });
    }
}

/// Writes the first messages of a session, in the transaction that creates it.
pub(super) async fn append_first(
    tx: &mut TenantTx,
    access: &Access,
    session_id: SessionId,
    messages: &[NewMessage],
    now: DateTime<Utc>,
) -> Result<()> {
    if messages.is_empty() {
        return Ok(());
    }
    let append = Append {
        session_id,
        messages,
        sender: access.sender.as_ref(),
        expected_last: None,
    };
    messages::append(tx, &append, now)
        .await?
        .ok_or_else(|| Error::internal(anyhow::anyhow!("a new session takes no messages")))?;
    Ok(())
}
