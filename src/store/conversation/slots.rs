//! Slots and their names: the current session of each session key.

use chrono::{DateTime, Utc};
use sqlx::postgres::PgRow;
use sqlx::{FromRow, Row};

use super::access_sql::access_columns;
use super::tips::{grantee, read_name, read_owner};
use crate::domain::conversation::session_name::{SessionKey, session_key_not_found};
use crate::domain::conversation::slot::{Current, NewSlot, Slot};
use crate::domain::people::access::{Access, Namespace, Visibility};
use crate::domain::values::paging::{Page, PageRequest, Position};
use crate::error::Result;
use crate::ids::{SessionId, SlotId, UserId};
use crate::store::TenantTx;

/// A slot with its current session. `$1` is the tenant, `$2` the caller's namespace, `$3` the user whose grants
/// count, `$4` now.
macro_rules! slot_from {
    ($from:literal) => {
        concat!(
            "select k.id as slot_id, k.key as slot_key, k.user_id as slot_user_id, k.agent, k.generation,
                    k.last_user_at, k.created_at, c.id as conversation_id, c.namespace, c.client_id,
                    c.user_id, home.key as session_key, t.id as session_id, t.last_active_at, ",
            access_columns!(namespace: "$2", user: "$3", now: "$4"),
            " from ",
            $from,
            " left join conversations c
                on c.tenant_id = $1
               and c.id = k.conversation_id
              left join sessions t
                on t.tenant_id = $1
               and t.id = c.tip_session_id
              left join slots home
                on home.tenant_id = $1
               and home.id = c.slot_id "
        )
    };
}

struct SlotRow(Slot);

impl FromRow<'_, PgRow> for SlotRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        read_slot(row)
            .map(Self)
            .map_err(|error| sqlx::Error::Decode(Box::new(error)))
    }
}

fn read_slot(row: &PgRow) -> Result<Slot> {
    let session_id: Option<SessionId> = row.try_get("session_id")?;
    let current = match session_id {
        Some(session_id) => Some(Current {
            session_id,
            name: read_name(row)?,
            owner: read_owner(row)?,
            last_active_at: row.try_get("last_active_at")?,
        }),
        None => None,
    };
    Ok(Slot {
        id: row.try_get("slot_id")?,
        key: row.try_get("slot_key")?,
        user_id: row.try_get("slot_user_id")?,
        agent: row.try_get("agent")?,
        generation: row.try_get("generation")?,
        last_user_at: row.try_get("last_user_at")?,
        created_at: row.try_get("created_at")?,
        current,
    })
}

/// The slot that `key` names for `access`: the caller's own names come first; then, for a user, the service's
/// names for slots of that user.
pub async fn find_id(
    tx: &mut TenantTx,
    access: &Access,
    key: &SessionKey,
) -> Result<Option<SlotId>> {
    Ok(sqlx::query_scalar(
        "select n.slot_id
           from slot_names n
           join slots k
             on k.tenant_id = $1
            and k.id = n.slot_id
          where n.tenant_id = $1
            and n.key = $3
            and (n.namespace = $2
                 or (n.namespace = '00000000-0000-0000-0000-000000000000' and k.user_id = $4))
          order by n.namespace = $2 desc
          limit 1",
    )
    .bind(tx.tenant_id())
    .bind(access.namespace.as_uuid())
    .bind(key.as_str())
    .bind(grantee(access))
    .fetch_optional(tx.connection())
    .await?)
}

pub async fn get(
    tx: &mut TenantTx,
    access: &Access,
    id: SlotId,
    now: DateTime<Utc>,
) -> Result<Slot> {
    let row: Option<SlotRow> = sqlx::query_as(concat!(
        slot_from!("slots k"),
        "where k.tenant_id = $1
           and k.id = $5"
    ))
    .bind(tx.tenant_id())
    .bind(access.namespace.as_uuid())
    .bind(grantee(access))
    .bind(now)
    .bind(id)
    .fetch_optional(tx.connection())
    .await?;
    // It existed a statement ago; its user may have been erased since.
    row.map(|row| row.0).ok_or_else(session_key_not_found)
}

/// Locks the slot until `tx` ends: switches of the slot and messages through it run one after the other.
pub async fn lock(tx: &mut TenantTx, id: SlotId) -> Result<()> {
    sqlx::query(
        "select id
           from slots
          where tenant_id = $1
            and id = $2
            for no key update",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Public for the bench that runs it beside the service.
pub const LOCK_CURRENT: &str = "select conversation_id
       from slots
      where tenant_id = $1
        and id = $2
        for no key update";

/// Locks the slot and returns its current conversation.
pub async fn lock_current(tx: &mut TenantTx, id: SlotId) -> Result<Option<SessionId>> {
    let current: Option<Option<SessionId>> = sqlx::query_scalar(LOCK_CURRENT)
        .bind(tx.tenant_id())
        .bind(id)
        .fetch_optional(tx.connection())
        .await?;
    Ok(current.flatten())
}

/// The current conversation of a slot.
pub async fn find_current(tx: &mut TenantTx, id: SlotId) -> Result<Option<SessionId>> {
    let current: Option<Option<SessionId>> = sqlx::query_scalar(
        "select conversation_id
           from slots
          where tenant_id = $1
            and id = $2",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .fetch_optional(tx.connection())
    .await?;
    Ok(current.flatten())
}

/// True if the conversation was created under the slot, or the slot was switched to it.
pub async fn has_conversation(
    tx: &mut TenantTx,
    id: SlotId,
    conversation_id: SessionId,
) -> Result<bool> {
    Ok(sqlx::query_scalar(
        "select exists (select 1
                          from slot_conversations
                         where tenant_id = $1
                           and slot_id = $2
                           and conversation_id = $3)",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .bind(conversation_id)
    .fetch_one(tx.connection())
    .await?)
}

/// Inserts a slot and its name in one statement, or nothing if a concurrent insert has the name: the primary key
/// of names decides. Postgres checks the foreign key at the end of the statement, so the name may come first.
pub async fn insert(
    tx: &mut TenantTx,
    namespace: Namespace,
    slot: &NewSlot,
    now: DateTime<Utc>,
) -> Result<bool> {
    let done = sqlx::query(
        "with name as (
           insert into slot_names (tenant_id, namespace, key, slot_id, home_slot_id)
           values ($1, $2, $3, $4, $4)
               on conflict on constraint slot_names_pkey do nothing
        returning tenant_id, slot_id, key
         )
         insert into slots (tenant_id, id, kind, key, user_id, identity_id, agent, last_user_at, created_at)
         select tenant_id, slot_id, $5, key, $6, $7, $8, $9, $9
           from name",
    )
    .bind(tx.tenant_id())
    .bind(namespace.as_uuid())
    .bind(slot.key.as_str())
    .bind(slot.id)
    .bind(slot.kind.as_str())
    .bind(slot.user_id)
    .bind(slot.identity_id)
    .bind(&slot.agent)
    .bind(now)
    .execute(tx.connection())
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Makes `conversation_id` the current conversation of the slot. The caller must have locked the slot.
pub async fn update_current(
    tx: &mut TenantTx,
    id: SlotId,
    conversation_id: SessionId,
    now: DateTime<Utc>,
) -> Result<()> {
    sqlx::query(
        "update slots
            set conversation_id = $3, generation = generation + 1, last_user_at = $4
          where tenant_id = $1
            and id = $2",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .bind(conversation_id)
    .bind(now)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Makes `conversation_id` the current conversation of a slot without one. The generation stays: no client has
/// seen another conversation there.
pub async fn update_if_empty(
    tx: &mut TenantTx,
    id: SlotId,
    conversation_id: SessionId,
) -> Result<()> {
    sqlx::query(
        "update slots
            set conversation_id = $3
          where tenant_id = $1
            and id = $2
            and conversation_id is null",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .bind(conversation_id)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Stores that a user has chosen the slot's current conversation again, without a switch.
pub async fn update_chosen_at(tx: &mut TenantTx, id: SlotId, now: DateTime<Utc>) -> Result<()> {
    sqlx::query(
        "update slots
            set last_user_at = $3
          where tenant_id = $1
            and id = $2",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .bind(now)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// Locks the slots that point to a conversation until `tx` ends, and returns them.
pub async fn lock_by_current(tx: &mut TenantTx, conversation_id: SessionId) -> Result<Vec<SlotId>> {
    Ok(sqlx::query_scalar(
        "select id
           from slots
          where tenant_id = $1
            and conversation_id = $2
          order by id
            for no key update",
    )
    .bind(tx.tenant_id())
    .bind(conversation_id)
    .fetch_all(tx.connection())
    .await?)
}

/// True if a slot that is not among `locked` points to the conversation.
pub async fn has_other_current(
    tx: &mut TenantTx,
    conversation_id: SessionId,
    locked: &[SlotId],
) -> Result<bool> {
    Ok(sqlx::query_scalar(
        "select exists (select 1
                          from slots
                         where tenant_id = $1
                           and conversation_id = $2
                           and id <> all ($3))",
    )
    .bind(tx.tenant_id())
    .bind(conversation_id)
    .bind(locked)
    .fetch_one(tx.connection())
    .await?)
}

/// Adds a conversation to the conversations of a slot.
pub async fn insert_conversation(
    tx: &mut TenantTx,
    id: SlotId,
    conversation_id: SessionId,
) -> Result<()> {
    sqlx::query(
        "insert into slot_conversations (tenant_id, slot_id, conversation_id)
         values ($1, $2, $3)
             on conflict on constraint slot_conversations_pkey do nothing",
    )
    .bind(tx.tenant_id())
    .bind(id)
    .bind(conversation_id)
    .execute(tx.connection())
    .await?;
    Ok(())
}

/// The slots that `access` may see, newest first, without slots that are folded into another.
pub async fn list(
    tx: &mut TenantTx,
    access: &Access,
    user_id: Option<UserId>,
    now: DateTime<Utc>,
    page: &PageRequest,
) -> Result<Page<Slot>> {
    let (user_id, service_only) = match access.visibility {
        Visibility::Tenant => (user_id, false),
        Visibility::Service => (user_id, true),
        Visibility::User(own) => (Some(own), false),
    };
    let rows: Vec<SlotRow> = sqlx::query_as(concat!(
        slot_from!("slots k"),
        "where k.tenant_id = $1
           and ($5::uuid is null or k.user_id = $5)
           and (not $6 or (k.user_id is null and k.key not like 'agent:%'))
           and exists (select 1
                         from slot_names n
                        where n.tenant_id = $1
                          and n.slot_id = k.id)
           and ($7::timestamptz is null or (k.created_at, k.id) < ($7, $8))
         order by k.created_at desc, k.id desc
         limit $9"
    ))
    .bind(tx.tenant_id())
    .bind(access.namespace.as_uuid())
    .bind(grantee(access))
    .bind(now)
    .bind(user_id)
    .bind(service_only)
    .bind(page.after.map(|after| after.created_at))
    .bind(page.after.map(|after| after.id))
    .bind(page.fetch_limit())
    .fetch_all(tx.connection())
    .await?;
    let slots = rows.into_iter().map(|row| row.0).collect();
    Ok(Page::cut(slots, page, |slot: &Slot| Position {
        created_at: slot.created_at,
        id: slot.id.as_uuid(),
    }))
}
