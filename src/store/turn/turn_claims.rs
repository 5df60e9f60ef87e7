//! Claims turns: the next of a queue, one whose lease has expired, or one that waits for its client. A claim moves
//! the fence. Also when turns that nobody runs are looked at again.

use sqlx::types::Json;

use super::turn_lease::{Runner, TurnLease, lease_columns, read_lease};
use crate::domain::turn::TurnInput;
use crate::error::Result;
use crate::ids::{SessionId, TenantId, TurnId};
use crate::store::{Db, TenantTx};

const CLAIM_NEXT: &str = concat!(
    "update turns t
        set state = 'running', fence = fence + 1, node = $3,
            lease_until = clock_timestamp() + $4 * interval '1 millisecond'
      where t.tenant_id = $1
        and t.id = (select q.id
                      from turns q
                     where q.tenant_id = $1
                       and q.conversation_id = $2
                       and q.state = 'queued'
                     order by q.turn_no
                     limit 1)
        and t.state = 'queued'
        and exists (select 1
                      from tenants o
                     where o.id = $1
                       and o.state = 'active')
        and not exists (select 1
                          from turns a
                         where a.tenant_id = $1
                           and a.conversation_id = $2
                           and a.state in ('running', 'waiting_client'))
  returning ",
    lease_columns!()
);

/// Claims the oldest queued turn of a conversation that is locked and in which none is active.
pub async fn claim_next(
    tx: &mut TenantTx,
    conversation_id: SessionId,
    runner: Runner,
) -> Result<Option<TurnLease>> {
    let row = sqlx::query(CLAIM_NEXT)
        .bind(tx.tenant_id())
        .bind(conversation_id)
        .bind(runner.node)
        .bind(runner.lease_ms)
        .fetch_optional(tx.connection())
        .await?;
    row.map(|row| read_lease(&row, runner)).transpose()
}

/// Looks at a turn again in a second. Nothing is wrong with it: the tenant's limit, or a lock, is in the way.
pub async fn postpone(tx: &mut TenantTx, id: TurnId) -> Result<()> {
    sqlx::query(
        "update turns
            set due_at = clock_timestamp() + interval '1 second'
          where tenant_id = $1
            and id = $2
            and ended_at is null",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Turns that no node works on, or that nobody started: all tenants'.
pub async fn list_due(db: &Db, limit: i32) -> Result<Vec<(TenantId, TurnId)>> {
    Ok(sqlx::query_as("select tenant_id, id from due_turns($1)")
        .bind(limit)
        .fetch_all(db.connection().await?.limited())
        .await?)
}

/// Claims a running turn whose lease has expired. The node that had it can write nothing from here on.
pub async fn claim_expired(
    tx: &mut TenantTx,
    id: TurnId,
    runner: Runner,
) -> Result<Option<TurnLease>> {
    let row = sqlx::query(concat!(
        "update turns t
            set fence = fence + 1, attempt = attempt + 1,
                lost = lost + case when node is null then 0 else 1 end, node = $3,
                lease_until = clock_timestamp() + $4 * interval '1 millisecond'
          where t.tenant_id = $1
            and t.id = $2
            and t.state = 'running'
            and t.lease_until <= clock_timestamp()
      returning ",
        lease_columns!()
    ))
    .bind(tx.tenant_id())
    .bind(id)
    .bind(runner.node)
    .bind(runner.lease_ms)
    .fetch_optional(tx.connection())
    .await?;
    row.map(|row| read_lease(&row, runner)).transpose()
}

/// Which turns that wait for their client may be claimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Also those whose client may still answer.
    Any,
    /// Those whose client is too late.
    Overdue,
}

/// Claims a turn that waits for its client, to go on with it or to end it.
pub async fn claim_waiting(
    tx: &mut TenantTx,
    id: TurnId,
    runner: Runner,
    wait: Wait,
) -> Result<Option<TurnLease>> {
    let row = sqlx::query(concat!(
        "update turns t
            set state = 'running', fence = fence + 1, node = $3,
                lease_until = clock_timestamp() + $4 * interval '1 millisecond'
          where t.tenant_id = $1
            and t.id = $2
            and t.state = 'waiting_client'
            and (not $5 or t.lease_until <= clock_timestamp())
      returning ",
        lease_columns!()
    ))
    .bind(tx.tenant_id())
    .bind(id)
    .bind(runner.node)
    .bind(runner.lease_ms)
    .bind(wait == Wait::Overdue)
    .fetch_optional(tx.connection())
    .await?;
    row.map(|row| read_lease(&row, runner)).transpose()
}

/// Stores what a waiting turn goes on with: it identifies the client's own retry, and a node that claims the turn
/// needs the client's tools.
pub async fn update_input(
    tx: &mut TenantTx,
    id: TurnId,
    request_hash: [u8; 32],
    input: &TurnInput,
) -> Result<()> {
    sqlx::query(
        "update turns
            set request_hash = $3, input = $4
          where tenant_id = $1
            and id = $2",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .bind(request_hash.as_slice())
    .bind(Json(input))
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// The turn that starts next in a conversation.
pub async fn find_next(tx: &mut TenantTx, conversation_id: SessionId) -> Result<Option<TurnId>> {
    Ok(sqlx::query_scalar(
        "select id
           from turns
          where tenant_id = $1
            and conversation_id = $2
            and state = 'queued'
          order by turn_no
          limit 1",
    )
    .bind(tx.tenant_id())
    .bind(conversation_id)
    .fetch_optional(tx.connection())
    .await?)
}

/// Puts off a turn that could not be recovered, twice as long each time. Answers how often that happened; `None` if
/// another node has just done so.
pub async fn defer(tx: &mut TenantTx, id: TurnId) -> Result<Option<i32>> {
    Ok(sqlx::query_scalar(
        "update turns
            set failures = failures + 1,
                due_at = clock_timestamp() + least(power(2, failures), 600) * interval '1 second'
          where tenant_id = $1
            and id = $2
            and (due_at is null or due_at <= clock_timestamp())
      returning failures",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .fetch_optional(tx.connection())
    .await?)
}
