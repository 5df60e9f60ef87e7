//! Erasing a person at once: everything that is found by the person or by an account of theirs. Whoever
//! calls holds the person, their slots and their conversations. The rows of the accounts and the person
//! go last, and foreign keys refuse that while anything was forgotten.

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

/// Holds every slot of a person, and every other that leads to a conversation of theirs.
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

/// Holds a person so that nothing can come to refer to them any more, and waits for those who are
/// writing something that does. False if there is no such person.
pub async fn lock_user(tx: &mut TenantTx, user_id: UserId) -> Result<bool> {
    let there: Option<i32> = sqlx::query_scalar(
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
    Ok(there.is_some())
}

/// The names of a person's conversations, so that no client's id is given again.
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

/// Slots and names go, and the person's deleted conversations lose everything that tells whose they were:
/// their rows are left to a job. What they began in a chat that is everyone's stays, as nobody's.
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

/// What others were told of the person's accounts when they were joined or parted. What was not said yet
/// never is.
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

/// The chats of the accounts, with whatever was said or is still to be said there.
pub async fn delete_chats(tx: &mut TenantTx, accounts: &[IdentityRecord]) -> Result<()> {
    let platforms: Vec<&str> = accounts
        .iter()
        .map(|account| account.name.platform().platform())
        .collect();
    let scopes: Vec<&str> = accounts
        .iter()
        .map(|account| account.name.platform().scope().unwrap_or_default())
        .collect();
    // Made here: a policy lets only plain comparisons reach an index.
    let chat_refs: Vec<String> = accounts
        .iter()
        .map(|account| format!("dm:{}", account.name.external_id()))
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

/// Rights, codes, guesses, history, where they were heard and want to be reached, and what is still to be
/// said to them; then their accounts, and last the person, with the old ids that led there.
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
    // Deliveries, presence, moves and codes of the accounts, and the redirects, go by their foreign keys.
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
