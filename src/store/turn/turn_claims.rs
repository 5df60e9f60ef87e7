//! Whose a turn is: taking the next of a queue, one whose node was lost, or one that waits for its client.
//! Whoever takes one moves the fence.

use chrono::{DateTime, Utc};
use sqlx::Row;
use sqlx::postgres::PgRow;
use sqlx::types::Json;

use super::turns::NewTurn;
use crate::domain::bridge::delivery::ReplyTo;
use crate::domain::conversation::message::ToolCall;
use crate::domain::turn::{SessionInfo, StopReason, TurnInput, TurnState};
use crate::error::Result;
use crate::ids::{BootId, IdentityId, SessionId, TenantId, TurnId, UserId};
use crate::store::{Db, TenantTx};

/// A node, and how long a turn is its own without a sign of life.
#[derive(Debug, Clone, Copy)]
pub struct Runner {
    pub node: BootId,
    pub lease_ms: i64,
}

/// What a node needs to know of a turn that is its own from now on.
#[derive(Debug, Clone)]
pub struct TurnLease {
    pub id: TurnId,
    pub conversation_id: SessionId,
    pub agent: String,
    pub input: TurnInput,
    pub session_info: SessionInfo,
    pub speaker: Option<(IdentityId, String)>,
    /// Whose conversation it is.
    pub user_id: Option<UserId>,
    /// Where it was going on; `None` before it has started.
    pub session_id: Option<SessionId>,
    pub steps: i32,
    pub calls: Option<Vec<ToolCall>>,
    pub fence: i64,
    pub version: i64,
    pub attempt: i32,
    /// How often its node was lost with it.
    pub lost: i32,
    pub state: TurnState,
    pub cancelled: Option<StopReason>,
    pub created_at: DateTime<Utc>,
    pub started_at: Option<DateTime<Utc>>,
    pub reply_to: Option<ReplyTo>,
}

impl TurnLease {
    /// A turn that was started by the statement that accepted it.
    pub fn started(
        turn: &NewTurn<'_>,
        session_id: SessionId,
        user_id: Option<UserId>,
        at: DateTime<Utc>,
    ) -> Self {
        Self {
            id: turn.id,
            conversation_id: turn.conversation_id,
            agent: turn.agent.to_owned(),
            input: TurnInput {
                messages: Vec::new(),
                ..turn.input.clone()
            },
            session_info: turn.session_info.clone(),
            speaker: turn.speaker.clone(),
            user_id,
            session_id: Some(session_id),
            steps: i32::try_from(turn.input.messages.len()).unwrap_or(i32::MAX),
            calls: None,
            fence: 1,
            version: 1,
            attempt: 1,
            lost: 0,
            state: TurnState::Running,
            cancelled: None,
            created_at: at,
            started_at: Some(at),
            reply_to: turn.reply.map(|(to, _)| to.clone()),
        }
    }
}

macro_rules! taken_columns {
    () => {
        "t.id, t.conversation_id, t.agent, t.input, t.session_info, t.identity_id, t.platform,
         coalesce(t.end_session_id, t.start_session_id) as session_id, t.steps, t.calls, t.fence, t.version,
         t.attempt, t.lost, t.state, t.cancel_requested_at is not null as cancelled, t.cancel_reason, t.created_at,
         t.started_at, t.reply_to,
         (select c.user_id
            from conversations c
           where c.tenant_id = $1
             and c.id = t.conversation_id) as user_id"
    };
}

fn read_taken(row: &PgRow) -> Result<TurnLease> {
    let Json(input): Json<TurnInput> = row.try_get("input")?;
    let Json(session_info): Json<SessionInfo> = row.try_get("session_info")?;
    let calls: Option<Json<Vec<ToolCall>>> = row.try_get("calls")?;
    let reply_to: Option<Json<ReplyTo>> = row.try_get("reply_to")?;
    let identity: Option<IdentityId> = row.try_get("identity_id")?;
    let platform: Option<String> = row.try_get("platform")?;
    let cancelled: bool = row.try_get("cancelled")?;
    let cancel_reason: Option<String> = row.try_get("cancel_reason")?;
    Ok(TurnLease {
        id: row.try_get("id")?,
        conversation_id: row.try_get("conversation_id")?,
        agent: row.try_get("agent")?,
        input,
        session_info,
        speaker: identity.zip(platform),
        user_id: row.try_get("user_id")?,
        session_id: row.try_get("session_id")?,
        steps: row.try_get("steps")?,
        calls: calls.map(|Json(calls)| calls),
        fence: row.try_get("fence")?,
        version: row.try_get("version")?,
        attempt: row.try_get("attempt")?,
        lost: row.try_get("lost")?,
        state: TurnState::from_column(row.try_get("state")?)?,
        cancelled: cancelled.then(|| StopReason::from_stop_request(cancel_reason.as_deref())),
        created_at: row.try_get("created_at")?,
        started_at: row.try_get("started_at")?,
        reply_to: reply_to.map(|Json(to)| to),
    })
}

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
    taken_columns!()
);

/// Takes the oldest queued turn of a conversation that is held and in which none is active.
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
    row.map(|row| read_taken(&row)).transpose()
}

/// Lets a turn wait for another second with which nothing is wrong: the tenant's limit, or a lock, is in the way.
pub async fn wait_a_second(tx: &mut TenantTx, id: TurnId) -> Result<()> {
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

/// Takes a running turn whose lease ran out. Whoever had it can write nothing from here on.
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
        taken_columns!()
    ))
    .bind(tx.tenant_id())
    .bind(id)
    .bind(runner.node)
    .bind(runner.lease_ms)
    .fetch_optional(tx.connection())
    .await?;
    row.map(|row| read_taken(&row)).transpose()
}

/// Takes a turn that waits for its client, to go on with it or to end it. With `only_overdue`, only one
/// that has waited long enough.
pub async fn claim_waiting(
    tx: &mut TenantTx,
    id: TurnId,
    runner: Runner,
    only_overdue: bool,
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
        taken_columns!()
    ))
    .bind(tx.tenant_id())
    .bind(id)
    .bind(runner.node)
    .bind(runner.lease_ms)
    .bind(only_overdue)
    .fetch_optional(tx.connection())
    .await?;
    row.map(|row| read_taken(&row)).transpose()
}

/// Remembers what a waiting turn goes on with, so that the client's own retry is told by it, and so that
/// whoever takes it over has the client's tools.
pub async fn update_asked(
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

/// Puts a turn off that a sweeper failed with: twice as long each time. Answers how often that happened; `None` if
/// another node has just put it off.
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
