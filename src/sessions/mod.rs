//! Use cases of conversations: create, append, compress, branch, reset, export, delete. All functions are steps:
//! they take `&mut TenantTx` and never commit. Locks are acquired in one order: slots, conversation, sessions from
//! the older link to the newer.

use chrono::{DateTime, Utc};

use crate::app::App;
use crate::audit;
use crate::domain::conversation::session::{NewConversation, Permission, Tip};
use crate::domain::conversation::session_name::{SessionRef, session_not_found};
use crate::domain::conversation::slot::Slot;
use crate::domain::people::access::{Access, Visibility};
use crate::domain::tenant::agent::DEFAULT_AGENT;
use crate::domain::tenant::audit::{Action, Detail, Entry};
use crate::error::{Code, Error, FieldError, Result};
use crate::ids::SessionId;
use crate::store::TenantTx;
use crate::store::conversation::{conversations, sessions, slots, tips};
use crate::store::people::users;
use crate::store::tenant::agents;

mod append;
mod branch;
mod calls;
mod compress;
mod create;
mod delete;
mod export;
mod grants;
mod import;
mod keys;
pub mod retention;

pub use append::{AppendResult, append};
pub use branch::{Branch, branch};
pub use calls::close_calls;
pub use compress::{Compress, CompressionResult, compress, uncompress};
pub use create::{NewSession, create};
pub use delete::{ERASE_JOB, delete, delete_locked, delete_unaudited};
pub use export::{Export, FIRST_PAGE, export, export_unaudited, next_page};
pub use grants::revoke_grants;
pub use import::import;
pub use keys::{Arrival, SessionChoice, choose_current, choose_in_slot, find_slot, reset, switch};

/// The tip of the chain of the link `session`, if `access` has the permission.
pub async fn find(
    tx: &mut TenantTx,
    access: &Access,
    session: &SessionRef,
    permission: Permission,
    now: DateTime<Utc>,
) -> Result<Tip> {
    let found = find_as(tx, access, session, permission, now).await;
    match found {
        Err(error) if error.code == Code::SessionNotFound => {
            match follow_merge(tx, access).await? {
                Some(survivor) => find_as(tx, &survivor, session, permission, now).await,
                None => Err(error),
            }
        }
        found => found,
    }
}

async fn find_as(
    tx: &mut TenantTx,
    access: &Access,
    session: &SessionRef,
    permission: Permission,
    now: DateTime<Utc>,
) -> Result<Tip> {
    let tip = tips::find(tx, access, session, now)
        .await?
        .ok_or_else(session_not_found)?;
    tip.owner.check(access, permission)?;
    Ok(tip)
}

/// The access as the user it was merged into since the credential was checked, if a merge happened. A merge that
/// commits in that moment must not hide a user's own sessions.
async fn follow_merge(tx: &mut TenantTx, access: &Access) -> Result<Option<Access>> {
    let Visibility::User(before) = access.visibility else {
        return Ok(None);
    };
    let survivor = users::find_redirect(tx, before).await?;
    Ok(survivor.map(|survivor| access.merged_into(survivor)))
}

/// Audits that an admin reads a user's conversation: one entry a minute for an actor and a conversation on a node,
/// because entries of a tenant are written one after the other.
pub async fn audit_read(
    app: &App,
    tx: &mut TenantTx,
    actor: &str,
    access: &Access,
    tip: &Tip,
) -> Result<()> {
    let now = app.clock.now();
    let read = (tx.tenant_id(), actor.to_owned(), tip.name.conversation_id);
    if app.recent_reads.contains(&read, now) {
        return Ok(());
    }
    audit_export(app, tx, actor, access, tip).await?;
    let recent = app.recent_reads.clone();
    tx.after_commit(move || recent.note(read, now));
    Ok(())
}

/// Audits an export: each one has an entry.
async fn audit_export(
    app: &App,
    tx: &mut TenantTx,
    actor: &str,
    access: &Access,
    tip: &Tip,
) -> Result<()> {
    let (Visibility::Tenant, Some(user_id)) = (access.visibility, tip.owner.user_id) else {
        return Ok(());
    };
    let entry = Entry::new(actor, Action::ConversationRead, &tip.name.conversation_id)
        .with(Detail::default().id("user_id", user_id));
    audit::append(&app.keyring, tx, entry, app.clock.now()).await
}

/// Creates a conversation with its first session, and adds it to its slot.
async fn insert(
    tx: &mut TenantTx,
    conversation: &NewConversation,
    now: DateTime<Utc>,
) -> Result<SessionId> {
    let client_id = conversation.client_id.as_deref();
    let digest = client_id.map(|id| delete::spent_digest(conversation.namespace, id));
    if !conversations::insert(tx, conversation, digest, now).await? {
        let detail = "an id is used once, and never again after its session was deleted";
        return Err(Error::fields(
            Code::SessionIdTaken,
            vec![FieldError::new("/id", detail)],
        ));
    }
    sessions::insert_first(tx, conversation.id, conversation.origin, now).await?;
    if let Some(slot_id) = conversation.slot_id {
        slots::insert_conversation(tx, slot_id, conversation.id).await?;
    }
    Ok(conversation.id)
}

/// The agent of a new session. A named agent must exist and be the slot's.
async fn agent_for(tx: &mut TenantTx, named: Option<&str>, slot: Option<&Slot>) -> Result<String> {
    let of_slot = slot.map(|slot| slot.agent.as_str());
    if let (Some(named), Some(of_slot)) = (named, of_slot)
        && named != of_slot
    {
        let detail = format!("the key belongs to the agent {of_slot}");
        return Err(Error::new(Code::AgentMismatch, detail));
    }
    let agent = named.or(of_slot).unwrap_or(DEFAULT_AGENT);
    if agents::find(tx, agent).await?.is_none() {
        let error = FieldError::new("/agent", "there is no such agent");
        return Err(Error::invalid(vec![error]));
    }
    Ok(agent.to_owned())
}
