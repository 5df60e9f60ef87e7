//! The rights of stream readers, checked again while they read: many readers of a tenant in one statement.

use chrono::{DateTime, Utc};
use sqlx::types::Uuid;

use crate::error::Result;
use crate::ids::{IdentityId, SessionId, SlotId, UserId};
use crate::store::TenantTx;
use crate::store::conversation::access_sql::access_columns;

/// A reader to check.
pub struct RightsQuery {
    pub conversation_id: Option<SessionId>,
    pub user_id: Option<UserId>,
    pub sender: Option<IdentityId>,
    pub slot_id: Option<SlotId>,
}

/// The columns that decide a reader's rights in the conversation.
#[derive(Debug, sqlx::FromRow)]
pub struct ReaderRights {
    /// Whether the conversation exists.
    pub exists: bool,
    /// The conversation's owner.
    pub user_id: Option<UserId>,
    pub session_key: Option<String>,
    pub granted: bool,
    /// The user into whom the reader was merged.
    pub survivor_id: Option<UserId>,
    /// Whether that user has a grant.
    pub survivor_granted: bool,
    /// The user who owns the sender's identity now.
    pub speaker_user_id: Option<UserId>,
    /// The slot's current conversation.
    pub slot_conversation_id: Option<SessionId>,
}

/// Public for the test that reads its plan.
pub const LIST: &str = concat!(
    "select c.id is not null as exists, c.user_id, k.key as session_key, ",
    access_columns!(granted_to: "a.user_id", now: "$6"),
    " as granted, r.user_id as survivor_id, ",
    access_columns!(granted_to: "r.user_id", now: "$6"),
    " as survivor_granted, i.user_id as speaker_user_id, s.conversation_id as slot_conversation_id
       from unnest($2::uuid[], $3::uuid[], $4::uuid[], $5::uuid[]) with ordinality
              as a (conversation_id, user_id, sender, slot_id, position)
       left join conversations c
         on c.tenant_id = $1
        and c.id = a.conversation_id
        and c.deleted_at is null
       left join slots k
         on k.tenant_id = $1
        and k.id = c.slot_id
       left join user_redirects r
         on r.tenant_id = $1
        and r.old_id = a.user_id
       left join identities i
         on i.tenant_id = $1
        and i.id = a.sender
       left join slots s
         on s.tenant_id = $1
        and s.id = a.slot_id
      order by a.position"
);

/// One row for each reader, in their order.
pub async fn list(
    tx: &mut TenantTx,
    readers: &[RightsQuery],
    now: DateTime<Utc>,
) -> Result<Vec<ReaderRights>> {
    let ids = |of: fn(&RightsQuery) -> Option<Uuid>| -> Vec<Option<Uuid>> {
        readers.iter().map(of).collect()
    };
    Ok(sqlx::query_as(LIST)
        .bind(tx.tenant_id())
        .bind(ids(|reader| reader.conversation_id.map(|id| id.as_uuid())))
        .bind(ids(|reader| reader.user_id.map(|id| id.as_uuid())))
        .bind(ids(|reader| reader.sender.map(|id| id.as_uuid())))
        .bind(ids(|reader| reader.slot_id.map(|id| id.as_uuid())))
        .bind(now)
        .fetch_all(tx.connection())
        .await?)
}
