//! Stored first answers. The row is claimed in the transaction of the effect, so that a twin blocks
//! on the primary key until the first request has committed or is gone.

use chrono::{DateTime, Utc};

use crate::error::Result;
use crate::ids::TurnId;
use crate::store::{Db, TenantTx};

/// What names one retryable request inside a tenant: `key` as it is stored.
#[derive(Debug, Clone)]
pub struct RequestName {
    pub principal: String,
    pub route: String,
    pub key: String,
}

#[derive(Debug, Clone, sqlx::FromRow)]
pub struct StoredAnswer {
    /// As it is stored; the answer is sealed under this name.
    pub key: String,
    pub request_hash: Vec<u8>,
    pub status: Option<i16>,
    pub answer_enc: Option<Vec<u8>>,
    pub secrets_enc: Option<Vec<u8>>,
    pub turn_id: Option<TurnId>,
    pub created_at: DateTime<Utc>,
}

/// Lets one request of a name at a time go on, under whichever of its forms it is stored. `name` is a hash.
pub async fn lock(tx: &mut TenantTx, name: i64) -> Result<()> {
    sqlx::query("select pg_advisory_xact_lock($1)")
        .bind(name)
        .execute(tx.connection())
        .await?;
    Ok(())
}

/// True if this transaction now owns the name: it was never used, or not since `forgotten_before`. Nor were
/// `other_keys`, the other forms under which it may be stored.
pub async fn claim(
    tx: &mut TenantTx,
    name: &RequestName,
    other_keys: &[String],
    request_hash: [u8; 32],
    now: DateTime<Utc>,
    forgotten_before: DateTime<Utc>,
) -> Result<bool> {
    let (caller, acted_for) = name.principal.split_once('/').unzip();
    let claimed = sqlx::query(
        "insert into idempotency as i (tenant_id, principal, route, key, request_hash, created_at, caller,
                                       acted_for)
         select $1, $2, $3, $4, $5, $6, $8, $9
          where not exists (select 1
                              from idempotency o
                             where o.tenant_id = $1
                               and o.principal = $2
                               and o.route = $3
                               and o.key = any ($10)
                               and o.created_at > $7)
             on conflict on constraint idempotency_pkey do update
            set request_hash = excluded.request_hash, created_at = excluded.created_at,
                status = null, answer_enc = null, secrets_enc = null, turn_id = null,
                caller = excluded.caller, acted_for = excluded.acted_for
          where i.tenant_id = $1
            and i.created_at <= $7",
    )
    .bind(tx.tenant_id())
    .bind(&name.principal)
    .bind(&name.route)
    .bind(&name.key)
    .bind(request_hash.as_slice())
    .bind(now)
    .bind(forgotten_before)
    .bind(caller)
    .bind(acted_for)
    .bind(other_keys)
    .execute(tx.connection())
    .await?;
    Ok(claimed.rows_affected() == 1)
}

/// The newest that is stored under one of the name's forms.
pub async fn find(
    tx: &mut TenantTx,
    name: &RequestName,
    other_keys: &[String],
) -> Result<Option<StoredAnswer>> {
    Ok(sqlx::query_as(
        "select key, request_hash, status, answer_enc, secrets_enc, turn_id, created_at
           from idempotency
          where tenant_id = $1
            and principal = $2
            and route = $3
            and key = any ($4 || $5::text)
          order by created_at desc
          limit 1",
    )
    .bind(tx.tenant_id())
    .bind(&name.principal)
    .bind(&name.route)
    .bind(other_keys)
    .bind(&name.key)
    .fetch_optional(tx.connection())
    .await?)
}

pub async fn update_answer(
    tx: &mut TenantTx,
    name: &RequestName,
    status: i16,
    answer_enc: &[u8],
    secrets_enc: Option<&[u8]>,
) -> Result<()> {
    sqlx::query(
        "update idempotency
            set status = $5, answer_enc = $6, secrets_enc = $7
          where tenant_id = $1
            and principal = $2
            and route = $3
            and key = $4",
    )
    .bind(tx.tenant_id())
    .bind(&name.principal)
    .bind(&name.route)
    .bind(&name.key)
    .bind(status)
    .bind(answer_enc)
    .bind(secrets_enc)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Says which turn the request became.
pub async fn update_turn(tx: &mut TenantTx, name: &RequestName, turn_id: TurnId) -> Result<()> {
    sqlx::query(
        "update idempotency
            set turn_id = $5
          where tenant_id = $1
            and principal = $2
            and route = $3
            and key = $4",
    )
    .bind(tx.tenant_id())
    .bind(&name.principal)
    .bind(&name.route)
    .bind(&name.key)
    .bind(turn_id)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Public for the test that reads its plan.
pub const DELETE_OF_PERSON: &str = "delete from idempotency
          where tenant_id = $1
            and (principal, route, key) in (
                  select principal, route, key
                    from idempotency
                   where tenant_id = $1
                     and (caller = any ($2) or acted_for = any ($3))
                   order by principal, route, key
                   limit $4
                     for update skip locked)";

/// Deletes up to `limit` answers that were given to accounts, and to whoever acted for someone of `acted_for`. Those
/// that a request holds in this moment are left: who waits for a request must not hold what it needs.
pub async fn delete_of_user(
    tx: &mut TenantTx,
    accounts: &[String],
    acted_for: &[String],
    limit: i64,
) -> Result<u64> {
    let done = sqlx::query(DELETE_OF_PERSON)
        .bind(tx.tenant_id())
        .bind(accounts)
        .bind(acted_for)
        .bind(limit)
        .execute(tx.connection())
        .await?;
    Ok(done.rows_affected())
}

/// Public for the test that reads its plan.
pub const LIST_OF_KEYS: &str =
    "select principal, route, key, request_hash, status, answer_enc, secrets_enc, turn_id,
                created_at
           from idempotency
          where tenant_id = $1
            and caller is null
            and (principal, route, key) > ($2, $3, $4)
          order by principal, route, key
          limit $5";

/// Answers to keys that acted for nobody, a page after `after`.
pub async fn list_of_keys(
    tx: &mut TenantTx,
    after: Option<&RequestName>,
    limit: i64,
) -> Result<Vec<(RequestName, StoredAnswer)>> {
    let (principal, route, key) = match after {
        Some(name) => (
            name.principal.as_str(),
            name.route.as_str(),
            name.key.as_str(),
        ),
        None => ("", "", ""),
    };
    let rows: Vec<NamedAnswer> = sqlx::query_as(LIST_OF_KEYS)
        .bind(tx.tenant_id())
        .bind(principal)
        .bind(route)
        .bind(key)
        .bind(limit)
        .fetch_all(tx.connection())
        .await?;
    let split = |row: NamedAnswer| {
        let name = RequestName {
            principal: row.principal,
            route: row.route,
            key: row.answer.key.clone(),
        };
        (name, row.answer)
    };
    Ok(rows.into_iter().map(split).collect())
}

#[derive(sqlx::FromRow)]
struct NamedAnswer {
    principal: String,
    route: String,
    #[sqlx(flatten)]
    answer: StoredAnswer,
}

/// Deletes one answer.
pub async fn delete_one(tx: &mut TenantTx, name: &RequestName) -> Result<()> {
    sqlx::query(
        "delete from idempotency
          where tenant_id = $1
            and principal = $2
            and route = $3
            and key = $4",
    )
    .bind(tx.tenant_id())
    .bind(&name.principal)
    .bind(&name.route)
    .bind(&name.key)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Deletes up to `limit` answers of tenants that are gone: of requests that ended after their tenant had.
pub async fn erase_lost(db: &Db, limit: i32) -> Result<i32> {
    Ok(sqlx::query_scalar("select erase_lost_answers($1)")
        .bind(limit)
        .fetch_one(db.connection().await?.limited())
        .await?)
}
