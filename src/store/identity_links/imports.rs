//! Imports of identity links: a few statements read and change all users of a document, however many they are.

use std::collections::{BTreeMap, HashMap};

use chrono::{DateTime, Utc};

use crate::domain::identity_links::group::{LinkedIdentity, LinkedUser, Origin};
use crate::domain::people::identity::IdentityName;
use crate::domain::people::normalise;
use crate::domain::people::platform::PlatformScope;
use crate::error::{Error, Result};
use crate::ids::{IdentityId, MoveId, UserId};
use crate::store::TenantTx;
use crate::store::people::identities::read_name;

/// The names of identities as columns, to bind as arrays.
#[derive(Default)]
struct Columns<'a> {
    platforms: Vec<&'a str>,
    scopes: Vec<&'a str>,
    external_ids: Vec<&'a str>,
}

impl<'a> Columns<'a> {
    fn from_names(names: impl Iterator<Item = &'a IdentityName>) -> Self {
        let mut columns = Self::default();
        for name in names {
            columns.platforms.push(name.platform().platform());
            columns
                .scopes
                .push(name.platform().scope().unwrap_or_default());
            columns.external_ids.push(name.external_id());
        }
        columns
    }
}

/// The users with one of these names or identities, and all users that an import named or linked, by id.
pub async fn list_users(
    tx: &mut TenantTx,
    names: &[&str],
    identities: &[&IdentityName],
) -> Result<Vec<LinkedUser>> {
    let columns = Columns::from_names(identities.iter().copied());
    let rows: Vec<(UserId, Option<String>, bool)> = sqlx::query_as(
        "with concerned as (
           select i.user_id as id
             from unnest($3::text[], $4::text[], $5::text[]) as d (platform, scope, external_id)
             join identities i
               on i.tenant_id = $1
              and i.platform = d.platform
              and i.scope = d.scope
              and i.external_id = d.external_id
            union
           select user_id
             from identities
            where tenant_id = $1
              and imported
            union
           select id
             from users
            where tenant_id = $1
              and named_by_import
            union
           select id
             from users
            where tenant_id = $1
              and external_id = any ($2)
         )
         select u.id, u.external_id, u.named_by_import
           from concerned c
           join users u
             on u.tenant_id = $1
            and u.id = c.id
          order by u.id",
    )
    .bind(tx.tenant_id())
    .bind(names)
    .bind(&columns.platforms)
    .bind(&columns.scopes)
    .bind(&columns.external_ids)
    .fetch_all(tx.connection())
    .await?;
    let ids: Vec<UserId> = rows.iter().map(|(id, ..)| *id).collect();
    let mut identities = list_identities(tx, &ids).await?;
    let users = rows.into_iter();
    let users = users.map(|(id, external_id, named_by_import)| LinkedUser {
        id,
        external_id,
        named_by_import,
        identities: identities.remove(&id).unwrap_or_default(),
    });
    Ok(users.collect())
}

#[derive(sqlx::FromRow)]
struct IdentityRow {
    id: IdentityId,
    user_id: UserId,
    platform: String,
    scope: String,
    external_id: String,
    imported: bool,
    linked_at: DateTime<Utc>,
}

async fn list_identities(
    tx: &mut TenantTx,
    users: &[UserId],
) -> Result<HashMap<UserId, Vec<LinkedIdentity>>> {
    let rows: Vec<IdentityRow> = sqlx::query_as(
        "select id, user_id, platform, scope, external_id, imported, linked_at
           from identities
          where tenant_id = $1
            and user_id = any ($2)
          order by user_id, linked_at, created_at, id",
    )
    .bind(tx.tenant_id())
    .bind(users)
    .fetch_all(tx.connection())
    .await?;
    let ids: Vec<IdentityId> = rows.iter().map(|row| row.id).collect();
    let mut origins = list_origins(tx, &ids).await?;
    let mut identities: HashMap<UserId, Vec<LinkedIdentity>> = HashMap::new();
    for row in rows {
        let identity = LinkedIdentity {
            id: row.id,
            name: read_name(&row.platform, &row.scope, row.external_id)?,
            imported: row.imported,
            linked_at: row.linked_at,
            origin: origins.remove(&row.id),
        };
        identities.entry(row.user_id).or_default().push(identity);
    }
    Ok(identities)
}

/// The imports that linked these identities to their users. An unlink ends the effect of earlier imports.
async fn list_origins(
    tx: &mut TenantTx,
    identities: &[IdentityId],
) -> Result<HashMap<IdentityId, Origin>> {
    let rows: Vec<(IdentityId, Vec<UserId>, bool, DateTime<Utc>)> = sqlx::query_as(
        "select m.identity_id, array_agg(m.from_user order by m.created_at, m.id),
                bool_or(m.from_user = m.to_user), min(m.created_at)
           from identity_moves m
          where m.tenant_id = $1
            and m.identity_id = any ($2)
            and m.kind = 'import'
            and not exists (select 1
                              from identity_moves later
                             where later.tenant_id = $1
                               and later.identity_id = m.identity_id
                               and later.kind = 'unlink'
                               and (later.created_at, later.id) > (m.created_at, m.id))
          group by m.identity_id",
    )
    .bind(tx.tenant_id())
    .bind(identities)
    .fetch_all(tx.connection())
    .await?;
    let origins = rows
        .into_iter()
        .map(|(id, path, created, at)| (id, Origin { path, created, at }));
    Ok(origins.collect())
}

/// The links of the last document: names, each with its identities in the order in which they were linked.
pub async fn list_links(tx: &mut TenantTx) -> Result<BTreeMap<String, Vec<String>>> {
    let rows: Vec<(String, String, String, String)> = sqlx::query_as(
        "select u.external_id, i.platform, i.scope, i.raw
           from identities i
           join users u
             on u.tenant_id = $1
            and u.id = i.user_id
            and u.external_id is not null
          where i.tenant_id = $1
            and i.imported
          order by i.linked_at, i.created_at, i.id",
    )
    .bind(tx.tenant_id())
    .fetch_all(tx.connection())
    .await?;
    let names: Vec<String> = sqlx::query_scalar(
        "select external_id
           from users
          where tenant_id = $1
            and named_by_import
            and external_id is not null",
    )
    .bind(tx.tenant_id())
    .fetch_all(tx.connection())
    .await?;
    let names = names.into_iter().map(|name| (name, Vec::new()));
    let mut links: BTreeMap<String, Vec<String>> = names.collect();
    for (name, platform, scope, raw) in rows {
        let platform = PlatformScope::from_columns(&platform, &scope).map_err(Error::internal)?;
        let identity = format!("{platform}:{raw}");
        links.entry(name).or_default().push(identity);
    }
    Ok(links)
}

/// A user that a document creates.
pub struct ImportedUser<'a> {
    pub id: UserId,
    pub name: &'a str,
    pub linked: bool,
}

/// Inserts users. Returns false if another user has just received one of the names.
pub async fn insert_users(
    tx: &mut TenantTx,
    users: &[ImportedUser<'_>],
    now: DateTime<Utc>,
) -> Result<bool> {
    let ids: Vec<UserId> = users.iter().map(|user| user.id).collect();
    let names: Vec<&str> = users.iter().map(|user| user.name).collect();
    let linked: Vec<bool> = users.iter().map(|user| user.linked).collect();
    let done = sqlx::query(
        "insert into users (tenant_id, id, external_id, named_by_import, shared_since, created_at)
         select $1, d.id, d.name, true, case when d.linked then $5 end, $5
           from unnest($2::uuid[], $3::text[], $4::boolean[]) as d (id, name, linked)
             on conflict on constraint users_external_id_once do nothing",
    )
    .bind(tx.tenant_id())
    .bind(&ids)
    .bind(&names)
    .bind(&linked)
    .bind(now)
    .execute(tx.connection())
    .await?;
    Ok(done.rows_affected() == users.len() as u64)
}

/// Sets the names of users. Returns false if another user has just received one of them.
pub async fn update_names(tx: &mut TenantTx, names: &[(UserId, &str)]) -> Result<bool> {
    let ids: Vec<UserId> = names.iter().map(|(id, _)| *id).collect();
    let names: Vec<&str> = names.iter().map(|(_, name)| *name).collect();
    let result = sqlx::query(
        "update users u
            set external_id = d.name, named_by_import = true
           from unnest($2::uuid[], $3::text[]) as d (id, name)
          where u.tenant_id = $1
            and u.id = d.id",
    )
    .bind(tx.tenant_id())
    .bind(&ids)
    .bind(&names)
    .execute(tx.connection())
    .await;
    match result {
        Ok(_) => Ok(true),
        Err(sqlx::Error::Database(error)) if error.is_unique_violation() => Ok(false),
        Err(error) => Err(Error::from(error)),
    }
}

/// Removes names that imports set.
pub async fn delete_names(tx: &mut TenantTx, users: &[UserId]) -> Result<()> {
    sqlx::query(
        "update users
            set external_id = null, named_by_import = false
          where tenant_id = $1
            and id = any ($2)",
    )
    .bind(tx.tenant_id())
    .bind(users)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Inserts identities, each with a move of the kind `import`, which tells them from identities of another origin.
/// Returns false if one of them has just been inserted by its first contact.
pub async fn insert_identities(
    tx: &mut TenantTx,
    identities: &[(UserId, &IdentityName)],
    now: DateTime<Utc>,
) -> Result<bool> {
    let columns = Columns::from_names(identities.iter().map(|(_, name)| *name));
    let ids: Vec<IdentityId> = identities.iter().map(|_| IdentityId::generate()).collect();
    let moves: Vec<MoveId> = identities.iter().map(|_| MoveId::generate()).collect();
    let users: Vec<UserId> = identities.iter().map(|(user_id, _)| *user_id).collect();
    let raws: Vec<&str> = identities.iter().map(|(_, name)| name.raw()).collect();
    let done = sqlx::query(
        "insert into identities (tenant_id, id, user_id, platform, scope, external_id, raw, normalisation,
                                 imported, linked_at, created_at)
         select $1, d.id, d.user_id, d.platform, d.scope, d.external_id, d.raw, $8, true, $9, $9
           from unnest($2::uuid[], $3::uuid[], $4::text[], $5::text[], $6::text[], $7::text[])
                as d (id, user_id, platform, scope, external_id, raw)
             on conflict on constraint identities_once do nothing",
    )
    .bind(tx.tenant_id())
    .bind(&ids)
    .bind(&users)
    .bind(&columns.platforms)
    .bind(&columns.scopes)
    .bind(&columns.external_ids)
    .bind(&raws)
    .bind(normalise::VERSION)
    .bind(now)
    .execute(tx.connection())
    .await?;
    if done.rows_affected() != identities.len() as u64 {
        return Ok(false);
    }
    sqlx::query(
        "insert into identity_moves (tenant_id, id, identity_id, from_user, to_user, kind, created_at)
         select $1, d.id, d.identity_id, d.user_id, d.user_id, 'import', $5
           from unnest($2::uuid[], $3::uuid[], $4::uuid[]) as d (id, identity_id, user_id)",
    )
    .bind(tx.tenant_id())
    .bind(&moves)
    .bind(&ids)
    .bind(&users)
    .bind(now)
    .execute(tx.connection())
    .await?;
    Ok(true)
}

/// Unlinks identities that were never used, each to a user of its own.
pub async fn unlink_unused(
    tx: &mut TenantTx,
    identities: &[IdentityId],
    now: DateTime<Utc>,
    undo_until: DateTime<Utc>,
) -> Result<()> {
    let moves: Vec<MoveId> = identities.iter().map(|_| MoveId::generate()).collect();
    let users: Vec<UserId> = identities.iter().map(|_| UserId::generate()).collect();
    sqlx::query(
        "insert into identity_moves (tenant_id, id, identity_id, from_user, to_user, kind, created_at, undo_until)
         select $1, d.id, i.id, i.user_id, d.user_id, 'unlink', $5, $6
           from unnest($2::uuid[], $3::uuid[], $4::uuid[]) as d (id, identity_id, user_id)
           join identities i
             on i.tenant_id = $1
            and i.id = d.identity_id",
    )
    .bind(tx.tenant_id())
    .bind(&moves)
    .bind(identities)
    .bind(&users)
    .bind(now)
    .bind(undo_until)
    .execute(tx.connection())
    .await?;
    sqlx::query(
        "insert into users (tenant_id, id, created_at)
         select $1, d.id, $3
           from unnest($2::uuid[]) as d (id)",
    )
    .bind(tx.tenant_id())
    .bind(&users)
    .bind(now)
    .execute(tx.connection())
    .await?;
    sqlx::query(
        "update identities i
            set user_id = d.user_id, linked_at = $4, imported = false
           from unnest($2::uuid[], $3::uuid[]) as d (id, user_id)
          where i.tenant_id = $1
            and i.id = d.id",
    )
    .bind(tx.tenant_id())
    .bind(identities)
    .bind(&users)
    .bind(now)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Stores whether the document lists these identities.
pub async fn update_imported(
    tx: &mut TenantTx,
    identities: &[IdentityId],
    imported: bool,
) -> Result<()> {
    sqlx::query(
        "update identities
            set imported = $3
          where tenant_id = $1
            and id = any ($2)",
    )
    .bind(tx.tenant_id())
    .bind(identities)
    .bind(imported)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Marks users as linked: they share one slot on all platforms from now on. Returns those that did not before.
pub async fn update_shared(
    tx: &mut TenantTx,
    users: &[UserId],
    now: DateTime<Utc>,
) -> Result<Vec<UserId>> {
    Ok(sqlx::query_scalar(
        "update users
            set shared_since = $3
          where tenant_id = $1
            and id = any ($2)
            and shared_since is null
      returning id",
    )
    .bind(tx.tenant_id())
    .bind(users)
    .bind(now)
    .fetch_all(tx.connection())
    .await?)
}
