//! People and the accounts they speak from. In columns, the scope '' is none.

use chrono::{DateTime, Utc};

use super::TenantTx;
use crate::domain::identity::IdentityName;
use crate::domain::platform::PlatformScope;
use crate::domain::user::{Account, Identity, KnownIdentity, User};
use crate::error::{Error, Result};
use crate::ids::{IdentityId, UserId};

#[derive(sqlx::FromRow)]
struct Row {
    id: UserId,
    external_id: Option<String>,
    display_name: Option<String>,
    created_at: DateTime<Utc>,
}

pub async fn find(tx: &mut TenantTx, id: UserId) -> Result<Option<User>> {
    let row = sqlx::query_as::<_, Row>(
        "select id, external_id, display_name, created_at
           from users
          where tenant_id = $1
            and id = $2",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .fetch_optional(tx.connection())
    .await?;
    Ok(row.map(|row| User {
        id: row.id,
        external_id: row.external_id,
        display_name: row.display_name,
        created_at: row.created_at,
    }))
}

/// The name of the zone a person lives by, as it was stored.
pub async fn find_time_zone(tx: &mut TenantTx, id: UserId) -> Result<Option<String>> {
    let zone: Option<Option<String>> = sqlx::query_scalar(
        "select time_zone
           from users
          where tenant_id = $1
            and id = $2",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .fetch_optional(tx.connection())
    .await?;
    Ok(zone.flatten())
}

pub async fn find_identity(
    tx: &mut TenantTx,
    name: &IdentityName,
) -> Result<Option<KnownIdentity>> {
    let row: Option<(IdentityId, UserId)> = sqlx::query_as(
        "select id, user_id
           from identities
          where tenant_id = $1
            and platform = $2
            and scope = $3
            and external_id = $4",
    )
    .bind(tx.tenant_id())
    .bind(name.platform().platform())
    .bind(name.platform().scope().unwrap_or_default())
    .bind(name.external_id())
    .fetch_optional(tx.connection())
    .await?;
    Ok(row.map(|(id, user_id)| KnownIdentity { id, user_id }))
}

#[derive(sqlx::FromRow)]
struct IdentityRow {
    id: IdentityId,
    platform: String,
    scope: String,
    external_id: String,
}

impl TryFrom<IdentityRow> for Identity {
    type Error = Error;

    fn try_from(row: IdentityRow) -> Result<Self> {
        let text = match row.scope.as_str() {
            "" => row.platform,
            scope => format!("{}@{scope}", row.platform),
        };
        let platform: PlatformScope = text.parse().map_err(Error::internal)?;
        Ok(Self {
            id: row.id,
            name: IdentityName::new(platform, row.external_id).map_err(Error::internal)?,
        })
    }
}

/// Every account of a person, the oldest first; none if there is no such person.
pub async fn list_identities(tx: &mut TenantTx, user_id: UserId) -> Result<Vec<Identity>> {
    let rows = sqlx::query_as::<_, IdentityRow>(
        "select id, platform, scope, external_id
           from identities
          where tenant_id = $1
            and user_id = $2
          order by created_at, id",
    )
    .bind(tx.tenant_id())
    .bind(user_id)
    .fetch_all(tx.connection())
    .await?;
    rows.into_iter().map(Identity::try_from).collect()
}

/// First contact: makes the identity and its user in one statement, or nothing if someone else has
/// just made them. The foreign key is checked when the statement ends, so the identity may come first
/// and decide the race.
pub async fn insert_identity(
    tx: &mut TenantTx,
    account: &Account,
    now: DateTime<Utc>,
) -> Result<Option<KnownIdentity>> {
    let made: Option<(IdentityId, UserId)> = sqlx::query_as(
        "with identity as (
           insert into identities (tenant_id, id, user_id, platform, scope, external_id, issuer, created_at)
           values ($1, $2, $3, $4, $5, $6, $7, $8)
               on conflict on constraint identities_once do nothing
        returning tenant_id, id, user_id, created_at
         ), person as (
           insert into users (tenant_id, id, created_at)
           select tenant_id, user_id, created_at
             from identity
         )
         select id, user_id
           from identity",
    )
    .bind(tx.tenant_id())
    .bind(IdentityId::generate())
    .bind(UserId::generate())
    .bind(account.name.platform().platform())
    .bind(account.name.platform().scope().unwrap_or_default())
    .bind(account.name.external_id())
    .bind(&account.issuer)
    .bind(now)
    .fetch_optional(tx.connection())
    .await?;
    Ok(made.map(|(id, user_id)| KnownIdentity { id, user_id }))
}
