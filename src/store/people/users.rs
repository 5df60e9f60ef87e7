//! The tenant's people. An old id, merged away, is answered as its survivor by whatever looks one up.

use chrono::{DateTime, Utc};

use crate::domain::people::user::User;
use crate::domain::values::paging::{Page, PageRequest, Position};
use crate::error::Result;
use crate::ids::UserId;
use crate::store::TenantTx;

#[derive(sqlx::FromRow)]
struct Row {
    id: UserId,
    external_id: Option<String>,
    display_name: Option<String>,
    time_zone: Option<String>,
    shared_since: Option<DateTime<Utc>>,
    created_at: DateTime<Utc>,
}

impl From<Row> for User {
    fn from(row: Row) -> Self {
        Self {
            id: row.id,
            external_id: row.external_id,
            display_name: row.display_name,
            time_zone: row.time_zone,
            shared_since: row.shared_since,
            created_at: row.created_at,
        }
    }
}

/// The person of an id, or the one who became of it.
pub async fn find(tx: &mut TenantTx, id: UserId) -> Result<Option<User>> {
    let row = sqlx::query_as::<_, Row>(
        // Apart, because a policy lets no subquery reach an index of `users`: all of them would be read.
        "with found as materialized (
           select coalesce((select user_id
                              from user_redirects
                             where tenant_id = $1
                               and old_id = $2), $2) as id
         )
         select u.id, u.external_id, u.display_name, u.time_zone, u.shared_since, u.created_at
           from found f
           join users u
             on u.tenant_id = $1
            and u.id = f.id",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .fetch_optional(tx.connection())
    .await?;
    Ok(row.map(User::from))
}

/// Who `old_id` became, if it was merged away.
pub async fn find_redirect(tx: &mut TenantTx, old_id: UserId) -> Result<Option<UserId>> {
    Ok(sqlx::query_scalar(
        "select user_id
           from user_redirects
          where tenant_id = $1
            and old_id = $2",
    )
    .bind(tx.tenant_id())
    .bind(old_id)
    .fetch_optional(tx.connection())
    .await?)
}

/// The ids of those who had been merged into a person.
pub async fn list_merged(tx: &mut TenantTx, user_id: UserId) -> Result<Vec<UserId>> {
    Ok(sqlx::query_scalar(
        "select old_id
           from user_redirects
          where tenant_id = $1
            and user_id = $2
          order by old_id",
    )
    .bind(tx.tenant_id())
    .bind(user_id)
    .fetch_all(tx.connection())
    .await?)
}

/// Holds people until `tx` ends, by id: whoever joins or parts them does so one after the other. Answers
/// those that are there. What refers to a person may still be written meanwhile.
pub async fn lock(tx: &mut TenantTx, ids: &[UserId]) -> Result<Vec<User>> {
    let rows = sqlx::query_as::<_, Row>(
        "select id, external_id, display_name, time_zone, shared_since, created_at
           from users
          where tenant_id = $1
            and id = any ($2)
          order by id
            for no key update",
    )
    .bind(tx.tenant_id())
    .bind(ids)
    .fetch_all(tx.connection())
    .await?;
    Ok(rows.into_iter().map(User::from).collect())
}

/// Keeps a user from being linked, unlinked or erased until `tx` ends. Others may hold them so too: whoever makes
/// a slot of the user does, before any other lock.
pub async fn lock_shared(tx: &mut TenantTx, id: UserId) -> Result<()> {
    sqlx::query(
        "select 1
           from users
          where tenant_id = $1
            and id = $2
            for share",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .execute(tx.connection())
    .await?;
    Ok(())
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

/// Makes a person. False if the external id is someone else's.
pub async fn insert(tx: &mut TenantTx, user: &User) -> Result<bool> {
    let done = sqlx::query(
        "insert into users (tenant_id, id, external_id, display_name, time_zone, shared_since, created_at)
         values ($1, $2, $3, $4, $5, $6, $7)
             on conflict on constraint users_external_id_once do nothing",
    )
    .bind(tx.tenant_id())
    .bind(user.id)
    .bind(&user.external_id)
    .bind(&user.display_name)
    .bind(&user.time_zone)
    .bind(user.shared_since)
    .bind(user.created_at)
    .execute(tx.connection())
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Whose external id it is.
pub async fn find_by_external_id(tx: &mut TenantTx, external_id: &str) -> Result<Option<UserId>> {
    Ok(sqlx::query_scalar(
        "select id
           from users
          where tenant_id = $1
            and external_id = $2",
    )
    .bind(tx.tenant_id())
    .bind(external_id)
    .fetch_optional(tx.connection())
    .await?)
}

/// Writes what can be changed of a person. Whoever calls holds the person, and has seen that the
/// external id is free.
pub async fn update(tx: &mut TenantTx, user: &User) -> Result<()> {
    sqlx::query(
        "update users
            set external_id = $3, display_name = $4, time_zone = $5, shared_since = $6,
                named_by_import = named_by_import and external_id is not distinct from $3
          where tenant_id = $1
            and id = $2",
    )
    .bind(tx.tenant_id())
    .bind(user.id)
    .bind(&user.external_id)
    .bind(&user.display_name)
    .bind(&user.time_zone)
    .bind(user.shared_since)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Whether the external id of a person came with an import.
pub async fn is_named_by_import(tx: &mut TenantTx, id: UserId) -> Result<bool> {
    Ok(sqlx::query_scalar(
        "select named_by_import
           from users
          where tenant_id = $1
            and id = $2",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .fetch_one(tx.connection())
    .await?)
}

/// Says that it did.
pub async fn update_named_by_import(tx: &mut TenantTx, id: UserId) -> Result<()> {
    sqlx::query(
        "update users
            set named_by_import = true
          where tenant_id = $1
            and id = $2",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Newest first; of those with one external id, or the one with an account, if asked so.
pub async fn list(
    tx: &mut TenantTx,
    external_id: Option<&str>,
    user_id: Option<UserId>,
    page: &PageRequest,
) -> Result<Page<User>> {
    let rows = sqlx::query_as::<_, Row>(
        "select id, external_id, display_name, time_zone, shared_since, created_at
           from users
          where tenant_id = $1
            and ($2::text is null or external_id = $2)
            and ($3::uuid is null or id = $3)
            and ($4::timestamptz is null or (created_at, id) < ($4, $5))
          order by created_at desc, id desc
          limit $6",
    )
    .bind(tx.tenant_id())
    .bind(external_id)
    .bind(user_id)
    .bind(page.after.map(|after| after.created_at))
    .bind(page.after.map(|after| after.id))
    .bind(page.fetch_limit())
    .fetch_all(tx.connection())
    .await?;
    let users = rows.into_iter().map(User::from).collect();
    Ok(Page::cut(users, page, |user: &User| Position {
        created_at: user.created_at,
        id: user.id.as_uuid(),
    }))
}
