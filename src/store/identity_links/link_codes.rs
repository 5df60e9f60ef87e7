//! Link codes and wrong guesses. One conditional statement claims a code, so that only one of several concurrent
//! attempts succeeds. Attempts are charged before, under a lock on the subject that they count for.

use chrono::{DateTime, Utc};

use crate::domain::identity_links::link_code::{AttemptLimit, MAX_PENDING};
use crate::domain::people::platform::PlatformScope;
use crate::error::Result;
use crate::ids::{CodeId, IdentityId, UserId};
use crate::store::TenantTx;

pub struct NewCode<'a> {
    pub digest: &'a [u8],
    pub user_id: UserId,
    pub minted_by: IdentityId,
    /// The only platform on which it can be redeemed.
    pub platform: Option<&'a PlatformScope>,
    pub expires_at: DateTime<Utc>,
}

/// Inserts a code under the lowest free number of its user. Returns false if no number is free. Expired codes free
/// their numbers.
pub async fn insert(tx: &mut TenantTx, code: &NewCode<'_>, now: DateTime<Utc>) -> Result<bool> {
    sqlx::query(
        "update codes
            set voided_at = $3
          where tenant_id = $1
            and user_id = $2
            and consumed_at is null
            and voided_at is null
            and expires_at <= $3",
    )
    .bind(tx.tenant_id())
    .bind(code.user_id)
    .bind(now)
    .execute(tx.connection())
    .await?;
    // A concurrent insert may take the number that this statement sees as free: then it tries the next one.
    for _ in 0..MAX_PENDING {
        let done = sqlx::query(
            "insert into codes (tenant_id, id, purpose, digest, n, user_id, minted_by, platform, created_at, expires_at)
             select $1, $2, 'link', $3, number, $4, $5, $6, $7, $8
               from generate_series(1, $9::int) as number
              where not exists (select 1
                                  from codes
                                 where tenant_id = $1
                                   and user_id = $4
                                   and purpose = 'link'
                                   and n = number
                                   and consumed_at is null
                                   and voided_at is null)
              order by number
              limit 1
                 on conflict do nothing",
        )
        .bind(tx.tenant_id())
        .bind(CodeId::generate())
        .bind(code.digest)
        .bind(code.user_id)
        .bind(code.minted_by)
        .bind(code.platform.map(PlatformScope::to_string))
        .bind(now)
        .bind(code.expires_at)
        .bind(i32::from(MAX_PENDING))
        .execute(tx.connection())
        .await?;
        if done.rows_affected() == 1 {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The first expiry among a user's pending codes.
pub async fn find_next_expiry(tx: &mut TenantTx, user_id: UserId) -> Result<Option<DateTime<Utc>>> {
    Ok(sqlx::query_scalar(
        "select min(expires_at)
           from codes
          where tenant_id = $1
            and user_id = $2
            and consumed_at is null
            and voided_at is null",
    )
    .bind(tx.tenant_id())
    .bind(user_id)
    .fetch_one(tx.connection())
    .await?)
}

/// The minter of a code.
#[derive(Debug, Clone, Copy, sqlx::FromRow)]
pub struct Minter {
    pub user_id: UserId,
    pub minted_by: IdentityId,
}

/// Claims a code, if it is valid for an identity on `platform`. Only one of several concurrent attempts succeeds.
pub async fn claim(
    tx: &mut TenantTx,
    digests: &[Vec<u8>],
    platform: &PlatformScope,
    consumed_by: IdentityId,
    now: DateTime<Utc>,
) -> Result<Option<Minter>> {
    Ok(sqlx::query_as(
        "update codes
            set consumed_at = $6, consumed_by = $5
          where tenant_id = $1
            and digest = any ($2)
            and purpose = 'link'
            and (platform is null or platform in ($3, $4))
            and consumed_at is null
            and voided_at is null
            and expires_at > $6
      returning user_id, minted_by",
    )
    .bind(tx.tenant_id())
    .bind(digests)
    .bind(platform.platform())
    .bind(platform.to_string())
    .bind(consumed_by)
    .bind(now)
    .fetch_optional(tx.connection())
    .await?)
}

/// True if the tenant has a pending code.
pub async fn has_pending(tx: &mut TenantTx, now: DateTime<Utc>) -> Result<bool> {
    Ok(sqlx::query_scalar(
        "select exists (select 1
                          from codes
                         where tenant_id = $1
                           and expires_at > $2
                           and consumed_at is null
                           and voided_at is null)",
    )
    .bind(tx.tenant_id())
    .bind(now)
    .fetch_one(tx.connection())
    .await?)
}

/// Voids pending codes that others have seen.
pub async fn update_voided(
    tx: &mut TenantTx,
    digests: &[Vec<u8>],
    now: DateTime<Utc>,
) -> Result<()> {
    sqlx::query(
        "update codes
            set voided_at = $3
          where tenant_id = $1
            and digest = any ($2)
            and consumed_at is null
            and voided_at is null",
    )
    .bind(tx.tenant_id())
    .bind(digests)
    .bind(now)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Charges one attempt to `subject`. Returns the number of charged attempts in the window, or `None` if the subject
/// is locked.
pub async fn charge_attempt(
    tx: &mut TenantTx,
    subject: &str,
    limit: AttemptLimit,
    now: DateTime<Utc>,
) -> Result<Option<i32>> {
    Ok(sqlx::query_scalar(
        "insert into code_attempts as a (tenant_id, subject, failures, window_start)
         values ($1, $2, 1, $3)
             on conflict on constraint code_attempts_pkey do update
            set failures = case when a.window_start <= $4 then 1 else a.failures + 1 end,
                window_start = case when a.window_start <= $4 then $3 else a.window_start end,
                locked_until = case when a.window_start > $4 and a.failures + 1 >= $5 then $6 end
          where (a.locked_until is null or a.locked_until <= $3)
            and (a.window_start <= $4 or a.failures < $5)
      returning failures",
    )
    .bind(tx.tenant_id())
    .bind(subject)
    .bind(now)
    .bind(now - limit.window)
    .bind(limit.most)
    .bind(now + limit.window)
    .fetch_optional(tx.connection())
    .await?)
}

/// The end of the lock on `subject`.
pub async fn find_lock(
    tx: &mut TenantTx,
    subject: &str,
    limit: AttemptLimit,
) -> Result<Option<DateTime<Utc>>> {
    let row: Option<(DateTime<Utc>, Option<DateTime<Utc>>)> = sqlx::query_as(
        "select window_start, locked_until
           from code_attempts
          where tenant_id = $1
            and subject = $2",
    )
    .bind(tx.tenant_id())
    .bind(subject)
    .fetch_optional(tx.connection())
    .await?;
    Ok(row.map(|(window_start, locked_until)| locked_until.unwrap_or(window_start + limit.window)))
}

/// Refunds attempts that were no guesses.
pub async fn refund_attempts(tx: &mut TenantTx, subjects: &[String]) -> Result<()> {
    sqlx::query(
        "update code_attempts
            set failures = greatest(failures - 1, 0), locked_until = null
          where tenant_id = $1
            and subject = any ($2)",
    )
    .bind(tx.tenant_id())
    .bind(subjects)
    .execute(tx.connection())
    .await?;
    Ok(())
}
