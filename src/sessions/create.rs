//! Creates a session, with its earlier messages if the caller brings them.

use chrono::{DateTime, Utc};

use super::{agent_for, append::append_first, insert, keys};
use crate::domain::conversation::message::{self, NewMessage};
use crate::domain::conversation::session::NewConversation;
use crate::domain::conversation::session_name::{ClientSessionId, SessionKey};
use crate::domain::people::access::Access;
use crate::error::Result;
use crate::ids::SessionId;
use crate::store::TenantTx;
use crate::store::conversation::slots;

pub struct NewSession {
    pub id: Option<ClientSessionId>,
    pub session_key: Option<SessionKey>,
    pub agent: Option<String>,
    pub title: Option<String>,
    pub messages: Vec<NewMessage>,
}

/// Creates a session. It becomes its key's current one only if the key has none.
pub async fn create(
    tx: &mut TenantTx,
    access: &Access,
    request: NewSession,
    now: DateTime<Utc>,
) -> Result<SessionId> {
    message::check_all(&request.messages, "/messages", access.may_write_any_role)?;
    let named = request.agent.as_deref();
    let slot = match &request.session_key {
        Some(key) => Some(keys::obtain(tx, access, key, named, now).await?),
        None => None,
    };
    let conversation = NewConversation {
        id: SessionId::generate(),
        slot_id: slot.as_ref().map(|slot| slot.id),
        namespace: access.namespace,
        client_id: request.id.map(|id| id.as_str().to_owned()),
        user_id: access
            .user_id
            .or(slot.as_ref().and_then(|slot| slot.user_id)),
        agent: agent_for(tx, named, slot.as_ref()).await?,
        title: request.title,
        origin: None,
    };
    let id = insert(tx, &conversation, now).await?;
    if let Some(slot) = slot {
        slots::update_if_empty(tx, slot.id, id).await?;
    }
    append_first(tx, access, id, &request.messages, now).await?;
    Ok(id)
}
