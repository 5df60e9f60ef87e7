//! Folding a user's DM slots into one, and unfolding them: the names of folded slots become aliases of the shared
//! slot and keep their home slot. The caller must have locked the user's slots.

use chrono::{DateTime, Utc};

use crate::domain::conversation::session::SessionHandle;
use crate::error::Result;
use crate::ids::{SessionId, SlotId, UserId};
use crate::store::TenantTx;

/// A name in the service's namespace, and its slot.
#[derive(Debug, Clone, Copy, sqlx::FromRow)]
pub struct ServiceName {
    pub slot_id: SlotId,
    pub home_slot_id: SlotId,
    /// The user of the home slot, which may not be the slot that the name points to.
    pub home_user_id: Option<UserId>,
}

pub async fn find_service_name(tx: &mut TenantTx, key: &str) -> Result<Option<ServiceName>> {
    Ok(sqlx::query_as(
        "select n.slot_id, n.home_slot_id, k.user_id as home_user_id
           from slot_names n
           join slots k
             on k.tenant_id = $1
            and k.id = n.home_slot_id
          where n.tenant_id = $1
            and n.namespace = '00000000-0000-0000-0000-000000000000'
            and n.key = $2",
    )
    .bind(tx.tenant_id())
    .bind(key)
    .fetch_optional(tx.connection())
    .await?)
}

/// The agents with which a user has DMs.
pub async fn list_dm_agents(tx: &mut TenantTx, user_id: UserId) -> Result<Vec<String>> {
    Ok(sqlx::query_scalar(
        "select distinct agent
           from slots
          where tenant_id = $1
            and user_id = $2
            and kind = 'dm'
          order by agent",
    )
    .bind(tx.tenant_id())
    .bind(user_id)
    .fetch_all(tx.connection())
    .await?)
}

/// The DM slots of a user with an agent, except `into`.
pub async fn list_dm_slots(
    tx: &mut TenantTx,
    user_id: UserId,
    agent: &str,
    into: SlotId,
) -> Result<Vec<SlotId>> {
    Ok(sqlx::query_scalar(
        "select id
           from slots
          where tenant_id = $1
            and user_id = $2
            and agent = $3
            and kind = 'dm'
            and id <> $4
          order by id",
    )
    .bind(tx.tenant_id())
    .bind(user_id)
    .bind(agent)
    .bind(into)
    .fetch_all(tx.connection())
    .await?)
}

/// Folds `slots` into `into`: their names point there, it gets their conversations, and its current conversation is
/// the one with an active turn, or else the latest activity among those with messages. The folded slots are empty until
/// they are unfolded.
pub async fn fold(
    tx: &mut TenantTx,
    slots: &[SlotId],
    into: SlotId,
    now: DateTime<Utc>,
) -> Result<()> {
    for statement in [
        "update slot_names
            set slot_id = $3
          where tenant_id = $1
            and slot_id = any ($2)",
        "insert into slot_conversations (tenant_id, slot_id, conversation_id)
         select $1, $3, conversation_id
           from slot_conversations
          where tenant_id = $1
            and slot_id = any ($2)
             on conflict on constraint slot_conversations_pkey do nothing",
        "update conversations
            set slot_id = $3
          where tenant_id = $1
            and slot_id = any ($2)",
        "update identity_presence
            set slot_id = $3
          where tenant_id = $1
            and slot_id = any ($2)",
    ] {
        sqlx::query(statement)
            .bind(tx.tenant_id())
            .bind(slots)
            .bind(into)
            .execute(tx.connection())
            .await?;
    }
    let latest: Option<SessionId> = sqlx::query_scalar(
        "select k.conversation_id
           from slots k
           join conversations c
             on c.tenant_id = $1
            and c.id = k.conversation_id
           join sessions t
             on t.tenant_id = $1
            and t.id = c.tip_session_id
          where k.tenant_id = $1
            and (k.id = any ($2) or k.id = $3)
          order by exists (select 1
                             from turns n
                            where n.tenant_id = $1
                              and n.conversation_id = c.id
                              and n.state in ('queued', 'running', 'waiting_client')) desc,
                   (t.next_seq > 1 or t.depth > 0) desc, t.last_active_at desc, t.id desc
          limit 1",
    )
    .bind(tx.tenant_id())
    .bind(slots)
    .bind(into)
    .fetch_optional(tx.connection())
    .await?;
    sqlx::query(
        "update slots k
            set conversation_id = $4,
                generation = generation + case when k.conversation_id is distinct from $4 then 1 else 0 end,
                last_user_at = greatest(k.last_user_at, (select max(o.last_user_at)
                                                               from slots o
                                                              where o.tenant_id = $1
                                                                and o.id = any ($2)
                                                                and o.conversation_id = $4))
          where k.tenant_id = $1
            and k.id = $3",
    )
    .bind(tx.tenant_id())
    .bind(slots)
    .bind(into)
    .bind(latest)
    .execute(tx.connection())
    .await?;
    sqlx::query(
        "update slots
            set conversation_id = null, generation = generation + 1, last_user_at = $3
          where tenant_id = $1
            and id = any ($2)",
    )
    .bind(tx.tenant_id())
    .bind(slots)
    .bind(now)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// The facts for the message to a user about the conversation that their linked identities share.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct Continuation {
    /// The origin of its last messages, as `platform` or `platform@scope`.
    pub platform: Option<String>,
    /// Whether the same DM has other conversations, too.
    pub has_others: bool,
}

/// The continuation of the DM with the current session `current`.
pub async fn find_continuation(tx: &mut TenantTx, current: &SessionHandle) -> Result<Continuation> {
    Ok(sqlx::query_as(
        "select (select recent.platform
                   from (select seq, platform
                           from messages
                          where tenant_id = $1
                            and session_id = $2
                          order by seq desc
                          limit 50) as recent
                  where recent.platform is not null
                  order by recent.seq desc
                  limit 1) as platform,
                exists (select 1
                          from slots k
                          join slot_conversations o
                            on o.tenant_id = $1
                           and o.slot_id = k.id
                           and o.conversation_id <> $3
                         where k.tenant_id = $1
                           and k.conversation_id = $3
                           and k.kind = 'dm') as has_others",
    )
    .bind(tx.tenant_id())
    .bind(current.id)
    .bind(current.name.conversation_id)
    .fetch_one(tx.connection())
    .await?)
}

/// Returns a folded slot its names. Its current conversation is the latest of its own.
pub async fn unfold(tx: &mut TenantTx, home: SlotId) -> Result<()> {
    sqlx::query(
        "update slot_names
            set slot_id = home_slot_id
          where tenant_id = $1
            and home_slot_id = $2",
    )
    .bind(tx.tenant_id())
    .bind(home)
    .execute(tx.connection())
    .await?;
    update_to_latest(tx, &[home]).await
}

/// Sets the current conversation of each empty slot to the latest of its conversations.
pub async fn update_to_latest(tx: &mut TenantTx, slots: &[SlotId]) -> Result<()> {
    sqlx::query(
        "update slots k
            set conversation_id = latest.id, generation = k.generation + 1
           from (select distinct on (m.slot_id) m.slot_id, c.id
                   from slot_conversations m
                   join slots o
                     on o.tenant_id = $1
                    and o.id = m.slot_id
                   join conversations c
                     on c.tenant_id = $1
                    and c.id = m.conversation_id
                    and c.deleted_at is null
                    and c.user_id is not distinct from o.user_id
                   join sessions t
                     on t.tenant_id = $1
                    and t.id = c.tip_session_id
                  where m.tenant_id = $1
                    and m.slot_id = any ($2)
                  order by m.slot_id, t.last_active_at desc, t.id desc) latest
          where k.tenant_id = $1
            and k.id = latest.slot_id
            and k.conversation_id is null",
    )
    .bind(tx.tenant_id())
    .bind(slots)
    .execute(tx.connection())
    .await?;
    Ok(())
}
