//! Turns as they wait and as they stand. How one starts is in `turn_starts`, who has one in `turn_claims`,
//! what a running turn writes in `turn_writes`. A transaction that accepts or ends one holds its conversation.

use chrono::{DateTime, Utc};
use serde_json::Value;
use sqlx::postgres::PgRow;
use sqlx::types::Json;
use sqlx::{FromRow, Row};

use crate::domain::bridge::delivery::{ReplyTo, ReplyVia};
use crate::domain::conversation::message_extra::Extra;
use crate::domain::turn::completion::TokenUsage;
use crate::domain::turn::{ConversationLoad, SessionInfo, Turn, TurnInput, TurnState};
use crate::domain::values::paging::{Page, PageRequest};
use crate::error::{Error, Result};
use crate::ids::{IdentityId, SessionId, TurnId};
use crate::store::TenantTx;

macro_rules! turn_columns {
    () => {
        "t.id, t.conversation_id, t.turn_no, t.state, t.reason, t.detail, t.agent, t.identity_id, t.session_info,
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
    let Json(session_info): Json<SessionInfo> = row.try_get("session_info")?;
    Ok(Turn {
        id: row.try_get("id")?,
        conversation_id: row.try_get("conversation_id")?,
        turn_no: row.try_get("turn_no")?,
        state: TurnState::from_column(row.try_get("state")?)?,
        reason: row.try_get("reason")?,
        detail: row.try_get("detail")?,
        agent: row.try_get("agent")?,
        identity_id: row.try_get("identity_id")?,
        session_info,
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

/// The newest turn of a conversation, its principal and its request: they identify a client's own retry.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct LatestTurn {
    pub id: TurnId,
    pub principal: String,
    pub request_hash: Vec<u8>,
}

const LOAD: &str = "select a.id as active_id, a.state as active_state,
            (select count(*)
               from turns q
              where q.tenant_id = $1
                and q.conversation_id = $2
                and q.state = 'queued') as queued,
            (select count(*)
               from turns r
              where r.tenant_id = $1
                and r.state = 'running') as running,
            n.id, n.principal, n.request_hash
       from (select 1) one
       left join turns a
         on a.tenant_id = $1
        and a.conversation_id = $2
        and a.state in ('running', 'waiting_client')
       left join lateral (select l.id, l.principal, l.request_hash
                            from turns l
                           where l.tenant_id = $1
                             and l.conversation_id = $2
                           order by l.turn_no desc
                           limit 1) n
         on true";

/// How busy a locked conversation is, and its newest turn. A statement of its own: one that also waits for the
/// conversation's lock would see the turns as they were before it waited.
pub async fn load(
    tx: &mut TenantTx,
    conversation_id: SessionId,
) -> Result<(ConversationLoad, Option<LatestTurn>)> {
    let row = sqlx::query(LOAD)
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
    let load = ConversationLoad {
        active,
        queued: row.try_get("queued")?,
        running_in_tenant: row.try_get("running")?,
    };
    let newest: Option<TurnId> = row.try_get("id")?;
    let newest = match newest {
        Some(_) => Some(LatestTurn::from_row(&row)?),
        None => None,
    };
    Ok((load, newest))
}

/// A turn as it is accepted.
#[derive(Debug)]
pub struct NewTurn<'a> {
    pub id: TurnId,
    pub conversation_id: SessionId,
    pub agent: &'a str,
    pub principal: &'a str,
    pub request_hash: [u8; 32],
    pub input: &'a TurnInput,
    pub session_info: &'a SessionInfo,
    /// The sender, and on which platform.
    pub sender: Option<(IdentityId, String)>,
    /// Where its answer goes, for one that came from a platform.
    pub reply: Option<(&'a ReplyTo, ReplyVia)>,
}

/// Puts a turn at the end of its conversation's queue.
pub async fn queue(tx: &mut TenantTx, turn: &NewTurn<'_>, now: DateTime<Utc>) -> Result<()> {
    sqlx::query(
        "with number as (
           update conversations
              set next_turn_no = next_turn_no + 1,
                  last_at = greatest(last_at, $11)
            where tenant_id = $1
              and id = $3
        returning next_turn_no - 1 as turn_no, last_at
         )
         insert into turns (tenant_id, id, conversation_id, turn_no, state, agent, principal, request_hash, input,
                            session_info, identity_id, platform, created_at, due_at, reply_to, reply_via)
         select $1, $2, $3, turn_no, 'queued', $4, $5, $6, $7, $8, $9, $10, last_at,
                clock_timestamp() + interval '2 seconds', $12, $13
           from number",
    )
    .bind(tx.tenant_id())
    .bind(turn.id)
    .bind(turn.conversation_id)
    .bind(turn.agent)
    .bind(turn.principal)
    .bind(turn.request_hash.as_slice())
    .bind(Json(turn.input))
    .bind(Json(turn.session_info))
    .bind(turn.sender.as_ref().map(|(identity_id, _)| *identity_id))
    .bind(turn.sender.as_ref().map(|(_, platform)| platform))
    .bind(now)
    .bind(turn.reply.map(|(to, _)| Json(to)))
    .bind(turn.reply.map(|(_, via)| via.as_str()))
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

/// The turns of a conversation that have not ended, oldest first.
pub async fn list_open(tx: &mut TenantTx, conversation_id: SessionId) -> Result<Vec<Turn>> {
    let rows: Vec<TurnRow> = sqlx::query_as(concat!(
        "select ",
        turn_columns!(),
        " from turns t
         where t.tenant_id = $1
           and t.conversation_id = $2
           and t.state in ('queued', 'running', 'waiting_client')
         order by t.turn_no"
    ))
    .bind(tx.tenant_id())
    .bind(conversation_id)
    .fetch_all(tx.connection())
    .await?;
    Ok(rows.into_iter().map(|row| row.0).collect())
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

/// The last message that the agent wrote in a turn.
#[derive(Debug, sqlx::FromRow)]
pub struct LastAnswer {
    pub content: Option<Json<Value>>,
    pub tool_calls: Option<Json<Value>>,
    pub extra: Option<Json<Box<Extra>>>,
}

pub async fn find_last_answer(tx: &mut TenantTx, id: TurnId) -> Result<Option<LastAnswer>> {
    Ok(sqlx::query_as(
        "select content, tool_calls, extra
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
