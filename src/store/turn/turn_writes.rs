//! What a running turn writes. Every write carries the fence and version of its lease: a node that lost the turn
//! writes nothing, and a write whose answer was lost is not made twice.

use chrono::{DateTime, Utc};
use sqlx::Row;
use sqlx::postgres::PgRow;
use sqlx::types::Json;

use super::turn_lease::TurnLease;
use super::turn_sql::{CommonValues, WRITE, bind_common};
use crate::domain::bridge::delivery::ReplyVia;
use crate::domain::conversation::message::{NewMessage, ToolCall};
use crate::domain::turn::completion::TokenUsage;
use crate::domain::turn::event::NewEvent;
use crate::domain::turn::{CLIENT_TOOL_TIMEOUT, StopReason, TurnState};
use crate::error::{Error, Result};
use crate::ids::SessionId;
use crate::store::TenantTx;
use crate::store::conversation::message_columns::MessageColumns;

/// What is written at once.
#[derive(Debug, Default, Clone, Copy)]
pub struct TurnWrite<'a> {
    pub messages: &'a [NewMessage],
    pub events: &'a [NewEvent],
    pub change: Change<'a>,
}

/// How the turn stands after a write.
#[derive(Debug, Default, Clone, Copy)]
pub struct Change<'a> {
    /// `None`: it goes on.
    pub state: Option<TurnState>,
    pub reason: Option<&'a str>,
    pub detail: Option<&'a str>,
    pub finish_reason: Option<&'a str>,
    /// The client's tools that it waits for.
    pub calls: Option<&'a [ToolCall]>,
    pub usage: Option<TokenUsage>,
}

/// What a write answers to its node.
#[derive(Debug, Clone, Copy, Default)]
pub struct WriteAck {
    /// The number of the first message.
    pub first_seq: Option<i64>,
    /// Why the turn should stop.
    pub stop: Option<StopReason>,
    /// How the answer gets to the sender on a platform.
    pub reply_via: Option<ReplyVia>,
    /// Whether later turns of its conversation were accepted, and may wait.
    pub has_followers: bool,
}

impl TurnLease {
    /// Writes, or answers `None` if the turn is no longer at this fence and version. Once the transaction is committed
    /// the lease has to `advance`.
    pub async fn write(
        &self,
        tx: &mut TenantTx,
        write: &TurnWrite<'_>,
        now: DateTime<Utc>,
    ) -> Result<Option<WriteAck>> {
        let change = &write.change;
        let state = change.state.unwrap_or(TurnState::Running);
        let usage = change.usage.unwrap_or(TokenUsage::NONE);
        let values = CommonValues {
            tenant_id: tx.tenant_id(),
            turn_id: self.id,
            conversation_id: self.conversation_id,
            now,
            lease_ms: self.runner.lease_ms,
            attempt: self.attempt,
            sender: self.sender.as_ref(),
            events: write.events,
        };
        let mut columns = MessageColumns::new(write.messages)?;
        let extras = std::mem::take(&mut columns.extras);
        let row = bind_common(sqlx::query(WRITE), &values, columns)
            .bind(self.fence)
            .bind(self.version)
            .bind(state.as_str())
            .bind(change.reason)
            .bind(change.detail)
            .bind(change.finish_reason)
            .bind(change.calls.map(Json))
            .bind(usage.input)
            .bind(usage.output)
            .bind(usage.estimated)
            .bind(self.session_id)
            .bind(CLIENT_TOOL_TIMEOUT.num_milliseconds())
            .bind(self.started_at.is_none())
            .bind(extras)
            .fetch_optional(tx.connection())
            .await?;
        let Some(row) = row else {
            return Ok(None);
        };
        tx.notify_conversation(self.conversation_id);
        let first_seq: Option<i64> = row.try_get("first_seq")?;
        if first_seq.is_none() && !write.messages.is_empty() {
            let detail = "the tip of a conversation with an active turn was moved";
            return Err(Error::internal(anyhow::anyhow!(detail)));
        }
        let reply_via: Option<String> = row.try_get("reply_via")?;
        Ok(Some(WriteAck {
            first_seq,
            stop: read_stop(&row)?,
            reply_via: reply_via
                .as_deref()
                .map(ReplyVia::from_column)
                .transpose()?,
            has_followers: row.try_get("followed")?,
        }))
    }

    /// Moves on to the version that a committed write has left.
    pub fn advance(&mut self, messages: usize, now: DateTime<Utc>) {
        let messages = i32::try_from(messages).unwrap_or(i32::MAX);
        self.version += 1;
        self.steps = self.steps.saturating_add(messages);
        self.started_at = self.started_at.or(Some(now));
    }

    /// Writes as the transaction that has just claimed the turn: no other node can have claimed it since.
    pub async fn write_claimed(
        &mut self,
        tx: &mut TenantTx,
        write: &TurnWrite<'_>,
        now: DateTime<Utc>,
    ) -> Result<WriteAck> {
        let Some(ack) = self.write(tx, write, now).await? else {
            let detail = "a turn was lost in the transaction that claimed it";
            return Err(Error::internal(anyhow::anyhow!(detail)));
        };
        self.advance(write.messages.len(), now);
        Ok(ack)
    }

    /// Renews the lease; `None` if the turn is lost.
    pub async fn renew(&self, tx: &mut TenantTx) -> Result<Option<WriteAck>> {
        let row = sqlx::query(
            "update turns
                set lease_until = clock_timestamp() + $4 * interval '1 millisecond'
              where tenant_id = $1
                and id = $2
                and fence = $3
                and ended_at is null
                and node is not null
          returning cancel_requested_at is not null as cancelled, cancel_reason,
                    (select o.state from tenants o where o.id = $1) as tenant_state",
        )
        .bind(tx.tenant_id())
        .bind(self.id)
        .bind(self.fence)
        .bind(self.runner.lease_ms)
        .fetch_optional(tx.connection())
        .await?;
        let Some(row) = row else {
            return Ok(None);
        };
        Ok(Some(WriteAck {
            stop: read_stop(&row)?,
            ..WriteAck::default()
        }))
    }

    /// Releases the turn: any node may claim it at once.
    pub async fn release(&self, tx: &mut TenantTx) -> Result<()> {
        sqlx::query(
            "update turns
                set lease_until = clock_timestamp(), node = null
              where tenant_id = $1
                and id = $2
                and fence = $3
                and state = 'running'",
        )
        .bind(tx.tenant_id())
        .bind(self.id)
        .bind(self.fence)
        .execute(tx.connection())
        .await?;
        Ok(())
    }

    /// Whether the write after this version was made after all, though its answer was lost.
    pub async fn was_applied(&self, tx: &mut TenantTx) -> Result<bool> {
        let conversation_id: Option<SessionId> = sqlx::query_scalar(
            "select conversation_id
               from turns
              where tenant_id = $1
                and id = $2
                and fence = $3
                and version = $4 + 1",
        )
        .bind(tx.tenant_id())
        .bind(self.id)
        .bind(self.fence)
        .bind(self.version)
        .fetch_optional(tx.connection())
        .await?;
        // Its commit may have been lost before it could notify.
        if let Some(conversation_id) = conversation_id {
            tx.notify_conversation(conversation_id);
        }
        Ok(conversation_id.is_some())
    }
}

/// Why the turn is to stop, if it is: somebody asked for it, or its tenant is not served any more.
fn read_stop(row: &PgRow) -> Result<Option<StopReason>> {
    let tenant_state: Option<String> = row.try_get("tenant_state")?;
    if tenant_state.as_deref() != Some("active") {
        return Ok(Some(StopReason::TenantSuspended));
    }
    let cancelled: bool = row.try_get("cancelled")?;
    let reason: Option<String> = row.try_get("cancel_reason")?;
    Ok(cancelled.then(|| StopReason::from_stop_request(reason.as_deref())))
}
