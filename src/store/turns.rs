//! Turns: accepting, queueing and taking them, and asking them to stop. What a running turn writes is in
//! `turn_writes`. Whoever accepts or ends one holds its conversation.

use chrono::{DateTime, Utc};
use serde_json::Value;
use sqlx::postgres::PgRow;
use sqlx::types::Json;
use sqlx::{FromRow, Row};

use super::{Db, TenantTx};
use crate::domain::completion::TokenUsage;
use crate::domain::message::ToolCall;
use crate::domain::paging::{Page, PageRequest};
use crate::domain::turn::{Busy, StopReason, Told, Turn, TurnInput, TurnState};
use crate::error::{Error, Result};
use crate::ids::{BootId, IdentityId, SessionId, TenantId, TurnId, UserId};

macro_rules! turn_columns {
    () => {
        "t.id, t.conversation_id, t.turn_no, t.state, t.reason, t.detail, t.agent, t.identity_id, t.told,
         t.start_session_id, t.end_session_id, t.finish_reason, t.attempt, t.node, t.input_tokens,
         t.output_tokens, t.usage_estimated, t.created_at, t.started_at, t.ended_at"
    };
}

struct TurnRow(Turn);

impl FromRow<'_, PgRow> for TurnRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        read_turn(row)
            .map(Self)
            .map_err(|error| sqlx::Error::Decode(Box::new(error)))
    }
}

fn read_turn(row: &PgRow) -> Result<Turn> {
    let Json(told): Json<Told> = row.try_get("told")?;
    Ok(Turn {
        id: row.try_get("id")?,
        conversation_id: row.try_get("conversation_id")?,
        turn_no: row.try_get("turn_no")?,
        state: TurnState::from_column(row.try_get("state")?)?,
        reason: row.try_get("reason")?,
        detail: row.try_get("detail")?,
        agent: row.try_get("agent")?,
        identity_id: row.try_get("identity_id")?,
        told,
        start_session_id: row.try_get("start_session_id")?,
        end_session_id: row.try_get("end_session_id")?,
        finish_reason: row.try_get("finish_reason")?,
        attempt: row.try_get("attempt")?,
        node: row.try_get("node")?,
        usage: TokenUsage {
            input: row.try_get("input_tokens")?,
            output: row.try_get("output_tokens")?,
            estimated: row.try_get("usage_estimated")?,
        },
        created_at: row.try_get("created_at")?,
        started_at: row.try_get("started_at")?,
        ended_at: row.try_get("ended_at")?,
    })
}

/// Public, as `LOOK`, `INSERT` and `CLAIM_NEXT` are, for the bench that runs them beside the service.
pub const TAKE_NUMBER: &str = "update conversations
        set next_turn_no = next_turn_no + 1
      where tenant_id = $1
        and id = $2
        and deleted_at is null
  returning next_turn_no - 1 as turn_no, tip_session_id";

/// Takes the next number of a conversation, and holds it until `tx` ends. Answers the number and the tip;
/// `None` if the conversation was deleted.
pub async fn take_number(
    tx: &mut TenantTx,
    conversation_id: SessionId,
) -> Result<Option<(i64, SessionId)>> {
    Ok(sqlx::query_as(TAKE_NUMBER)
        .bind(tx.tenant_id())
        .bind(conversation_id)
        .fetch_optional(tx.connection())
        .await?)
}

/// The newest turn of a conversation, by whom and what for: a client's own retry is told by it.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct Newest {
    pub id: TurnId,
    pub principal: String,
    pub asked_hash: Vec<u8>,
}

pub const LOOK: &str = "select a.id as active_id, a.state as active_state,
            (select count(*)
               from turns q
              where q.tenant_id = $1
                and q.conversation_id = $2
                and q.state = 'queued') as queued,
            (select count(*)
               from turns r
              where r.tenant_id = $1
                and r.state = 'running') as running,
            n.id, n.principal, n.asked_hash
       from (select 1) one
       left join turns a
         on a.tenant_id = $1
        and a.conversation_id = $2
        and a.state in ('running', 'waiting_client')
       left join lateral (select l.id, l.principal, l.asked_hash
                            from turns l
                           where l.tenant_id = $1
                             and l.conversation_id = $2
                           order by l.turn_no desc
                           limit 1) n
         on true";

/// How busy a conversation is that is held. A statement of its own: one that also waits for the
/// conversation's lock would see the turns as they were before it waited.
pub async fn look(tx: &mut TenantTx, conversation_id: SessionId) -> Result<(Busy, Option<Newest>)> {
    let row = sqlx::query(LOOK)
        .bind(tx.tenant_id())
        .bind(conversation_id)
        .fetch_one(tx.connection())
        .await?;
    let active_id: Option<TurnId> = row.try_get("active_id")?;
    let active_state: Option<String> = row.try_get("active_state")?;
    let active = match (active_id, active_state) {
        (Some(id), Some(state)) => Some((id, TurnState::from_column(&state)?)),
        (_, _) => None,
    };
    let busy = Busy {
        active,
        queued: row.try_get("queued")?,
        running_in_tenant: row.try_get("running")?,
    };
    let newest: Option<TurnId> = row.try_get("id")?;
    let newest = match newest {
        Some(_) => Some(Newest::from_row(&row)?),
        None => None,
    };
    Ok((busy, newest))
}

/// A turn as it is accepted.
#[derive(Debug)]
pub struct NewTurn<'a> {
    pub id: TurnId,
    pub conversation_id: SessionId,
    pub turn_no: i64,
    pub agent: &'a str,
    pub principal: &'a str,
    pub asked_hash: [u8; 32],
    pub input: &'a TurnInput,
    pub told: &'a Told,
    pub identity_id: Option<IdentityId>,
    pub platform: Option<String>,
    /// Who runs it at once, and for how long it is theirs; `None` queues it.
    pub runner: Option<Runner>,
}

/// A node, and how long a turn is its own without a sign of life.
#[derive(Debug, Clone, Copy)]
pub struct Runner {
    pub node: BootId,
    pub lease_ms: i64,
}

pub const INSERT: &str = "insert into turns (tenant_id, id, conversation_id, turn_no, state, agent, principal,
                        asked_hash, input, told, identity_id, platform, fence, node, lease_until, created_at)
     values ($1, $2, $3, $4, case when $12::uuid is null then 'queued' else 'running' end, $5, $6, $7,
             $8, $9, $10, $11, case when $12::uuid is null then 0 else 1 end, $12,
             case when $12::uuid is not null
                  then clock_timestamp() + $13 * interval '1 millisecond' end, $14)";

pub async fn insert(tx: &mut TenantTx, turn: &NewTurn<'_>, now: DateTime<Utc>) -> Result<()> {
    sqlx::query(INSERT)
        .bind(tx.tenant_id())
        .bind(turn.id)
        .bind(turn.conversation_id)
        .bind(turn.turn_no)
        .bind(turn.agent)
        .bind(turn.principal)
        .bind(turn.asked_hash.as_slice())
        .bind(Json(turn.input))
        .bind(Json(turn.told))
        .bind(turn.identity_id)
        .bind(&turn.platform)
        .bind(turn.runner.map(|runner| runner.node))
        .bind(turn.runner.map_or(0, |runner| runner.lease_ms))
        .bind(now)
        .execute(tx.connection())
        .await?;
    Ok(())
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
}

impl Taken {
    /// A turn that is started in the transaction that accepts it.
    pub fn fresh(turn: &NewTurn<'_>, user_id: Option<UserId>, now: DateTime<Utc>) -> Self {
        Self {
            id: turn.id,
            conversation_id: turn.conversation_id,
            agent: turn.agent.to_owned(),
            input: turn.input.clone(),
            told: turn.told.clone(),
            speaker: turn.identity_id.zip(turn.platform.clone()),
            user_id,
            session_id: None,
            steps: 0,
            calls: None,
            fence: 1,
            version: 0,
            attempt: 1,
            state: TurnState::Running,
            cancelled: None,
            created_at: now,
            started_at: None,
        }
    }
}

macro_rules! taken_columns {
    () => {
        "t.id, t.conversation_id, t.agent, t.input, t.told, t.identity_id, t.platform,
         coalesce(t.end_session_id, t.start_session_id) as session_id, t.steps, t.calls, t.fence, t.version,
         t.attempt, t.state, t.cancel_requested_at is not null as cancelled, t.cancel_reason, t.created_at,
         t.started_at,
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
    })
}

pub const CLAIM_NEXT: &str = concat!(
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

/// Ends everything of these conversations, or of the whole tenant, that has not ended, at once and without a
/// word in the transcript: whoever runs it finds the fence moved.
pub async fn stop_all(
    tx: &mut TenantTx,
    conversation_ids: Option<&[SessionId]>,
    reason: StopReason,
    now: DateTime<Utc>,
) -> Result<()> {
    sqlx::query(
        "with stopped as (
           update turns
              set state = $3, reason = $4, ended_at = $5, fence = fence + 1, lease_until = null, node = null
            where tenant_id = $1
              and ($2::uuid[] is null or conversation_id = any ($2))
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
    .bind(conversation_ids)
    .bind(reason.state().as_str())
    .bind(reason.as_str())
    .bind(now)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// The same for what these accounts have begun, wherever that is.
pub async fn stop_of_accounts(
    tx: &mut TenantTx,
    accounts: &[IdentityId],
    reason: StopReason,
    now: DateTime<Utc>,
) -> Result<()> {
    sqlx::query(
        "with stopped as (
           update turns
              set state = $3, reason = $4, ended_at = $5, fence = fence + 1, lease_until = null, node = null
            where tenant_id = $1
              and identity_id = any ($2)
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
    .bind(accounts)
    .bind(reason.state().as_str())
    .bind(reason.as_str())
    .bind(now)
    .execute(tx.connection())
    .await?;
    Ok(())
}

pub async fn find(tx: &mut TenantTx, id: TurnId) -> Result<Option<Turn>> {
    let row: Option<TurnRow> = sqlx::query_as(concat!(
        "select ",
        turn_columns!(),
        " from turns t
         where t.tenant_id = $1
           and t.id = $2"
    ))
    .bind(tx.tenant_id())
    .bind(id)
    .fetch_optional(tx.connection())
    .await?;
    Ok(row.map(|row| row.0))
}

pub async fn get(tx: &mut TenantTx, id: TurnId) -> Result<Turn> {
    find(tx, id).await?.ok_or_else(|| Error::not_found("turn"))
}

/// The turn that runs, or waits for its client, in a conversation.
pub async fn find_active(tx: &mut TenantTx, conversation_id: SessionId) -> Result<Option<TurnId>> {
    Ok(sqlx::query_scalar(
        "select id
           from turns
          where tenant_id = $1
            and conversation_id = $2
            and state in ('running', 'waiting_client')",
    )
    .bind(tx.tenant_id())
    .bind(conversation_id)
    .fetch_optional(tx.connection())
    .await?)
}

/// The turns of a conversation, newest first.
pub async fn list(
    tx: &mut TenantTx,
    conversation_id: SessionId,
    page: &PageRequest<i64>,
) -> Result<Page<Turn, i64>> {
    let rows: Vec<TurnRow> = sqlx::query_as(concat!(
        "select ",
        turn_columns!(),
        " from turns t
         where t.tenant_id = $1
           and t.conversation_id = $2
           and t.turn_no < $3
         order by t.turn_no desc
         limit $4"
    ))
    .bind(tx.tenant_id())
    .bind(conversation_id)
    .bind(page.after.unwrap_or(i64::MAX))
    .bind(page.fetch_limit())
    .fetch_all(tx.connection())
    .await?;
    let turns = rows.into_iter().map(|row| row.0).collect();
    Ok(Page::cut(turns, page, |turn: &Turn| turn.turn_no))
}

/// The last message that a turn's agent said, with the link it is in: role, content, calls.
#[derive(Debug, sqlx::FromRow)]
pub struct LastSaid {
    pub content: Option<Json<Value>>,
    pub tool_calls: Option<Json<Value>>,
}

pub async fn last_said(tx: &mut TenantTx, id: TurnId) -> Result<Option<LastSaid>> {
    Ok(sqlx::query_as(
        "select content, tool_calls
           from messages
          where tenant_id = $1
            and turn_id = $2
            and step is not null
            and role = 'assistant'
          order by step desc
          limit 1",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .fetch_optional(tx.connection())
    .await?)
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
