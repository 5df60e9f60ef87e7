//! The tenant's users. Look-ups by the old id of a merged user return the user's survivor.

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

/// The user with this id, or the user into whom that one was merged.
pub async fn find(tx: &mut TenantTx, id: UserId) -> Result<Option<User>> {
    let row = sqlx::query_as::<_, Row>(
        // A CTE, because under row-level security a subquery cannot use an index of `users` and would read all rows.
        "with current_id as materialized (
           select coalesce((select user_id
                              from user_redirects
                             where tenant_id = $1
                               and old_id = $2), $2) as id
         )
         select u.id, u.external_id, u.display_name, u.time_zone, u.shared_since, u.created_at
           from current_id c
           join users u
             on u.tenant_id = $1
            and u.id = c.id",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .fetch_optional(tx.connection())
    .await?;
    Ok(row.map(User::from))
}

/// The survivor of the user `old_id`, if that user was merged.
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

/// The ids of the users who were merged into a user.
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

/// Locks users until `tx` ends, in the order of their ids: merges and unlinks of them run one after the other. Returns
/// those that exist. Other transactions may still insert rows that refer to a locked user.
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

/// Prevents a merge, unlink or erasure of the user until `tx` ends. The lock is shared: each transaction that inserts
/// a slot of the user takes it, before any other lock.
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

/// The stored name of a user's time zone.
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

/// Inserts a user. Returns false if another user has the external id.
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

/// The user with this external id.
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

/// Updates a user's changeable columns. The caller must have locked the user and checked that the external
/// id is free.
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

/// True if an import set the user's external id.
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

/// Records that an import set the user's external id.
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

/// Newest first. `external_id` and `user_id` filter the list.
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
