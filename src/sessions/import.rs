//! Imports a conversation from a document: the same chain with new ids, all of it or nothing.

use chrono::{DateTime, Utc};

use super::{agent_for, insert, keys};
use crate::app::App;
use crate::domain::conversation::session::NewConversation;
use crate::domain::conversation::session_name::SessionKey;
use crate::domain::people::access::Access;
use crate::domain::transfer::import::Import;
use crate::error::{Code, Error, FieldError, Result};
use crate::ids::SessionId;
use crate::store::TenantTx;
use crate::store::conversation::chains::{self, NewChainSession, NewCopy};
use crate::store::conversation::{conversations, slots};
use crate::store::tenant::agents;

/// Messages per statement.
const BATCH: usize = 1000;

/// Creates the conversation of a checked document and returns its tip. All times are now, and no message has a
/// sender: only the service states senders, and it did not receive these messages.
pub async fn import(
    app: &App,
    tx: &mut TenantTx,
    access: &Access,
    document: &Import,
    session_key: Option<&SessionKey>,
    now: DateTime<Utc>,
) -> Result<SessionId> {
    check_roles(app, tx, access, document)?;
    let named = match &document.agent {
        Some(agent) => agents::find(tx, agent).await?.map(|_| agent.as_str()),
        None => None,
    };
    let slot = match session_key {
        Some(key) => Some(keys::obtain(tx, access, key, named, now).await?),
        None => None,
    };
    let conversation = NewConversation {
        id: SessionId::generate(),
        slot_id: slot.as_ref().map(|slot| slot.id),
        namespace: access.namespace,
        client_id: None,
        user_id: access
            .user_id
            .or(slot.as_ref().and_then(|slot| slot.user_id)),
        agent: agent_for(tx, named, slot.as_ref()).await?,
        title: document.title.clone(),
        origin: None,
    };
    let first = insert(tx, &conversation, now).await?;
    if let Some(slot) = slot {
        slots::update_if_empty(tx, slot.id, first).await?;
    }
    let ids = write_chain(tx, first, document, now).await?;
    let tip = ids.last().copied().unwrap_or(first);
    conversations::update_tip(tx, first, tip).await?;
    Ok(tip)
}

/// A caller who may write only user messages may still import what this service exported.
fn check_roles(app: &App, tx: &TenantTx, access: &Access, document: &Import) -> Result<()> {
    let Some(pointer) = document
        .restricted_role_pointer
        .as_ref()
        .filter(|_| !access.may_write_any_role)
    else {
        return Ok(());
    };
    let detail = match &document.signature {
        Some(signature) if signature.is_valid(&app.keyring, tx.tenant_id(), &document.digest) => {
            return Ok(());
        }
        Some(_) => "the document was changed since it was exported, or not exported here",
        None => "the document has no signature",
    };
    let detail = format!("only admin and chat keys import messages of other roles, and {detail}");
    Err(Error::fields(
        Code::RoleNotAllowed,
        vec![FieldError::new(pointer, detail)],
    ))
}

/// Writes links and messages. Returns the ids of the links.
async fn write_chain(
    tx: &mut TenantTx,
    first: SessionId,
    document: &Import,
    now: DateTime<Utc>,
) -> Result<Vec<SessionId>> {
    let later = document.links.iter().skip(1).map(|_| SessionId::generate());
    let ids: Vec<SessionId> = std::iter::once(first).chain(later).collect();
    let linked = || ids.iter().copied().zip(&document.links);
    let links: Vec<NewChainSession> = linked()
        .map(|(id, link)| NewChainSession {
            id,
            compression: link.compression.as_ref(),
            last_seq: link.last_seq(),
            born_seq: link.born_seq,
            message_count: link.message_count(),
            token_count: link.token_count,
        })
        .collect();
    chains::insert_sessions(tx, first, &links, now).await?;
    let originals: Vec<_> = linked()
        .flat_map(|(id, link)| link.originals.iter().map(move |message| (id, message)))
        .collect();
    for batch in originals.chunks(BATCH) {
        chains::insert_originals(tx, batch, now).await?;
    }
    let mut copies = Vec::new();
    for (id, link) in linked() {
        for copy in &link.copies {
            let from = usize::try_from(copy.from.link)
                .ok()
                .and_then(|index| ids.get(index).copied());
            let from =
                from.ok_or_else(|| Error::internal(anyhow::anyhow!("a checked copy of nothing")))?;
            copies.push(NewCopy {
                to: (id, copy.seq),
                from: (from, copy.from.seq),
            });
        }
    }
    for batch in copies.chunks(BATCH) {
        chains::insert_copies(tx, batch).await?;
    }
    Ok(ids)
}
