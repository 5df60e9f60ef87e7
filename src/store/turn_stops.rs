//! Stopping turns: asking the one that runs, and ending what somebody else runs or nobody does.

use chrono::{DateTime, Utc};

use super::TenantTx;
use crate::domain::turn::StopReason;
use crate::error::Result;
use crate::ids::{BootId, IdentityId, SessionId, TurnId};

/// Asks a running turn to stop: its node does it, or whoever takes it over. Answers that node.
pub async fn request_stop(
    tx: &mut TenantTx,
    id: TurnId,
    reason: StopReason,
    now: DateTime<Utc>,
) -> Result<Option<BootId>> {
    let node: Option<Option<BootId>> = sqlx::query_scalar(
        "update turns
            set cancel_requested_at = coalesce(cancel_requested_at, $3),
                cancel_reason = coalesce(cancel_reason, $4)
          where tenant_id = $1
            and id = $2
            and state = 'running'
      returning node",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .bind(now)
    .bind(reason.as_str())
    .fetch_optional(tx.connection())
    .await?;
    Ok(node.flatten())
}

/// Ends a turn that has not started.
pub async fn cancel_queued(
    tx: &mut TenantTx,
    id: TurnId,
    reason: StopReason,
    now: DateTime<Utc>,
) -> Result<bool> {
    let done = sqlx::query(
        "update turns
            set state = $3, reason = $4, ended_at = $5
          where tenant_id = $1
            and id = $2
            and state = 'queued'",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .bind(reason.state().as_str())
    .bind(reason.as_str())
    .bind(now)
    .execute(tx.connection())
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Whose turns are ended.
#[derive(Debug, Clone, Copy)]
pub enum Whose<'a> {
    Tenant,
    Conversations(&'a [SessionId]),
    /// What these have begun, wherever that is.
    Accounts(&'a [IdentityId]),
}

/// Ends everything that has not ended, at once and without a word in the transcript: whoever runs it finds the
/// fence moved.
pub async fn stop_all(
    tx: &mut TenantTx,
    whose: Whose<'_>,
    reason: StopReason,
    now: DateTime<Utc>,
) -> Result<()> {
    let (conversations, accounts) = match whose {
        Whose::Tenant => (None, None),
        Whose::Conversations(ids) => (Some(ids), None),
        Whose::Accounts(ids) => (None, Some(ids)),
    };
    sqlx::query(
        "with stopped as (
           update turns
              set state = $4, reason = $5, ended_at = $6, fence = fence + 1, lease_until = null, node = null
            where tenant_id = $1
              and ($2::uuid[] is null or conversation_id = any ($2))
              and ($3::uuid[] is null or identity_id = any ($3))
              and state in ('queued', 'running', 'waiting_client')
        returning id
         )
         update sessions s
            set turn_id = null
           from stopped
          where s.tenant_id = $1
            and s.turn_id = stopped.id",
    )
    .bind(tx.tenant_id())
    .bind(conversations)
    .bind(accounts)
    .bind(reason.state().as_str())
    .bind(reason.as_str())
    .bind(now)
    .execute(tx.connection())
    .await?;
    Ok(())
}
