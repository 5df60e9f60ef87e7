//! Imports of links: the people whom a document concerns, read with a few statements however many they
//! are, and changed as many at a time.

use std::collections::{BTreeMap, HashMap};

use chrono::{DateTime, Utc};

use crate::domain::identity_links::group::{LinkedAccount, LinkedUser, Origin};
use crate::domain::people::identity::IdentityName;
use crate::domain::people::normalise;
use crate::domain::people::platform::PlatformScope;
use crate::error::{Error, Result};
use crate::ids::{IdentityId, MoveId, UserId};
use crate::store::TenantTx;
use crate::store::people::identities::read_name;

/// Accounts as columns, to be bound as arrays.
#[derive(Default)]
struct Columns<'a> {
    platforms: Vec<&'a str>,
    scopes: Vec<&'a str>,
    external_ids: Vec<&'a str>,
}

impl<'a> Columns<'a> {
    fn of(names: impl Iterator<Item = &'a IdentityName>) -> Self {
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

/// Everyone with one of these names or accounts, and everyone whom an import named or linked, by id.
pub async fn list_users(
    tx: &mut TenantTx,
    names: &[&str],
    accounts: &[&IdentityName],
) -> Result<Vec<LinkedUser>> {
    let columns = Columns::of(accounts.iter().copied());
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
    let mut accounts = list_accounts(tx, &ids).await?;
    let people = rows.into_iter();
    let people = people.map(|(id, external_id, named_by_import)| LinkedUser {
        id,
        external_id,
        named_by_import,
        accounts: accounts.remove(&id).unwrap_or_default(),
    });
    Ok(people.collect())
}

#[derive(sqlx::FromRow)]
struct AccountRow {
    id: IdentityId,
    user_id: UserId,
    platform: String,
    scope: String,
    external_id: String,
    imported: bool,
    linked_at: DateTime<Utc>,
}

async fn list_accounts(
    tx: &mut TenantTx,
    users: &[UserId],
) -> Result<HashMap<UserId, Vec<LinkedAccount>>> {
    let rows: Vec<AccountRow> = sqlx::query_as(
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
    let mut accounts: HashMap<UserId, Vec<LinkedAccount>> = HashMap::new();
    for row in rows {
        let account = LinkedAccount {
            id: row.id,
            name: read_name(&row.platform, &row.scope, row.external_id)?,
            imported: row.imported,
            linked_at: row.linked_at,
            origin: origins.remove(&row.id),
        };
        accounts.entry(row.user_id).or_default().push(account);
    }
    Ok(accounts)
}

/// How imports brought these accounts where they are. A parting ends what was before it.
async fn list_origins(
    tx: &mut TenantTx,
    accounts: &[IdentityId],
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
    .bind(accounts)
    .fetch_all(tx.connection())
    .await?;
    let origins = rows
        .into_iter()
        .map(|(id, path, made, at)| (id, Origin { path, made, at }));
    Ok(origins.collect())
}

/// What the last document listed: names, each with the accounts under it in the order they came.
pub async fn list_links(tx: &mut TenantTx) -> Result<BTreeMap<String, Vec<String>>> {
    let listed: Vec<(String, String, String, String)> = sqlx::query_as(
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
    let named: Vec<String> = sqlx::query_scalar(
        "select external_id
           from users
          where tenant_id = $1
            and named_by_import
            and external_id is not null",
    )
    .bind(tx.tenant_id())
    .fetch_all(tx.connection())
    .await?;
    let named = named.into_iter().map(|name| (name, Vec::new()));
    let mut links: BTreeMap<String, Vec<String>> = named.collect();
    for (name, platform, scope, raw) in listed {
        let platform = PlatformScope::from_columns(&platform, &scope).map_err(Error::internal)?;
        let account = format!("{platform}:{raw}");
        links.entry(name).or_default().push(account);
    }
    Ok(links)
}

/// A person whom a document makes.
pub struct ImportedUser<'a> {
    pub id: UserId,
    pub name: &'a str,
    pub linked: bool,
}

/// Makes people. False if one of the names was just given to someone else.
pub async fn insert_users(
    tx: &mut TenantTx,
    people: &[ImportedUser<'_>],
    now: DateTime<Utc>,
) -> Result<bool> {
    let ids: Vec<UserId> = people.iter().map(|person| person.id).collect();
    let names: Vec<&str> = people.iter().map(|person| person.name).collect();
    let linked: Vec<bool> = people.iter().map(|person| person.linked).collect();
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
    Ok(done.rows_affected() == people.len() as u64)
}

/// Gives people names. False if one of them was just given to someone else.
pub async fn update_names(tx: &mut TenantTx, names: &[(UserId, &str)]) -> Result<bool> {
    let ids: Vec<UserId> = names.iter().map(|(id, _)| *id).collect();
    let names: Vec<&str> = names.iter().map(|(_, name)| *name).collect();
    let done = sqlx::query(
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
    match done {
        Ok(_) => Ok(true),
        Err(sqlx::Error::Database(error)) if error.is_unique_violation() => Ok(false),
        Err(error) => Err(Error::from(error)),
    }
}

/// Takes names back that imports gave.
pub async fn delete_names(tx: &mut TenantTx, people: &[UserId]) -> Result<()> {
    sqlx::query(
        "update users
            set external_id = null, named_by_import = false
          where tenant_id = $1
            and id = any ($2)",
    )
    .bind(tx.tenant_id())
    .bind(people)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Makes accounts, and remembers that an import did: that tells them from what came otherwise. False if
/// one of them was just heard for the first time.
pub async fn insert_identities(
    tx: &mut TenantTx,
    accounts: &[(UserId, &IdentityName)],
    now: DateTime<Utc>,
) -> Result<bool> {
    let columns = Columns::of(accounts.iter().map(|(_, name)| *name));
    let ids: Vec<IdentityId> = accounts.iter().map(|_| IdentityId::generate()).collect();
    let moves: Vec<MoveId> = accounts.iter().map(|_| MoveId::generate()).collect();
    let users: Vec<UserId> = accounts.iter().map(|(user_id, _)| *user_id).collect();
    let raws: Vec<&str> = accounts.iter().map(|(_, name)| name.raw()).collect();
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
    if done.rows_affected() != accounts.len() as u64 {
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

/// Parts accounts through which nothing came, each with a person of its own.
pub async fn unlink_silent(
    tx: &mut TenantTx,
    accounts: &[IdentityId],
    now: DateTime<Utc>,
    undo_until: DateTime<Utc>,
) -> Result<()> {
    let moves: Vec<MoveId> = accounts.iter().map(|_| MoveId::generate()).collect();
    let users: Vec<UserId> = accounts.iter().map(|_| UserId::generate()).collect();
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
    .bind(accounts)
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
    .bind(accounts)
    .bind(&users)
    .bind(now)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Says of accounts whether the document lists them.
pub async fn update_imported(
    tx: &mut TenantTx,
    accounts: &[IdentityId],
    imported: bool,
) -> Result<()> {
    sqlx::query(
        "update identities
            set imported = $3
          where tenant_id = $1
            and id = any ($2)",
    )
    .bind(tx.tenant_id())
    .bind(accounts)
    .bind(imported)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// From now on these people share one slot on all platforms. Answers those who did not before.
pub async fn update_shared(
    tx: &mut TenantTx,
    people: &[UserId],
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
    .bind(people)
    .bind(now)
    .fetch_all(tx.connection())
    .await?)
}
