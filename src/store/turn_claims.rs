//! Whose a turn is: taking the next of a queue, one whose node was lost, or one that waits for its client.
//! Whoever takes one moves the fence.

use chrono::{DateTime, Utc};
use sqlx::Row;
use sqlx::postgres::PgRow;
use sqlx::types::Json;

use super::turns::NewTurn;
use super::{Db, TenantTx};
use crate::domain::delivery::ReplyTo;
use crate::domain::message::ToolCall;
use crate::domain::turn::{StopReason, Told, TurnInput, TurnState};
use crate::error::Result;
use crate::ids::{BootId, IdentityId, SessionId, TenantId, TurnId, UserId};

/// A node, and how long a turn is its own without a sign of life.
#[derive(Debug, Clone, Copy)]
pub struct Runner {
    pub node: BootId,
    pub lease_ms: i64,
}

/// What a node needs to know of a turn that is its own from now on.
#[derive(Debug, Clone)]
pub struct Taken {
    pub id: TurnId,
    pub conversation_id: SessionId,
    pub agent: String,
    pub input: TurnInput,
    pub told: Told,
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
    pub state: TurnState,
    pub cancelled: Option<StopReason>,
    pub created_at: DateTime<Utc>,
    pub started_at: Option<DateTime<Utc>>,
    pub reply_to: Option<ReplyTo>,
}

impl Taken {
    /// A turn that was started by the statement that accepted it.
    pub fn started(
        turn: &NewTurn<'_>,
        session_id: SessionId,
        user_id: Option<UserId>,
        now: DateTime<Utc>,
    ) -> Self {
        Self {
            id: turn.id,
            conversation_id: turn.conversation_id,
            agent: turn.agent.to_owned(),
            input: TurnInput {
                messages: Vec::new(),
                ..turn.input.clone()
            },
            told: turn.told.clone(),
            speaker: turn.speaker.clone(),
            user_id,
            session_id: Some(session_id),
            steps: i32::try_from(turn.input.messages.len()).unwrap_or(i32::MAX),
            calls: None,
            fence: 1,
            version: 1,
            attempt: 1,
            state: TurnState::Running,
            cancelled: None,
            created_at: now,
            started_at: Some(now),
            reply_to: turn.reply.map(|(to, _)| to.clone()),
        }
    }
}

macro_rules! taken_columns {
    () => {
        "t.id, t.conversation_id, t.agent, t.input, t.told, t.identity_id, t.platform,
         coalesce(t.end_session_id, t.start_session_id) as session_id, t.steps, t.calls, t.fence, t.version,
         t.attempt, t.state, t.cancel_requested_at is not null as cancelled, t.cancel_reason, t.created_at,
         t.started_at, t.reply_to,
         (select c.user_id
            from conversations c
           where c.tenant_id = $1
             and c.id = t.conversation_id) as user_id"
    };
}

fn read_taken(row: &PgRow) -> Result<Taken> {
    let Json(input): Json<TurnInput> = row.try_get("input")?;
    let Json(told): Json<Told> = row.try_get("told")?;
    let calls: Option<Json<Vec<ToolCall>>> = row.try_get("calls")?;
    let reply_to: Option<Json<ReplyTo>> = row.try_get("reply_to")?;
    let identity: Option<IdentityId> = row.try_get("identity_id")?;
    let platform: Option<String> = row.try_get("platform")?;
    let cancelled: bool = row.try_get("cancelled")?;
    let cancel_reason: Option<String> = row.try_get("cancel_reason")?;
    Ok(Taken {
        id: row.try_get("id")?,
        conversation_id: row.try_get("conversation_id")?,
        agent: row.try_get("agent")?,
        input,
        told,
        speaker: identity.zip(platform),
        user_id: row.try_get("user_id")?,
        session_id: row.try_get("session_id")?,
        steps: row.try_get("steps")?,
        calls: calls.map(|Json(calls)| calls),
        fence: row.try_get("fence")?,
        version: row.try_get("version")?,
        attempt: row.try_get("attempt")?,
        state: TurnState::from_column(row.try_get("state")?)?,
        cancelled: cancelled.then(|| StopReason::from_column(cancel_reason.as_deref())),
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
        and t.started_at is null
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
) -> Result<Option<Taken>> {
    let row = sqlx::query(CLAIM_NEXT)
        .bind(tx.tenant_id())
        .bind(conversation_id)
        .bind(runner.node)
        .bind(runner.lease_ms)
        .fetch_optional(tx.connection())
        .await?;
    row.map(|row| read_taken(&row)).transpose()
}

/// Turns that no node works on, or that nobody started: all tenants'.
pub async fn list_due(db: &Db, limit: i32) -> Result<Vec<(TenantId, TurnId)>> {
    Ok(sqlx::query_as("select tenant_id, id from due_turns($1)")
        .bind(limit)
        .fetch_all(&mut *db.connection().await?)
        .await?)
}

/// Takes a running turn whose lease ran out. Whoever had it can write nothing from here on.
pub async fn take_over(tx: &mut TenantTx, id: TurnId, runner: Runner) -> Result<Option<Taken>> {
    let row = sqlx::query(concat!(
        "update turns t
            set fence = fence + 1, attempt = attempt + 1, node = $3,
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
pub async fn take_waiting(
    tx: &mut TenantTx,
    id: TurnId,
    runner: Runner,
    only_overdue: bool,
) -> Result<Option<Taken>> {
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
    asked_hash: [u8; 32],
    input: &TurnInput,
) -> Result<()> {
    sqlx::query(
        "update turns
            set asked_hash = $3, input = $4
          where tenant_id = $1
            and id = $2",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .bind(asked_hash.as_slice())
    .bind(Json(input))
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// The calls of a turn's last message that have no answer yet.
pub async fn list_open_calls(tx: &mut TenantTx, id: TurnId) -> Result<Vec<ToolCall>> {
    let open: Vec<Json<ToolCall>> = sqlx::query_scalar(
        "select c.call
           from (select m.step, m.tool_calls
                   from messages m
                  where m.tenant_id = $1
                    and m.turn_id = $2
                    and m.step is not null
                    and m.role = 'assistant'
                  order by m.step desc
                  limit 1) last,
                json_array_elements(last.tool_calls) with ordinality as c (call, place)
          where not exists (select 1
                              from messages a
                             where a.tenant_id = $1
                               and a.turn_id = $2
                               and a.step > last.step
                               and a.tool_call_id = c.call ->> 'id')
          order by c.place",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .fetch_all(tx.connection())
    .await?;
    Ok(open.into_iter().map(|Json(call)| call).collect())
}
