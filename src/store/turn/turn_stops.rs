//! Stopping turns: asking the one that runs, and ending what somebody else runs or nobody does.

use chrono::{DateTime, Utc};

use crate::domain::turn::StopReason;
use crate::error::Result;
use crate::ids::{BootId, IdentityId, SessionId, TurnId, UserId};
use crate::store::TenantTx;

/// Asks a running turn to stop: its node does that, or the one that claims it next.
pub async fn request_stop(
    tx: &mut TenantTx,
    id: TurnId,
    reason: StopReason,
    now: DateTime<Utc>,
) -> Result<()> {
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
    if let Some(node) = node.flatten() {
        tx.notify_turn(node, id);
    }
    Ok(())
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
            set state = $3, reason = $4, ended_at = greatest($5, created_at),
                due_at = clock_timestamp() + interval '5 seconds', input = json_build_object('messages', '[]'::json)
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

/// Locks conversations of the tenant that have turns which have not ended, up to `limit`; those that somebody
/// else holds are left out.
pub async fn lock_busy(tx: &mut TenantTx, limit: i64) -> Result<Vec<SessionId>> {
    Ok(sqlx::query_scalar(
        "select c.id
           from conversations c
          where c.tenant_id = $1
            and c.id in (select q.conversation_id
                           from turns q
                          where q.tenant_id = $1
                            and q.state = 'queued'
                          union
                         select a.conversation_id
                           from turns a
                          where a.tenant_id = $1
                            and a.state in ('running', 'waiting_client'))
          order by c.id
          limit $2
            for no key update skip locked",
    )
    .bind(tx.tenant_id())
    .bind(limit)
    .fetch_all(tx.connection())
    .await?)
}

/// Whether any turn of the tenant has not ended.
pub async fn has_open(tx: &mut TenantTx) -> Result<bool> {
    Ok(sqlx::query_scalar(
        "select exists (select 1
                          from turns
                         where tenant_id = $1
                           and state = 'queued')
             or exists (select 1
                          from turns
                         where tenant_id = $1
                           and state in ('running', 'waiting_client'))",
    )
    .bind(tx.tenant_id())
    .fetch_one(tx.connection())
    .await?)
}

/// Locks the conversations of a user, and those in which these identities have turns that have not ended. In one
/// statement, in the order of their ids: two users may each have a turn in a conversation of the other.
pub async fn lock_all_of(
    tx: &mut TenantTx,
    user_id: UserId,
    identities: &[IdentityId],
) -> Result<Vec<SessionId>> {
    Ok(sqlx::query_scalar(
        "select c.id
           from conversations c
          where c.tenant_id = $1
            and c.id in (select o.id
                           from conversations o
                          where o.tenant_id = $1
                            and o.user_id = $2
                          union
                         select q.conversation_id
                           from turns q
                          where q.tenant_id = $1
                            and q.identity_id = any ($3)
                            and q.state = 'queued'
                          union
                         select a.conversation_id
                           from turns a
                          where a.tenant_id = $1
                            and a.identity_id = any ($3)
                            and a.state in ('running', 'waiting_client'))
          order by c.id
            for no key update",
    )
    .bind(tx.tenant_id())
    .bind(user_id)
    .bind(identities)
    .fetch_all(tx.connection())
    .await?)
}

/// Ends everything in these conversations that has not ended, at once and without a message in the transcript:
/// the node that runs it finds the fence moved. `tx` holds the conversations. With `identities`, only what
/// these have begun. Two statements, because the second must see what others committed while the first waited.
/// Answers how many ended, and the sessions of those that had begun.
pub async fn stop_all(
    tx: &mut TenantTx,
    conversations: &[SessionId],
    identities: Option<&[IdentityId]>,
    reason: StopReason,
    now: DateTime<Utc>,
) -> Result<(usize, Vec<SessionId>)> {
    let stopped: Vec<(TurnId, SessionId, Option<SessionId>)> = sqlx::query_as(
        "update turns
            set state = $4, reason = $5, ended_at = greatest($6, created_at, started_at), fence = fence + 1,
                lease_until = null, node = null, due_at = clock_timestamp() + interval '5 seconds', failures = 0,
                input = json_build_object('messages', '[]'::json)
          where tenant_id = $1
            and id in (select q.id
                         from turns q
                        where q.tenant_id = $1
                          and q.conversation_id = any ($2)
                          and q.state = 'queued'
                        union all
                       select a.id
                         from turns a
                        where a.tenant_id = $1
                          and a.conversation_id = any ($2)
                          and a.state in ('running', 'waiting_client'))
            and ($3::uuid[] is null or identity_id = any ($3))
            and ended_at is null
      returning id, conversation_id, coalesce(end_session_id, start_session_id)",
    )
    .bind(tx.tenant_id())
    .bind(conversations)
    .bind(identities)
    .bind(reason.state().as_str())
    .bind(reason.as_str())
    .bind(now)
    .fetch_all(tx.connection())
    .await?;
    let mut turns = Vec::with_capacity(stopped.len());
    let mut sessions = Vec::new();
    for (turn_id, conversation_id, session_id) in stopped {
        turns.push(turn_id);
        sessions.extend(session_id);
        tx.notify_conversation(conversation_id);
    }
    release_sessions(tx, &turns, &sessions).await?;
    Ok((turns.len(), sessions))
}

/// Ends one turn that cannot be run, whatever its row holds.
pub async fn fail(
    tx: &mut TenantTx,
    id: TurnId,
    reason: &str,
    detail: &str,
    now: DateTime<Utc>,
) -> Result<bool> {
    let failed: Option<Option<SessionId>> = sqlx::query_scalar(
        "update turns
            set state = 'failed', reason = $3, detail = $4, ended_at = greatest($5, created_at, started_at),
                fence = fence + 1, lease_until = null, node = null,
                due_at = clock_timestamp() + interval '5 seconds', failures = 0,
                input = json_build_object('messages', '[]'::json),
                -- The sweeper of answers says that there is none.
                reply_via = case reply_via when 'delivery' then 'waiting' else reply_via end
          where tenant_id = $1
            and id = $2
            and ended_at is null
      returning coalesce(end_session_id, start_session_id)",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .bind(reason)
    .bind(detail)
    .bind(now)
    .fetch_optional(tx.connection())
    .await?;
    let Some(session_id) = failed else {
        return Ok(false);
    };
    release_sessions(tx, &[id], session_id.as_slice()).await?;
    Ok(true)
}

async fn release_sessions(
    tx: &mut TenantTx,
    turns: &[TurnId],
    sessions: &[SessionId],
) -> Result<()> {
    if sessions.is_empty() {
        return Ok(());
    }
    sqlx::query(
        "update sessions
            set turn_id = null
          where tenant_id = $1
            and id = any ($2)
            and turn_id = any ($3)",
    )
    .bind(tx.tenant_id())
    .bind(sessions)
    .bind(turns)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Frees a session that names a turn which has ended, in a conversation that is held.
pub async fn release_ended(tx: &mut TenantTx, session_id: SessionId) -> Result<()> {
    sqlx::query(
        "update sessions s
            set turn_id = null
          where s.tenant_id = $1
            and s.id = $2
            and s.turn_id is not null
            and not exists (select 1
                              from turns t
                             where t.tenant_id = $1
                               and t.id = s.turn_id
                               and t.ended_at is null)",
    )
    .bind(tx.tenant_id())
    .bind(session_id)
    .execute(tx.connection())
    .await?;
    Ok(())
}
