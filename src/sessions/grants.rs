//! Revokes the rights of guests to read a conversation.

use super::find;
use crate::app::App;
use crate::audit;
use crate::domain::conversation::session::Permission;
use crate::domain::conversation::session_name::{SessionRef, session_not_found};
use crate::domain::people::access::Access;
use crate::domain::tenant::audit::{Action, Detail, Entry};
use crate::error::Result;
use crate::ids::UserId;
use crate::store::TenantTx;
use crate::store::conversation::{conversations, grants};

/// Revokes the grant of `user_id`, or every grant of the conversation. A user without a grant is no error.
pub async fn revoke_grants(
    app: &App,
    tx: &mut TenantTx,
    actor: &str,
    access: &Access,
    session: &SessionRef,
    user_id: Option<UserId>,
) -> Result<()> {
    let now = app.clock.now();
    let tip = find(tx, access, session, Permission::Manage, now).await?;
    let conversation_id = tip.name.conversation_id;
    conversations::lock(tx, conversation_id)
        .await?
        .ok_or_else(session_not_found)?;
    for user_id in grants::update_revoked(tx, conversation_id, user_id, now).await? {
        let entry = Entry::new(actor, Action::GrantRevoke, &conversation_id)
            .with(Detail::default().id("user_id", user_id));
        audit::append(&app.keyring, tx, entry, now).await?;
    }
    Ok(())
}
