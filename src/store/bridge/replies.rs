//! How the answers of turns get to who asked on a platform: by HTTP to who waits, or as a delivery. One
//! conditional update decides, however many try.

use chrono::{DateTime, Utc};
use sqlx::types::Json;

use crate::domain::bridge::delivery::{ReplyTo, ReplyVia};
use crate::domain::conversation::message::Content;
use crate::domain::turn::TurnInput;
use crate::error::Result;
use crate::ids::{IdentityId, SessionId, TenantId, TurnId};
use crate::store::{Db, TenantTx};

/// Who waited has the answer. False if it has become a delivery.
pub async fn mark_returned(tx: &mut TenantTx, id: TurnId) -> Result<bool> {
    let done = sqlx::query(
        "update turns
            set reply_via = 'returned'
          where tenant_id = $1
            and id = $2
            and reply_via in ('waiting', 'returned', 'failed')",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .execute(tx.connection())
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Nobody waits any longer: the end of the turn makes a delivery. False if it has ended, or did so before.
pub async fn hand_to_delivery(tx: &mut TenantTx, id: TurnId) -> Result<bool> {
    let done = sqlx::query(
        "update turns
            set reply_via = 'delivery'
          where tenant_id = $1
            and id = $2
            and reply_via = 'waiting'
            and ended_at is null",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .execute(tx.connection())
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Answers that nobody fetched: all tenants'.
pub async fn list_unclaimed(db: &Db, limit: i32) -> Result<Vec<(TenantId, TurnId)>> {
    Ok(sqlx::query_as("select tenant_id, id from due_replies($1)")
        .bind(limit)
        .fetch_all(db.connection().await?.limited())
        .await?)
}

/// Makes the answer of a turn that has ended a delivery, and says where it goes; `None` if somebody has it.
pub async fn claim_answer(tx: &mut TenantTx, id: TurnId) -> Result<Option<ReplyTo>> {
    let to: Option<Option<Json<ReplyTo>>> = sqlx::query_scalar(
        "update turns
            set reply_via = 'delivery'
          where tenant_id = $1
            and id = $2
            and reply_via = 'waiting'
            and ended_at is not null
      returning reply_to",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .fetch_optional(tx.connection())
    .await?;
    Ok(to.flatten().map(|Json(to)| to))
}

/// Gives up making a delivery of an answer.
pub async fn mark_failed(tx: &mut TenantTx, id: TurnId) -> Result<()> {
    sqlx::query(
        "update turns
            set reply_via = 'failed'
          where tenant_id = $1
            and id = $2
            and reply_via = 'waiting'",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// How an answer gets to who asked.
pub async fn find_via(tx: &mut TenantTx, id: TurnId) -> Result<Option<ReplyVia>> {
    let via: Option<Option<String>> = sqlx::query_scalar(
        "select reply_via
           from turns
          where tenant_id = $1
            and id = $2",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .fetch_optional(tx.connection())
    .await?;
    via.flatten()
        .as_deref()
        .map(ReplyVia::from_column)
        .transpose()
}

/// Replaces what a turn says that has not started. False if it has.
pub async fn update_queued(tx: &mut TenantTx, id: TurnId, input: &TurnInput) -> Result<bool> {
    let done = sqlx::query(
        "update turns
            set input = $3
          where tenant_id = $1
            and id = $2
            and state = 'queued'",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .bind(Json(input))
    .execute(tx.connection())
    .await?;
    Ok(done.rows_affected() == 1)
}

/// The last turns that can be taken back: those of these identities (all where `None`) that have ended and whose
/// messages are in the session, copies of them too, newest first.
pub async fn list_undoable(
    tx: &mut TenantTx,
    session_id: SessionId,
    identities: Option<&[IdentityId]>,
    limit: i64,
) -> Result<Vec<TurnId>> {
    Ok(sqlx::query_scalar(
        "select t.id
           from (select m.turn_id, max(m.seq) as last_seq
                   from messages m
                  where m.tenant_id = $1
                    and m.session_id = $2
                    and m.role = 'user'
                    and m.kind = 'normal'
                    and m.turn_id is not null
                    and m.undone_at is null
                  group by m.turn_id) said
           join turns t
             on t.tenant_id = $1
            and t.id = said.turn_id
          where t.ended_at is not null
            and ($3::uuid[] is null or t.identity_id = any ($3))
          order by said.last_seq desc
          limit $4",
    )
    .bind(tx.tenant_id())
    .bind(session_id)
    .bind(identities)
    .bind(limit)
    .fetch_all(tx.connection())
    .await?)
}

/// The user messages of a turn.
pub async fn list_said(
    tx: &mut TenantTx,
    session_id: SessionId,
    turn_id: TurnId,
) -> Result<Vec<Content>> {
    let said: Vec<Json<Content>> = sqlx::query_scalar(
        "select m.content
           from messages m
          where m.tenant_id = $1
            and m.session_id = $2
            and m.turn_id = $3
            and m.role = 'user'
            and m.kind = 'normal'
            and m.content is not null
            and m.undone_at is null
          order by m.seq",
    )
    .bind(tx.tenant_id())
    .bind(session_id)
    .bind(turn_id)
    .fetch_all(tx.connection())
    .await?;
    Ok(said.into_iter().map(|Json(content)| content).collect())
}

/// Undoes everything that these turns wrote, in every link of the chain: copies that a compression kept, and
/// the originals, which it may be taken back to. It keeps its place and its numbers, and no model sees it.
pub async fn undo(
    tx: &mut TenantTx,
    conversation_id: SessionId,
    turn_ids: &[TurnId],
    now: DateTime<Utc>,
) -> Result<()> {
    sqlx::query(
        "update messages m
            set undone_at = $4
           from sessions s
          where s.tenant_id = $1
            and s.conversation_id = $2
            and m.tenant_id = $1
            and m.session_id = s.id
            and m.turn_id = any ($3)
            and m.undone_at is null",
    )
    .bind(tx.tenant_id())
    .bind(conversation_id)
    .bind(turn_ids)
    .bind(now)
    .execute(tx.connection())
    .await?;
    Ok(())
}
