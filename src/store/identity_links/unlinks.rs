//! Unlinking an identity from its user: conversations in which only this identity spoke move with it, all others
//! stay. The caller must hold the locks on both users, their slots and their conversations.

use chrono::{DateTime, Utc};

use crate::domain::people::user::Identity;
use crate::error::Result;
use crate::ids::{IdentityId, SessionId, SlotId, UserId};
use crate::store::TenantTx;
use crate::store::bridge::outbox;

/// The conversations of a user in which only this identity wrote. Others exclude a conversation by a message, by their
/// words in a summary, and by a queued turn, which is not in the transcript yet. Anybody's words can be in a summary
/// whose sources are unknown.
pub async fn list_own_conversations(
    tx: &mut TenantTx,
    user_id: UserId,
    identity_id: IdentityId,
) -> Result<Vec<SessionId>> {
    Ok(sqlx::query_scalar(
        "select c.id
           from conversations c
          where c.tenant_id = $1
            and c.user_id = $2
            and exists (select 1
                          from sessions s
                          join messages m
                            on m.tenant_id = $1
                           and m.session_id = s.id
                           and m.identity_id = $3
                         where s.tenant_id = $1
                           and s.conversation_id = c.id)
            and not exists (select 1
                              from sessions s
                              join messages m
                                on m.tenant_id = $1
                               and m.session_id = s.id
                               and (m.role = 'user' and m.kind = 'normal' and m.identity_id is distinct from $3
                                    or m.kind = 'summary' and (m.source_identities <@ array[$3]) is not true)
                             where s.tenant_id = $1
                               and s.conversation_id = c.id)
            and not exists (select 1
                              from turns q
                             where q.tenant_id = $1
                               and q.conversation_id = c.id
                               and q.state = 'queued'
                               and q.identity_id is distinct from $3)
          order by c.id",
    )
    .bind(tx.tenant_id())
    .bind(user_id)
    .bind(identity_id)
    .fetch_all(tx.connection())
    .await?)
}

/// Those of these identities that were never used. The caller must hold the locks on their users and on the
/// users' slots and conversations.
pub async fn list_without_messages(
    tx: &mut TenantTx,
    identities: &[IdentityId],
) -> Result<Vec<IdentityId>> {
    Ok(sqlx::query_scalar(
        "select i.id
           from identities i
          where i.tenant_id = $1
            and i.id = any ($2)
            and not exists (select 1 from slots where tenant_id = $1 and identity_id = i.id)
            and not exists (select 1 from messages where tenant_id = $1 and identity_id = i.id)
            and not exists (select 1 from identity_presence where tenant_id = $1 and identity_id = i.id)
            and not exists (select 1 from home_channels where tenant_id = $1 and identity_id = i.id)
            and not exists (select 1 from codes where tenant_id = $1 and minted_by = i.id)
            and not exists (select 1 from conversation_grants where tenant_id = $1 and identity_id = i.id)
            and not exists (select 1 from deliveries where tenant_id = $1 and identity_id = i.id)",
    )
    .bind(tx.tenant_id())
    .bind(identities)
    .fetch_all(tx.connection())
    .await?)
}

/// Moves the slots that were created for the identity to `to`. Their names point to their home slots again.
pub async fn move_slots(
    tx: &mut TenantTx,
    identity_id: IdentityId,
    from: UserId,
    to: UserId,
) -> Result<Vec<SlotId>> {
    let slots: Vec<SlotId> = sqlx::query_scalar(
        "update slots
            set user_id = $4
          where tenant_id = $1
            and identity_id = $2
            and user_id = $3
      returning id",
    )
    .bind(tx.tenant_id())
    .bind(identity_id)
    .bind(from)
    .bind(to)
    .fetch_all(tx.connection())
    .await?;
    sqlx::query(
        "update slot_names
            set slot_id = home_slot_id, namespace = case when namespace = $3 then $4 else namespace end
          where tenant_id = $1
            and home_slot_id = any ($2)",
    )
    .bind(tx.tenant_id())
    .bind(&slots)
    .bind(from)
    .bind(to)
    .execute(tx.connection())
    .await?;
    Ok(slots)
}

/// The agents of moving DM conversations for which no moving slot exists.
pub async fn list_agents_without_slot(
    tx: &mut TenantTx,
    conversations: &[SessionId],
    slots: &[SlotId],
) -> Result<Vec<String>> {
    Ok(sqlx::query_scalar(
        "select distinct c.agent
           from conversations c
           join slots k
             on k.tenant_id = $1
            and k.id = c.slot_id
            and k.kind = 'dm'
          where c.tenant_id = $1
            and c.id = any ($2)
            and c.slot_id <> all ($3)
            and not exists (select 1
                              from slots home
                             where home.tenant_id = $1
                               and home.id = any ($3)
                               and home.kind = 'dm'
                               and home.agent = c.agent)
          order by c.agent",
    )
    .bind(tx.tenant_id())
    .bind(conversations)
    .bind(slots)
    .fetch_all(tx.connection())
    .await?)
}

/// Moves `conversations` to `to`, under its slots. Conversations that stay leave those slots. Afterwards no slot
/// of one user points to, or lists, a conversation of the other.
pub async fn move_conversations(
    tx: &mut TenantTx,
    conversations: &[SessionId],
    slots: &[SlotId],
    from: UserId,
    to: UserId,
) -> Result<()> {
    for statement in [
        // Moving conversations: under a moving slot, or under the identity's own DM with the same agent.
        "update conversations c
            set user_id = $5,
                namespace = case when c.namespace = $4 then $5 else c.namespace end,
                slot_id = case
                  when c.slot_id = any ($3) then c.slot_id
                  else (select home.id
                          from slots home
                          join slots k
                            on k.tenant_id = $1
                           and k.id = c.slot_id
                           and k.kind = 'dm'
                         where home.tenant_id = $1
                           and home.id = any ($3)
                           and home.kind = 'dm'
                           and home.agent = c.agent
                         order by home.id
                         limit 1)
                end
          where c.tenant_id = $1
            and c.id = any ($2)",
        // Staying conversations: under the shared slot of the user, or under none.
        "update conversations c
            set slot_id = (select shared.id
                             from slots shared
                            where shared.tenant_id = $1
                              and shared.user_id = $4
                              and shared.kind = 'dm'
                              and shared.identity_id is null
                              and shared.agent = c.agent
                            order by shared.id
                            limit 1)
          where c.tenant_id = $1
            and c.slot_id = any ($3)
            and c.id <> all ($2)
            and c.user_id is distinct from $5",
        "delete from slot_conversations m
          using slots k, conversations c
          where m.tenant_id = $1
            and k.tenant_id = $1
            and k.id = m.slot_id
            and c.tenant_id = $1
            and c.id = m.conversation_id
            and (m.slot_id = any ($3) or m.conversation_id = any ($2))
            and k.user_id is distinct from c.user_id
            and (k.user_id in ($4, $5) or c.user_id in ($4, $5))",
        "insert into slot_conversations (tenant_id, slot_id, conversation_id)
         select $1, c.slot_id, c.id
           from conversations c
          where c.tenant_id = $1
            and c.slot_id is not null
            and c.user_id in ($4, $5)
            and (c.id = any ($2) or c.slot_id <> all ($3))
             on conflict on constraint slot_conversations_pkey do nothing",
        "update slots k
            set conversation_id = null, generation = k.generation + 1
           from conversations c
          where k.tenant_id = $1
            and k.user_id in ($4, $5)
            and c.tenant_id = $1
            and c.id = k.conversation_id
            and (k.id = any ($3) or c.id = any ($2))
            and c.user_id is distinct from k.user_id",
    ] {
        sqlx::query(statement)
            .bind(tx.tenant_id())
            .bind(conversations)
            .bind(slots)
            .bind(from)
            .bind(to)
            .execute(tx.connection())
            .await?;
    }
    Ok(())
}

/// Ends everything that depends on the identity: its home channels, the codes that it minted, its grants in others'
/// conversations, its pending deliveries, its stored command answers, and the slot of its presence.
pub async fn end_belongings(
    tx: &mut TenantTx,
    identity: &Identity,
    now: DateTime<Utc>,
) -> Result<()> {
    let identity_id = identity.id;
    outbox::lock_chats(tx, &[identity_id]).await?;
    for statement in [
        "update codes
            set voided_at = $3
          where tenant_id = $1
            and minted_by = $2
            and consumed_at is null
            and voided_at is null",
        "update conversation_grants
            set revoked_at = $3
          where tenant_id = $1
            and identity_id = $2
            and revoked_at is null",
        "update deliveries
            set state = 'cancelled', lease = null, visible_at = $3, ended_at = $3
          where tenant_id = $1
            and identity_id = $2
            and state in ('pending', 'leased')",
    ] {
        sqlx::query(statement)
            .bind(tx.tenant_id())
            .bind(identity_id)
            .bind(now)
            .execute(tx.connection())
            .await?;
    }
    for statement in [
        "delete from home_channels
          where tenant_id = $1
            and identity_id = $2",
        "update identity_presence
            set slot_id = null
          where tenant_id = $1
            and identity_id = $2",
        // The receipt stays: it shows that the command ran.
        "update inbound_receipts
            set answer_enc = null
          where tenant_id = $1
            and identity_id = $2
            and answer_enc is not null",
        // Turns that the identity started in conversations that it may no longer read lose their recipient: turns
        // that have not ended, and turns whose answer no one fetched.
        "update turns t
            set reply_via = null
           from conversations c, identities i
          where t.tenant_id = $1
            and t.id in (select q.id
                           from turns q
                          where q.tenant_id = $1
                            and q.state = 'queued'
                            and q.identity_id = $2
                          union all
                         select a.id
                           from turns a
                          where a.tenant_id = $1
                            and a.state in ('running', 'waiting_client')
                            and a.identity_id = $2
                          union all
                         select u.id
                           from turns u
                          where u.tenant_id = $1
                            and u.reply_via = 'waiting'
                            and u.ended_at is not null
                            and u.identity_id = $2)
            and (t.reply_via = 'waiting' or t.reply_via = 'delivery' and t.ended_at is null)
            and c.tenant_id = $1
            and c.id = t.conversation_id
            and i.tenant_id = $1
            and i.id = $2
            and c.user_id <> i.user_id",
    ] {
        sqlx::query(statement)
            .bind(tx.tenant_id())
            .bind(identity_id)
            .execute(tx.connection())
            .await?;
    }
    // Stored answers to requests of bridges that named the identity.
    sqlx::query(
        "delete from idempotency
          where tenant_id = $1
            and acted_for = $2",
    )
    .bind(tx.tenant_id())
    .bind(identity.name.to_string())
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// The DM slots of a user that have a name but no current conversation.
pub async fn list_empty_slots(tx: &mut TenantTx, user_id: UserId) -> Result<Vec<SlotId>> {
    Ok(sqlx::query_scalar(
        "select id
           from slots
          where tenant_id = $1
            and user_id = $2
            and kind = 'dm'
            and conversation_id is null
            and exists (select 1
                          from slot_names n
                         where n.tenant_id = $1
                           and n.slot_id = slots.id)
          order by id",
    )
    .bind(tx.tenant_id())
    .bind(user_id)
    .fetch_all(tx.connection())
    .await?)
}
