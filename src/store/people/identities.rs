//! Identities on platforms, and their current users.

use chrono::{DateTime, Utc};

use crate::domain::people::identity::IdentityName;
use crate::domain::people::normalise;
use crate::domain::people::platform::PlatformScope;
use crate::domain::people::user::{IdentityOwner, IdentityRecord, NewIdentity};
use crate::error::{Error, Result};
use crate::ids::{IdentityId, UserId};
use crate::store::TenantTx;

/// Public for the bench of `/v1/inbound`, which runs it beside the service.
pub const FIND: &str = "select id, user_id
       from identities
      where tenant_id = $1
        and platform = $2
        and scope = $3
        and external_id = $4";

pub async fn find(tx: &mut TenantTx, name: &IdentityName) -> Result<Option<IdentityOwner>> {
    let row: Option<(IdentityId, UserId)> = sqlx::query_as(FIND)
        .bind(tx.tenant_id())
        .bind(name.platform().platform())
        .bind(name.platform().scope().unwrap_or_default())
        .bind(name.external_id())
        .fetch_optional(tx.connection())
        .await?;
    Ok(row.map(|(id, user_id)| IdentityOwner { id, user_id }))
}

#[derive(sqlx::FromRow)]
pub(in crate::store) struct IdentityRow {
    id: IdentityId,
    user_id: UserId,
    platform: String,
    scope: String,
    external_id: String,
    raw: String,
    issuer: Option<String>,
    imported: bool,
    linked_at: DateTime<Utc>,
    created_at: DateTime<Utc>,
}

impl TryFrom<IdentityRow> for IdentityRecord {
    type Error = Error;

    fn try_from(row: IdentityRow) -> Result<Self> {
        Ok(Self {
            id: row.id,
            user_id: row.user_id,
            name: read_name(&row.platform, &row.scope, row.external_id)?,
            raw: row.raw,
            issuer: row.issuer,
            imported: row.imported,
            linked_at: row.linked_at,
            created_at: row.created_at,
        })
    }
}

/// Reads the name of an identity from its columns.
pub(in crate::store) fn read_name(
    platform: &str,
    scope: &str,
    external_id: String,
) -> Result<IdentityName> {
    let platform = PlatformScope::from_columns(platform, scope).map_err(Error::internal)?;
    IdentityName::new(platform, external_id).map_err(Error::internal)
}

pub async fn get(tx: &mut TenantTx, id: IdentityId) -> Result<Option<IdentityRecord>> {
    let row = sqlx::query_as::<_, IdentityRow>(
        "select id, user_id, platform, scope, external_id, raw, issuer, imported, linked_at, created_at
           from identities
          where tenant_id = $1
            and id = $2",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .fetch_optional(tx.connection())
    .await?;
    row.map(IdentityRecord::try_from).transpose()
}

/// The user that an identity belongs to now.
pub async fn find_user(tx: &mut TenantTx, id: IdentityId) -> Result<Option<UserId>> {
    Ok(sqlx::query_scalar(
        "select user_id
           from identities
          where tenant_id = $1
            and id = $2",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .fetch_optional(tx.connection())
    .await?)
}

/// Every identity of a user, in the order in which they were linked; none if the user does not exist.
pub async fn list(tx: &mut TenantTx, user_id: UserId) -> Result<Vec<IdentityRecord>> {
    let rows = sqlx::query_as::<_, IdentityRow>(
        "select id, user_id, platform, scope, external_id, raw, issuer, imported, linked_at, created_at
           from identities
          where tenant_id = $1
            and user_id = $2
          order by linked_at, created_at, id",
    )
    .bind(tx.tenant_id())
    .bind(user_id)
    .fetch_all(tx.connection())
    .await?;
    rows.into_iter().map(IdentityRecord::try_from).collect()
}

/// First contact: inserts the identity and its user in one statement, or nothing if another transaction has
/// just inserted them. Postgres checks the foreign key at the end of the statement, so the identity may come
/// first and decide the race.
pub async fn insert_with_user(
    tx: &mut TenantTx,
    identity: &NewIdentity,
    now: DateTime<Utc>,
) -> Result<Option<IdentityOwner>> {
    let inserted: Option<(IdentityId, UserId)> = sqlx::query_as(
        "with identity as (
           insert into identities (tenant_id, id, user_id, platform, scope, external_id, raw, normalisation,
                                   issuer, linked_at, created_at)
           values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $10)
               on conflict on constraint identities_once do nothing
        returning tenant_id, id, user_id, created_at
         ), owner as (
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
    .bind(identity.name.platform().platform())
    .bind(identity.name.platform().scope().unwrap_or_default())
    .bind(identity.name.external_id())
    .bind(identity.name.raw())
    .bind(normalise::VERSION)
    .bind(&identity.issuer)
    .bind(now)
    .fetch_optional(tx.connection())
    .await?;
    Ok(inserted.map(|(id, user_id)| IdentityOwner { id, user_id }))
}

/// Inserts an identity of an existing user. Returns `None` if the identity exists already.
pub async fn insert(
    tx: &mut TenantTx,
    user_id: UserId,
    identity: &NewIdentity,
    now: DateTime<Utc>,
) -> Result<Option<IdentityId>> {
    Ok(sqlx::query_scalar(
        "insert into identities (tenant_id, id, user_id, platform, scope, external_id, raw, normalisation,
                                 issuer, linked_at, created_at)
         values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $10)
             on conflict on constraint identities_once do nothing
      returning id",
    )
    .bind(tx.tenant_id())
    .bind(IdentityId::generate())
    .bind(user_id)
    .bind(identity.name.platform().platform())
    .bind(identity.name.platform().scope().unwrap_or_default())
    .bind(identity.name.external_id())
    .bind(identity.name.raw())
    .bind(normalise::VERSION)
    .bind(&identity.issuer)
    .bind(now)
    .fetch_optional(tx.connection())
    .await?)
}

/// Moves an identity to another user, other than by import. The caller must have locked both users.
pub async fn update_user(
    tx: &mut TenantTx,
    id: IdentityId,
    user_id: UserId,
    now: DateTime<Utc>,
) -> Result<()> {
    sqlx::query(
        "update identities
            set user_id = $3, linked_at = $4, imported = false
          where tenant_id = $1
            and id = $2",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .bind(user_id)
    .bind(now)
    .execute(tx.connection())
    .await?;
    Ok(())
}
