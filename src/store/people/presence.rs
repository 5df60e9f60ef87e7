//! When and in which slot identities were last seen. Written at most once a minute, so that not every message of
//! a chatty identity costs two writes. Presence is in no lock order, so it never waits: it skips a row that another
//! transaction is writing.

use chrono::{DateTime, Utc};
use sqlx::Row;
use sqlx::postgres::PgRow;
use sqlx::types::Json;

use super::identities;
use crate::domain::bridge::chat::Chat;
use crate::domain::conversation::session::SessionHandle;
use crate::domain::people::access::Access;
use crate::domain::people::presence::{GRAIN, Presence};
use crate::domain::people::user::Identity;
use crate::error::Result;
use crate::ids::{IdentityId, SessionId, SlotId, UserId};
use crate::store::TenantTx;
use crate::store::conversation::access_sql::access_columns;
use crate::store::conversation::tips::read_name;

/// The identity that sent a message, for its presence.
#[derive(Debug, Clone, Copy)]
pub struct PresenceUpdate {
    pub identity_id: IdentityId,
    pub slot_id: Option<SlotId>,
    pub at: DateTime<Utc>,
}

/// Updates a row that is a minute old or names another slot, unless another transaction has locked it; inserts
/// the first row. The insert may wait for a concurrent first insert, whose transaction is about to commit, too.
/// Public for the bench that runs it beside the service.
pub const WRITE: &str = "with due as (
       select p.identity_id
         from identity_presence p
        where p.tenant_id = $1
          and p.identity_id = $2
          and (p.last_seen_at <= $5 or p.slot_id is distinct from $4)
          for no key update skip locked
     ), moved as (
       update identity_presence p
          set last_seen_at = greatest(p.last_seen_at, $3), slot_id = $4
         from due
        where p.tenant_id = $1
          and p.identity_id = due.identity_id
     )
     insert into identity_presence (tenant_id, identity_id, last_seen_at, slot_id)
     select $1, i.id, $3, $4
       from identities i
      where i.tenant_id = $1
        and i.id = $2
        and not exists (select 1
                          from identity_presence p
                         where p.tenant_id = $1
                           and p.identity_id = $2)
        for key share skip locked
         on conflict on constraint identity_presence_pkey do nothing";

/// Only `TenantTx::commit` calls it.
pub(in crate::store) async fn write(tx: &mut TenantTx, seen: &PresenceUpdate) -> Result<()> {
    sqlx::query(WRITE)
        .bind(tx.tenant_id())
        .bind(seen.identity_id)
        .bind(seen.at)
        .bind(seen.slot_id)
        .bind(seen.at - GRAIN)
        .execute(tx.connection())
        .await?;
    Ok(())
}

/// Every identity of a user with its presence, the latest first.
pub async fn list(tx: &mut TenantTx, access: &Access, user_id: UserId) -> Result<Vec<Presence>> {
    let rows = sqlx::query(concat!(
        "select i.id as identity_id, i.platform, i.scope, i.external_id, p.last_seen_at, k.key as slot_key,
                t.id as session_id, c.id as conversation_id, c.namespace, c.client_id, c.user_id, ",
        access_columns!(hidden_from: "$3"),
        " as hidden, h.chat
           from identities i
           left join identity_presence p
             on p.tenant_id = $1
            and p.identity_id = i.id
           left join slots k
             on k.tenant_id = $1
            and k.id = p.slot_id
            and k.user_id = $2
           left join conversations c
             on c.tenant_id = $1
            and c.id = k.conversation_id
           left join sessions t
             on t.tenant_id = $1
            and t.id = c.tip_session_id
           left join home_channels h
             on h.tenant_id = $1
            and h.user_id = $2
            and h.identity_id = i.id
          where i.tenant_id = $1
            and i.user_id = $2
          order by p.last_seen_at desc nulls last, i.linked_at, i.id"
    ))
    .bind(tx.tenant_id())
    .bind(user_id)
    .bind(access.namespace.as_uuid())
    .fetch_all(tx.connection())
    .await?;
    rows.iter().map(read_presence).collect()
}

fn read_presence(row: &PgRow) -> Result<Presence> {
    let platform: String = row.try_get("platform")?;
    let scope: String = row.try_get("scope")?;
    let session_id: Option<SessionId> = row.try_get("session_id")?;
    let session = match session_id {
        Some(id) => Some(SessionHandle {
            id,
            name: read_name(row)?,
        }),
        None => None,
    };
    let chat: Option<Json<Chat>> = row.try_get("chat")?;
    Ok(Presence {
        identity: Identity {
            id: row.try_get("identity_id")?,
            name: identities::read_name(&platform, &scope, row.try_get("external_id")?)?,
        },
        last_seen_at: row.try_get("last_seen_at")?,
        session_key: row.try_get("slot_key")?,
        session,
        home_channel: chat.map(|Json(chat)| chat),
    })
}
