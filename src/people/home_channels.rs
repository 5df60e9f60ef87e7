//! Where a user wants to be reached. A user may set only their own direct chat; any other chat needs an admin.

use crate::app::App;
use crate::audit;
use crate::domain::bridge::chat::Chat;
use crate::domain::people::access::{Access, Visibility};
use crate::domain::people::identity::IdentityName;
use crate::domain::people::platform::PlatformScope;
use crate::domain::people::user::IdentityRecord;
use crate::domain::tenant::audit::{Action, Entry};
use crate::error::{Error, FieldError, Result};
use crate::ids::UserId;
use crate::store::TenantTx;
use crate::store::people::{home_channels, identities};

pub struct NewHomeChannel<'a> {
    pub user_id: UserId,
    pub platform: &'a PlatformScope,
    /// The identity on the platform; else the sender's, else the only one.
    pub identity: Option<&'a IdentityName>,
    pub chat: &'a Chat,
}

pub async fn put(
    app: &App,
    tx: &mut TenantTx,
    actor: &str,
    access: &Access,
    new: &NewHomeChannel<'_>,
) -> Result<()> {
    let errors = new.chat.check("/chat");
    if !errors.is_empty() {
        return Err(Error::invalid(errors));
    }
    if !matches!(access.visibility, Visibility::Tenant) {
        new.chat.require_private()?;
    }
    let identities = identities::list(tx, new.user_id).await?;
    let identity = choose(&identities, access, new.platform, new.identity)?;
    let now = app.clock.now();
    home_channels::upsert(tx, new.user_id, new.platform, identity.id, new.chat, now).await?;
    let entry = Entry::new(actor, Action::HomeChannelPut, &new.user_id);
    audit::append(&app.keyring, tx, entry, now).await
}

pub async fn delete(
    app: &App,
    tx: &mut TenantTx,
    actor: &str,
    user_id: UserId,
    platform: &PlatformScope,
) -> Result<()> {
    if !home_channels::delete(tx, user_id, platform).await? {
        return Err(Error::not_found("home channel"));
    }
    let entry = Entry::new(actor, Action::HomeChannelDelete, &user_id);
    audit::append(&app.keyring, tx, entry, app.clock.now()).await
}

/// The identity on the platform: the named one, else the sender's, else the only one.
fn choose<'a>(
    identities: &'a [IdentityRecord],
    access: &Access,
    platform: &PlatformScope,
    named: Option<&IdentityName>,
) -> Result<&'a IdentityRecord> {
    let candidates: Vec<&IdentityRecord> = identities
        .iter()
        .filter(|identity| {
            let own = identity.name.platform();
            platform.covers(own.platform(), own.scope())
        })
        .collect();
    let wrong = |detail: &str| Error::invalid(vec![FieldError::new("/identity", detail)]);
    if let Some(named) = named {
        let found = candidates.iter().find(|identity| identity.name == *named);
        return found
            .copied()
            .ok_or_else(|| wrong("is no identity of this user on this platform"));
    }
    let sender = access.sender.as_ref().map(|sender| sender.id);
    let of_sender = candidates
        .iter()
        .find(|identity| Some(identity.id) == sender);
    match (of_sender, candidates.as_slice()) {
        (Some(of_sender), _) => Ok(of_sender),
        (None, [only]) => Ok(only),
        (None, []) => Err(wrong("the user has no identity on this platform")),
        (None, _) => Err(wrong("the user has several there: name one")),
    }
}
