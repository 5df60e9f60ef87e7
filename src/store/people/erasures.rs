//! The immediate part of a user's erasure: every row that refers to the user or to one of their identities. The
//! caller must hold the locks on the user, their slots and their conversations. The rows of the identities and
//! the user are deleted last, and foreign keys refuse that if another row still refers to them.

use chrono::{DateTime, Utc};
use uuid::Uuid;

use crate::domain::conversation::session::ConversationHandle;
use crate::domain::people::access::Namespace;
use crate::domain::people::erasure::{ERASED, Erasure};
use crate::domain::people::user::IdentityRecord;
use crate::error::Result;
use crate::ids::{IdentityId, SessionId, UserId};
use crate::store::TenantTx;
use crate::store::bridge::outbox;

/// Locks every slot of a user, and every other slot that points to a conversation of theirs.
pub async fn lock_slots(tx: &mut TenantTx, user_id: UserId) -> Result<()> {
    sqlx::query(
        "select id
           from slots
          where tenant_id = $1
            and id in (select own.id
                         from slots own
                        where own.tenant_id = $1
                          and own.user_id = $2
                        union
                       select other.id
                         from conversations c
                         join slots other
                           on other.tenant_id = $1
                          and other.conversation_id = c.id
                        where c.tenant_id = $1
                          and c.user_id = $2)
          order by id
            for no key update",
    )
    .bind(tx.tenant_id())
    .bind(user_id)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Locks a user so that no new row can refer to them, and waits for transactions that are inserting such a row.
/// Returns false if the user does not exist.
pub async fn lock_user(tx: &mut TenantTx, user_id: UserId) -> Result<bool> {
    let locked: Option<i32> = sqlx::query_scalar(
        "select 1
           from users
          where tenant_id = $1
            and id = $2
            for update",
    )
    .bind(tx.tenant_id())
    .bind(user_id)
    .fetch_optional(tx.connection())
    .await?;
    Ok(locked.is_some())
}

/// The handles of a user's conversations, so that no client id is used again.
pub async fn list_conversations(
    tx: &mut TenantTx,
    user_id: UserId,
) -> Result<Vec<ConversationHandle>> {
    let rows: Vec<(SessionId, Uuid, Option<String>)> = sqlx::query_as(
        "select id, namespace, client_id
           from conversations
          where tenant_id = $1
            and user_id = $2
            and deleted_at is null
          order by id",
    )
    .bind(tx.tenant_id())
    .bind(user_id)
    .fetch_all(tx.connection())
    .await?;
    let name = |(conversation_id, namespace, client_id)| ConversationHandle {
        conversation_id,
        namespace: Namespace::from_uuid(namespace),
        client_id,
        user_id: Some(user_id),
        hidden: false,
    };
    Ok(rows.into_iter().map(name).collect())
}

/// Deletes slots and names, and removes from the user's deleted conversations every trace of their owner: a job
/// deletes their rows. Conversations that the user started in a shared chat stay, without an owner.
pub async fn delete_slots(tx: &mut TenantTx, erasure: &Erasure) -> Result<()> {
    for statement in [
        "update conversations
            set user_id = null, slot_id = null, namespace = '00000000-0000-0000-0000-000000000000',
                client_id = null, title = null
          where tenant_id = $1
            and user_id = $2",
        "update conversations
            set slot_id = null
          where tenant_id = $1
            and slot_id in (select id
                              from slots
                             where tenant_id = $1
                               and user_id = $2)",
        "delete from slots
          where tenant_id = $1
            and user_id = $2",
    ] {
        sqlx::query(statement)
            .bind(tx.tenant_id())
            .bind(erasure.user_id)
            .execute(tx.connection())
            .await?;
    }
    for statement in [
        "update conversations
            set namespace = '00000000-0000-0000-0000-000000000000', client_id = null
          where tenant_id = $1
            and namespace = any ($2)",
        "delete from slot_names
          where tenant_id = $1
            and namespace = any ($2)",
    ] {
        sqlx::query(statement)
            .bind(tx.tenant_id())
            .bind(erasure.user_ids())
            .execute(tx.connection())
            .await?;
    }
    Ok(())
}

/// Blanks the security notices to others about merges and unlinks of the user's identities. Notices that are not
/// delivered yet are cancelled.
pub async fn blank_notices(tx: &mut TenantTx, erasure: &Erasure, now: DateTime<Utc>) -> Result<()> {
    let notified: Vec<IdentityId> = sqlx::query_scalar(
        "select distinct identity_id
           from identity_moves
          where tenant_id = $1
            and (from_user = any ($2) or to_user = any ($2))",
    )
    .bind(tx.tenant_id())
    .bind(erasure.user_ids())
    .fetch_all(tx.connection())
    .await?;
    outbox::lock_chats(tx, &notified).await?;
    sqlx::query(
        "update deliveries d
            set payload = jsonb_build_object('text', $4::text),
                state = case when d.state in ('pending', 'leased') then 'cancelled' else d.state end,
                lease = null,
                ended_at = coalesce(d.ended_at, $5),
                visible_at = $5
          where d.tenant_id = $1
            and d.kind = 'security'
            and d.identity_id = any ($2)
            and exists (select 1
                          from unnest($3::text[]) as name
                         where strpos(', ' || (d.payload ->> 'text'), ', ' || name || ' ') > 0
                            or strpos(', ' || (d.payload ->> 'text'), ', ' || name || ', ') > 0)",
    )
    .bind(tx.tenant_id())
    .bind(&notified)
    .bind(&erasure.names)
    .bind(ERASED)
    .bind(now)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Deletes the direct chats of the identities, with all their deliveries.
pub async fn delete_chats(tx: &mut TenantTx, identities: &[IdentityRecord]) -> Result<()> {
    let platforms: Vec<&str> = identities
        .iter()
        .map(|identity| identity.name.platform().platform())
        .collect();
    let scopes: Vec<&str> = identities
        .iter()
        .map(|identity| identity.name.platform().scope().unwrap_or_default())
        .collect();
    // Built here: under row-level security only plain comparisons can use an index.
    let chat_refs: Vec<String> = identities
        .iter()
        .map(|identity| format!("dm:{}", identity.name.external_id()))
        .collect();
    sqlx::query(
        "delete from chats
          where tenant_id = $1
            and (platform, scope, chat_ref) in (select platform, scope, chat_ref
                                                  from unnest($2::text[], $3::text[], $4::text[])
                                                         as own (platform, scope, chat_ref))",
    )
    .bind(tx.tenant_id())
    .bind(platforms)
    .bind(scopes)
    .bind(chat_refs)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Deletes grants, codes, guesses, identity moves, presence, home channels and pending deliveries; then the
/// identities, and last the user, with the redirects of their old ids.
pub async fn delete_user(tx: &mut TenantTx, erasure: &Erasure) -> Result<()> {
    for statement in [
        "delete from conversation_grants
          where tenant_id = $1
            and user_id = $2",
        "delete from codes
          where tenant_id = $1
            and user_id = $2",
        "delete from home_channels
          where tenant_id = $1
            and user_id = $2",
    ] {
        sqlx::query(statement)
            .bind(tx.tenant_id())
            .bind(erasure.user_id)
            .execute(tx.connection())
            .await?;
    }
    sqlx::query(
        "delete from identity_moves
          where tenant_id = $1
            and (from_user = any ($2) or to_user = any ($2))",
    )
    .bind(tx.tenant_id())
    .bind(erasure.user_ids())
    .execute(tx.connection())
    .await?;
    sqlx::query(
        "delete from code_attempts
          where tenant_id = $1
            and subject = any ($2)",
    )
    .bind(tx.tenant_id())
    .bind(erasure.identity_id_texts())
    .execute(tx.connection())
    .await?;
    // Foreign keys delete the deliveries, presence, moves and codes of the identities, and the redirects.
    for statement in [
        "delete from identities
          where tenant_id = $1
            and user_id = $2",
        "delete from users
          where tenant_id = $1
            and id = $2",
    ] {
        sqlx::query(statement)
            .bind(tx.tenant_id())
            .bind(erasure.user_id)
            .execute(tx.connection())
            .await?;
    }
    Ok(())
}
