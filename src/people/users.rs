//! People as the tenant keeps them: made with the accounts they have, renamed, given a time zone.

use crate::app::App;
use crate::audit;
use crate::domain::conversation::reset::TimeZone;
use crate::domain::people::display_name::DisplayName;
use crate::domain::people::identity::IdentityName;
use crate::domain::people::user::{
    EXTERNAL_ID_RULE, MAX_IDENTITIES, NewIdentity, User, is_external_id,
};
use crate::domain::tenant::audit::{Action, Entry};
use crate::error::{Code, Error, FieldError, Result};
use crate::ids::UserId;
use crate::store::TenantTx;
use crate::store::people::{identities, users};

pub struct NewUser {
    pub external_id: Option<String>,
    pub display_name: Option<DisplayName>,
    pub time_zone: Option<TimeZone>,
    /// Accounts that nobody has yet.
    pub identities: Vec<IdentityName>,
}

pub async fn create(app: &App, tx: &mut TenantTx, actor: &str, new: &NewUser) -> Result<User> {
    check_external_id(new.external_id.as_deref())?;
    if new.identities.len() > MAX_IDENTITIES {
        let detail = format!("a user has at most {MAX_IDENTITIES} identities");
        return Err(Error::new(Code::TooManyIdentities, detail));
    }
    let now = app.clock.now();
    let user = User {
        id: UserId::generate(),
        external_id: new.external_id.clone(),
        display_name: new
            .display_name
            .as_ref()
            .map(|name| name.as_str().to_owned()),
        time_zone: new.time_zone.map(|zone| zone.name().to_owned()),
        shared_since: (new.identities.len() > 1).then_some(now),
        created_at: now,
    };
    if !users::insert(tx, &user).await? {
        return Err(external_id_taken());
    }
    let mut taken = Vec::new();
    for (place, name) in new.identities.iter().enumerate() {
        let account = NewIdentity {
            name: name.clone(),
            issuer: None,
        };
        if identities::insert(tx, user.id, &account, now)
            .await?
            .is_none()
        {
            let detail = format!("{name} already belongs to another user");
            taken.push(FieldError::new(format!("/identities/{place}"), detail));
        }
    }
    if !taken.is_empty() {
        return Err(Error::fields(Code::IdentityTaken, taken));
    }
    let entry = Entry::new(actor, Action::UserCreate, &user.id);
    audit::append(&app.keyring, tx, entry, now).await?;
    Ok(user)
}

/// What is changed of a person; `Some(None)` takes it away.
#[derive(Default)]
pub struct UserChange {
    pub external_id: Option<Option<String>>,
    pub display_name: Option<Option<DisplayName>>,
    pub time_zone: Option<Option<TimeZone>>,
}

pub async fn update(
    app: &App,
    tx: &mut TenantTx,
    actor: &str,
    id: UserId,
    change: &UserChange,
) -> Result<User> {
    let missing = || Error::not_found("user");
    let found = users::find(tx, id).await?.ok_or_else(missing)?;
    let mut user = users::lock(tx, &[found.id])
        .await?
        .pop()
        .ok_or_else(missing)?;
    if let Some(external_id) = &change.external_id {
        check_external_id(external_id.as_deref())?;
        if let Some(external_id) = external_id {
            let owner = users::find_by_external_id(tx, external_id).await?;
            if owner.is_some_and(|owner| owner != user.id) {
                return Err(external_id_taken());
            }
        }
        user.external_id = external_id.clone();
    }
    if let Some(name) = &change.display_name {
        user.display_name = name.as_ref().map(|name| name.as_str().to_owned());
    }
    if let Some(zone) = change.time_zone {
        user.time_zone = zone.map(|zone| zone.name().to_owned());
    }
    users::update(tx, &user).await?;
    let entry = Entry::new(actor, Action::UserUpdate, &user.id);
    audit::append(&app.keyring, tx, entry, app.clock.now()).await?;
    Ok(user)
}

fn external_id_taken() -> Error {
    let error = FieldError::new("/external_id", "belongs to another user");
    Error::fields(Code::ExternalIdTaken, vec![error])
}

fn check_external_id(external_id: Option<&str>) -> Result<()> {
    if external_id.is_none_or(is_external_id) {
        Ok(())
    } else {
        let error = FieldError::new("/external_id", EXTERNAL_ID_RULE);
        Err(Error::invalid(vec![error]))
    }
}
