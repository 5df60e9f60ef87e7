//! Where a person wants to be reached. A person may only say their own direct chat; what leads anywhere
//! else is for an admin to decide.

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
    /// The account there; else the one that speaks, else the only one.
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
    if !matches!(access.reach, Visibility::Tenant) {
        new.chat.require_private()?;
    }
    let accounts = identities::list(tx, new.user_id).await?;
    let account = choose(&accounts, access, new.platform, new.identity)?;
    let now = app.clock.now();
    home_channels::put(tx, new.user_id, new.platform, account.id, new.chat, now).await?;
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

/// The account on the platform: the one that is named, else the one that speaks, else the only one.
fn choose<'a>(
    accounts: &'a [IdentityRecord],
    access: &Access,
    platform: &PlatformScope,
    named: Option<&IdentityName>,
) -> Result<&'a IdentityRecord> {
    let there: Vec<&IdentityRecord> = accounts
        .iter()
        .filter(|account| {
            let own = account.name.platform();
            platform.covers(own.platform(), own.scope())
        })
        .collect();
    let wrong = |detail: &str| Error::invalid(vec![FieldError::new("/identity", detail)]);
    if let Some(named) = named {
        let found = there.iter().find(|account| account.name == *named);
        return found
            .copied()
            .ok_or_else(|| wrong("is not an identity of this user on this platform"));
    }
    let speaker = access.speaker.as_ref().map(|speaker| speaker.id);
    let speaking = there.iter().find(|account| Some(account.id) == speaker);
    match (speaking, there.as_slice()) {
        (Some(speaking), _) => Ok(speaking),
        (None, [only]) => Ok(only),
        (None, []) => Err(wrong("the person has no identity on this platform")),
        (None, _) => Err(wrong("the person has several there: say which")),
    }
}
