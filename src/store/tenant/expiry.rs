//! Rows with a limited retention: deleted by age, oldest first, a batch at a time. Each statement reads its rows by
//! an index on their age, and names the age twice: a row that changes while the statement waits for it must stay, and
//! Postgres checks such a row again with the outer condition only.

use chrono::{DateTime, Utc};

use crate::error::Result;
use crate::store::TenantTx;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expiring {
    Events,
    Receipts,
    /// Deliveries that have ended.
    Deliveries,
    /// Link codes, by their expiry.
    Codes,
    CodeAttempts,
    PendingLinks,
    IdentityMoves,
    /// Answers stored for retries.
    Answers,
    /// Only the secrets in such answers.
    AnswerSecrets,
}

impl Expiring {
    /// `$2` is the time before which rows are deleted, `$3` the most rows of a batch. Public for the test that reads
    /// its plan.
    pub fn delete_sql(self) -> &'static str {
        match self {
            // Events of active turns stay.
            Self::Events => {
                "delete from events e
                  using (select o.conversation_id, o.seq
                           from events o
                          where o.tenant_id = $1
                            and o.created_at < $2
                            and not exists (select 1
                                              from turns t
                                             where t.tenant_id = $1
                                               and t.id = o.turn_id
                                               and t.ended_at is null)
                          order by o.created_at
                          limit $3) old
                  where e.tenant_id = $1
                    and e.conversation_id = old.conversation_id
                    and e.seq = old.seq"
            }
            Self::Receipts => {
                "delete from inbound_receipts
                  where tenant_id = $1
                    and created_at < $2
                    and (platform, scope, chat_ref, identity_id, message_id) in (
                          select platform, scope, chat_ref, identity_id, message_id
                            from inbound_receipts
                           where tenant_id = $1
                             and created_at < $2
                           order by created_at
                           limit $3)"
            }
            Self::Deliveries => {
                "delete from deliveries
                  where tenant_id = $1
                    and ended_at < $2
                    and id in (select id
                                 from deliveries
                                where tenant_id = $1
                                  and ended_at < $2
                                order by ended_at
                                limit $3)"
            }
            Self::Codes => {
                "delete from codes
                  where tenant_id = $1
                    and expires_at < $2
                    and id in (select id
                                 from codes
                                where tenant_id = $1
                                  and expires_at < $2
                                order by expires_at
                                limit $3)"
            }
            Self::CodeAttempts => {
                "delete from code_attempts
                  where tenant_id = $1
                    and window_start < $2
                    and subject in (select subject
                                      from code_attempts
                                     where tenant_id = $1
                                       and window_start < $2
                                     order by window_start
                                     limit $3)"
            }
            Self::PendingLinks => {
                "delete from pending_links
                  where tenant_id = $1
                    and expires_at < $2
                    and identity_id in (select identity_id
                                          from pending_links
                                         where tenant_id = $1
                                           and expires_at < $2
                                         order by expires_at
                                         limit $3)"
            }
            // Imports read the origin of an identity that they linked, and whether it was unlinked since.
            Self::IdentityMoves => {
                "delete from identity_moves
                  where tenant_id = $1
                    and created_at < $2
                    and id in (select m.id
                                 from identity_moves m
                                where m.tenant_id = $1
                                  and m.created_at < $2
                                  and m.kind <> 'import'
                                  and (m.kind <> 'unlink'
                                       or not exists (select 1
                                                        from identity_moves i
                                                       where i.tenant_id = $1
                                                         and i.identity_id = m.identity_id
                                                         and i.kind = 'import'
                                                         and (i.created_at, i.id) < (m.created_at, m.id)))
                                order by m.created_at
                                limit $3)"
            }
            Self::Answers => {
                "delete from idempotency
                  where tenant_id = $1
                    and created_at < $2
                    and (principal, route, key) in (select principal, route, key
                                                      from idempotency
                                                     where tenant_id = $1
                                                       and created_at < $2
                                                     order by created_at
                                                     limit $3)"
            }
            Self::AnswerSecrets => {
                "update idempotency
                    set secrets_enc = null
                  where tenant_id = $1
                    and created_at < $2
                    and (principal, route, key) in (select principal, route, key
                                                      from idempotency
                                                     where tenant_id = $1
                                                       and created_at < $2
                                                       and secrets_enc is not null
                                                     order by created_at
                                                     limit $3)"
            }
        }
    }

    fn oldest_sql(self) -> &'static str {
        match self {
            Self::Events => "select min(created_at) from events where tenant_id = $1",
            Self::Receipts => "select min(created_at) from inbound_receipts where tenant_id = $1",
            Self::Deliveries => {
                "select min(ended_at) from deliveries where tenant_id = $1 and ended_at is not null"
            }
            Self::Codes => "select min(expires_at) from codes where tenant_id = $1",
            Self::CodeAttempts => {
                "select min(window_start) from code_attempts where tenant_id = $1"
            }
            Self::PendingLinks => "select min(expires_at) from pending_links where tenant_id = $1",
            Self::IdentityMoves => {
                "select min(created_at) from identity_moves where tenant_id = $1 and kind <> 'import'"
            }
            Self::Answers => "select min(created_at) from idempotency where tenant_id = $1",
            Self::AnswerSecrets => {
                "select min(created_at) from idempotency where tenant_id = $1 and secrets_enc is not null"
            }
        }
    }
}

/// Deletes up to `limit` rows that are older than `before`. Returns their number.
pub async fn delete(
    tx: &mut TenantTx,
    kind: Expiring,
    before: DateTime<Utc>,
    limit: i64,
) -> Result<u64> {
    let done = sqlx::query(kind.delete_sql())
        .bind(tx.tenant_id())
        .bind(before)
        .bind(limit)
        .execute(tx.connection())
        .await?;
    Ok(done.rows_affected())
}

/// The time of the oldest row.
pub async fn find_oldest(tx: &mut TenantTx, kind: Expiring) -> Result<Option<DateTime<Utc>>> {
    Ok(sqlx::query_scalar(kind.oldest_sql())
        .bind(tx.tenant_id())
        .fetch_one(tx.connection())
        .await?)
}
